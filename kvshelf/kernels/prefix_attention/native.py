"""Prefix attention in C, over prefixes, quantized or not, and suffixes, for the few rows of a decode step and the many
rows of a question. Torch computes many rows in bf16 where the processor has AMX.

With few rows bandwidth is the limit, and torch's attention reaches half of it on a CPU (1.6 to 2 times the time for
documents of 1024 entries, measured): it packs keys into blocks for products of matrices, once for each document. With
many rows products are the limit; C makes them for all query heads of a KV head together. The softmax over a suffix
continues the one over the prefixes, so that nothing is masked, gathered or combined afterwards. C dequantizes 32 rows
at a time, in the L1 cache; torch's operations write 1,024 dequantized rows several times over. A class of a merged
prefix is multiplied once, and its slots make one logit of it. `eager` computes streamed prefixes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvshelf.kernels.choose import native as choosing
from kvshelf.kernels.native import FEW_ROWS, LANES, TYPES, WIDTHS, Bf16Products, Part, bf16_products, run_parts
from kvshelf.kernels.prefix_attention import eager
from kvshelf.kernels.prefix_attention.prefixes import (
    BatchLayout,
    LogitRules,
    Prefix,
    SelectedPrefix,
    StreamedPrefix,
    SuffixRows,
    channels_of,
    choices_of,
    telling,
)
from kvshelf.kernels.prefix_attention.work import Setting, TabledPrefix, work_of
from kvshelf.kernels.quantize.rows import QuantizedRows, Rows

_RUNS = 8
"""Runs for each thread, where entries are enough, so that no thread waits long for the last run of another."""

_ITEMSIZE = torch.float32.itemsize
"""Bytes of an element of the queries in registers, whatever their dtype."""

_LEAST_RUN = 512
"""Fewest entries of a run, so that a run writes far fewer bytes than it reads."""


def prefix_attention(
    queries: Tensor,
    prefixes: Sequence[Sequence[Prefix]],
    suffixes: Sequence[tuple[Tensor, Tensor]],
    layout: BatchLayout,
    rules: LogitRules,
    weights: Sequence[Tensor | None] = (),
) -> Tensor:
    num_tokens, q_heads, dim = queries.shape
    rules = rules.within(layout)
    grouped = queries.reshape(num_tokens, suffixes[0][0].shape[1], -1, dim)  # [N, kv_heads, group, D]
    if not _takes_all(grouped, suffixes, layout):
        out, lse = eager.attend_both(attend_shares, queries, prefixes, suffixes, layout, rules)
        eager.tell_weights(queries, prefixes, suffixes, layout, rules, lse, weights)
        return out
    grouped = grouped.contiguous()
    if all(_computable(grouped, prefixes, layout)):
        out, lse = torch.empty(grouped.shape), torch.empty(grouped.shape[:3])
        run_parts([_part(grouped, prefixes, suffixes, layout, rules, (out, lse), weights)])
    else:
        out, lse = attend_shares(grouped, prefixes, dim, layout, rules)
        out, lse = out.float().contiguous(), lse.contiguous()
        run_parts([_part(grouped, (), suffixes, layout, rules, (out, lse), weights)])
    if weights:
        eager.tell_prefixes(queries, prefixes, layout, rules, lse.view(num_tokens, q_heads))
    return out.to(queries.dtype).view(num_tokens, q_heads, dim)


def attention_part(
    states: tuple[Tensor, Tensor, Tensor],
    prefixes: Sequence[Sequence[Prefix]],
    suffixes: Sequence[tuple[Tensor, Tensor]],
    layout: BatchLayout,
    rules: LogitRules,
    out: Tensor,
    scratch: Scratch,
    weights: Sequence[Tensor | None] = (),
) -> Part | None:
    """The attention of a batch for `run_parts`, which then also appends keys and values to the suffixes.

    states: queries `[1, q_heads, N, D]`, keys and values `[1, kv_heads, N, D]`, in fp32 or bf16, the heads of a
    token side by side, and those of all queries. out: `[N, q_heads, D]` fp32 contiguous. The other arguments are as in
    `prefix_attention`, but that the suffixes only have room for the new tokens. Until the part has run, the caller
    keeps all these tensors. None where C cannot attend to some of them, or fill the weights of a prefix.
    """
    if weights and any(map(telling, prefixes)):
        return None
    queries, keys, values = (state[0].transpose(0, 1) for state in states)  # [N, heads, D]
    if not (queries.is_contiguous() and all(x[0].is_contiguous() and x.dtype == queries.dtype for x in (keys, values))):
        return None
    tokens, _, dim = queries.shape
    grouped = queries.view(tokens, keys.shape[1], -1, dim)
    if not (_takes_all(grouped, suffixes, layout) and all(_computable(grouped, prefixes, layout))):
        return None
    rules = rules.within(layout)
    struct, references = _attention(queries.dtype, grouped.shape, prefixes, suffixes, layout, rules, scratch, weights)
    struct.queries, struct.out = queries.data_ptr(), out.data_ptr()
    struct.keys, struct.key_step = keys.data_ptr(), keys.stride(0)
    struct.values, struct.value_step = values.data_ptr(), values.stride(0)
    return Part(0, ctypes.addressof(struct), (struct, references))


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor, rules: LogitRules) -> tuple[Tensor, Tensor]:
    batch, q_heads, tokens, dim = queries.shape
    group = q_heads // keys.shape[1]
    takes_both = all(_takes(queries, states, tokens * group) for states in (keys, values))
    if batch != 1 or tokens != keys.shape[2] or not takes_both:
        return eager.causal_attention(queries, keys, values, rules)
    grouped = queries[0].transpose(0, 1).reshape(tokens, -1, group, dim).contiguous()  # [T, kv_heads, group, D]
    out, lse = torch.zeros(grouped.shape), torch.full(grouped.shape[:3], -torch.inf)
    layout = BatchLayout((tokens,), (SuffixRows((tokens,), (0,), tokens),), queries.device, (0,))
    run_parts([_part(grouped, (), [(keys, values)], layout, rules.within(layout), (out, lse))])
    out = out.to(queries.dtype)
    return out.view(1, tokens, q_heads, dim).transpose(1, 2), lse.view(tokens, q_heads).T.unsqueeze(0).contiguous()


def _takes_all(queries: Tensor, suffixes: Sequence[tuple[Tensor, Tensor]], layout: BatchLayout) -> bool:
    group = queries.shape[2]
    return all(
        _takes(queries, keys, rows.new * group) and _takes(queries, values)
        for rows, (keys, values) in zip(layout.suffixes, suffixes, strict=True)
    )


def _computable(queries: Tensor, prefixes: Sequence[Sequence[Prefix]], layout: BatchLayout) -> list[bool]:
    """Of each share, whether C can attend to its prefixes."""
    group = queries.shape[2]
    return [
        bool(parts) and all(_is_computable(part, queries, count * group) for part in parts)
        for parts, count in zip(prefixes, layout.shares, strict=True)
    ]


def _takes(queries: Tensor, states: Rows, rows: int = 1, dim: int | None = None) -> bool:
    """Whether C can attend with `rows` query rows of a KV head to keys or values `[..., D]`. C receives only addresses,
    so dtype, strides and sizes are checked here. dim: channels that the queries must have; None: D."""
    # C reads scales for 16 channels at once: these channels must be in 16 groups ("tokens") or in one.
    if isinstance(states, QuantizedRows):
        sound = states.axis == "tokens" or (states.group % LANES == 0 and states.num_channels in WIDTHS)
    else:
        sound = states.stride(-1) == 1
    few = rows <= FEW_ROWS or queries.dtype == torch.float32 or bf16_products() != Bf16Products.TILES
    dim = states.shape[-1] if dim is None else dim
    alike = states.dtype == queries.dtype and queries.shape[-1] == dim
    return sound and few and alike and queries.dtype in TYPES and dim in WIDTHS


def attend_shares(
    queries: Tensor, prefixes: Sequence[Sequence[Prefix]], value_dim: int, layout: BatchLayout, rules: LogitRules
) -> tuple[Tensor, Tensor]:
    """As `eager.attend_shares`, which computes the shares that C cannot."""
    computable = _computable(queries, prefixes, layout)
    if not any(computable):
        return eager.attend_shares(queries, prefixes, value_dim, layout, rules)
    parts_of_c = [parts if by_c else () for parts, by_c in zip(prefixes, computable, strict=True)]
    out, lse = torch.empty(queries.shape), torch.empty(queries.shape[:3])
    run_parts([_part(queries.contiguous(), parts_of_c, (), layout, rules, (out, lse))])
    for by_c, parts, count, end in zip(computable, prefixes, layout.shares, layout.share_ends, strict=True):
        if not by_c:
            tokens = slice(end - count, end)
            out[tokens], lse[tokens] = eager.attend_share(queries[tokens], parts, value_dim, rules.of(tokens))
    return out, lse


_VERDICTS: WeakKeyDictionary[Prefix, dict[tuple[object, ...], bool]] = WeakKeyDictionary()
"""The results of `_is_computable` for each prefix: a step asks for that of every document at every layer."""


def _is_computable(prefix: Prefix, queries: Tensor, rows: int) -> bool:
    verdicts, key = _VERDICTS.setdefault(prefix, {}), (queries.dtype, queries.shape[-1], rows <= FEW_ROWS)
    if key not in verdicts:
        verdicts[key] = _examine(prefix, queries, rows)
    return verdicts[key]


def _examine(prefix: Prefix, queries: Tensor, rows: int) -> bool:
    if isinstance(prefix, TabledPrefix):
        return True
    if isinstance(prefix, SelectedPrefix):
        chosen = prefix.choice is None or choosing.takes(prefix.choice, queries.dtype)
        return chosen and _is_computable(prefix.base, queries, rows)
    if isinstance(prefix, StreamedPrefix) or type(prefix.keys) is not type(prefix.values):
        return False
    dim = None if channels_of(prefix) is None else queries.shape[-1]  # pruned keys may have fewer
    return _takes(queries, prefix.keys, rows, dim) and _takes(queries, prefix.values, rows)


class Scratch:
    """Memory for the intermediate results of attentions. Attentions that run one after the other may share it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def room(self, *elements: int) -> tuple[object, list[int]]:
        """Memory for parts of so many fp32 numbers, and the address of each part. The caller keeps it while it is
        used."""
        if self._memory.numel() < sum(elements):
            self._memory = torch.empty(sum(elements))
        ends = accumulate(elements[:-1], initial=0)
        return self._memory, [self._memory.data_ptr() + end * self._memory.itemsize for end in ends]


class _Launch(ctypes.Structure):
    """See `native.c`, as for the others."""

    _fields_ = (
        ("items", ctypes.c_void_p), ("count", ctypes.c_int64), ("merged", ctypes.c_int64),
        ("keys", ctypes.c_int64 * 5), ("values", ctypes.c_int64 * 5),
    )  # fmt: skip


class _Suffixes(ctypes.Structure):
    _fields_ = (
        ("keys", ctypes.c_void_p), ("values", ctypes.c_void_p), ("strides", ctypes.c_int64 * 6),
        ("table", ctypes.c_void_p), ("rows", ctypes.c_int64), ("new", ctypes.c_int64), ("weights", ctypes.c_void_p),
        ("step", ctypes.c_int64), ("observed", ctypes.c_void_p),
    )  # fmt: skip


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values")),
        *((name, ctypes.c_int64) for name in ("key_step", "value_step", "tokens", "kv_heads", "group", "dim")),
        ("launches", ctypes.c_void_p), ("num_launches", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("outs", "lses", "shares", "places", "suffixes")),
        ("num_suffixes", ctypes.c_int64), ("out", ctypes.c_void_p), ("lse", ctypes.c_void_p),
        ("scale", ctypes.c_double), ("softcap", ctypes.c_double), ("since", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p), ("type", ctypes.c_int64), ("choices", ctypes.c_void_p),
        ("choosers", ctypes.c_void_p), ("num_choices", ctypes.c_int64),
    )  # fmt: skip


def _part(
    queries: Tensor,
    prefixes: Sequence[Sequence[Prefix]],
    suffixes: Sequence[tuple[Tensor, Tensor]],
    layout: BatchLayout,
    rules: LogitRules,
    results: tuple[Tensor, Tensor],
    weights: Sequence[Tensor | None] = (),
) -> Part:
    """queries: `[N, kv_heads, group, D]` contiguous. results: fp32 output in the shape of the queries, and log-sum-exps
    without D; where `prefixes` is empty, they hold those of the prefixes already."""
    struct, references = _attention(queries.dtype, queries.shape, prefixes, suffixes, layout, rules, Scratch(), weights)
    struct.queries = queries.data_ptr()
    struct.out, struct.lse = (result.data_ptr() for result in results)
    return Part(0, ctypes.addressof(struct), (struct, references, queries, results))


def _attention(
    dtype: torch.dtype,
    shape: Sequence[int],
    prefixes: Sequence[Sequence[Prefix]],
    suffixes: Sequence[tuple[Tensor, Tensor]],
    layout: BatchLayout,
    rules: LogitRules,
    scratch: Scratch,
    weights: Sequence[Tensor | None],
) -> tuple[_Attention, object]:
    """The struct of an attention, without the addresses of its queries and output, and the objects that it points to.
    Its log-sum-exps are in the scratch. shape: of the queries, `[N, kv_heads, group, D]`."""
    tokens, kv_heads, group, dim = shape
    struct = _Attention(tokens=tokens, kv_heads=kv_heads, group=group, dim=dim, type=TYPES[dtype])
    struct.scale, struct.softcap = rules.scale, rules.softcap
    struct.since, struct.sinks = (0 if table is None else table.data_ptr() for table in (rules.since, rules.sinks))
    references: list[object] = [layout, suffixes, rules]
    lses, runs = tokens * kv_heads * group, 0
    ends = zip(prefixes, layout.share_ends, strict=False)
    choices = [(choice, end - 1) for parts, end in ends for choice in choices_of(parts)]  # each by one token
    if prefixes:
        setting = Setting(kv_heads, group, _ITEMSIZE, _RUNS * torch.get_num_threads(), _LEAST_RUN)
        table = work_of(prefixes, layout, setting)
        struct.shares, struct.places = table.shares.data_ptr(), layout.tables[0].data_ptr()
        launches = (_Launch * len(table.launches))()
        for launch, (kind, items) in zip(launches, table.launches, strict=True):
            launch.items, launch.count, launch.merged = items.data_ptr(), len(items), kind.merged
            launch.keys[:], launch.values[:] = kind.keys[:5], kind.values[:5]
        struct.launches, struct.num_launches = ctypes.addressof(launches), len(launches)
        references += [table, launches]
        runs = table.scratch_rows
    of_rows = (_Suffixes * len(suffixes))()
    for suffix, rows, at, (k, v) in zip(of_rows, layout.suffixes, layout.tables[1], suffixes, strict=False):
        suffix.keys, suffix.values = k.data_ptr(), v.data_ptr()
        suffix.strides[:] = (*k.stride()[:3], *v.stride()[:3])
        suffix.table, suffix.rows, suffix.new = at.data_ptr(), len(at), rows.new
    for suffix, into, observed in zip(of_rows, weights, layout.observed, strict=False):
        if into is not None and observed is not None:
            suffix.weights, suffix.step, suffix.observed = into.data_ptr(), into.shape[2], observed.data_ptr()
            references += [into, observed]
    struct.suffixes, struct.num_suffixes = ctypes.addressof(of_rows), len(of_rows)
    ranks = [kv_heads * choosing.most_units(choice) for choice, _ in choices]
    memory, (struct.lse, struct.outs, struct.lses, *of_ranks) = scratch.room(lses, runs * dim, runs, *ranks)
    structs, tokens_of = (choosing.ChoiceStruct * len(choices))(), (ctypes.c_int64 * len(choices))()
    for i, ((choice, token), ranks_at) in enumerate(zip(choices, of_ranks, strict=True)):
        structs[i], points_to = choosing.struct_of(choice, dtype, (kv_heads, group, dim))
        structs[i].ranks, tokens_of[i] = ranks_at, token
        references.append(points_to)
    struct.choices, struct.choosers = ctypes.addressof(structs), ctypes.addressof(tokens_of)
    struct.num_choices = len(choices)
    return struct, [*references, of_rows, memory, structs, tokens_of]
