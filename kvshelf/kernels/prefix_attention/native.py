"""Prefix attention in C over prefixes, quantized or not, and suffixes: for the few rows of a decode step, and in fp32
for the many rows of a question.

With few rows bandwidth is the limit, and torch's attention reaches half of it on a CPU (1.6 to 2 times the time for
documents of 1024 entries, measured): it packs keys into blocks for products of matrices, once for each document. With
many rows products are the limit; C makes them for all query heads of a KV head together. The softmax over a suffix
continues that over the prefixes, so that nothing is masked, gathered or combined after. C dequantizes 32 rows at a
time, in the L1 cache; torch's operations write 1,024 dequantized rows several times over. Everything else is computed
as in `eager`: questions in bf16, and merged or streamed prefixes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvshelf.kernels.native import FEW_ROWS, LANES, TYPES, WIDTHS, Part, run
from kvshelf.kernels.prefix_attention import eager
from kvshelf.kernels.prefix_attention.prefixes import BatchLayout, PackedPrefix, Prefix, StackedPrefix, SuffixRows
from kvshelf.kernels.prefix_attention.work import Setting, work_of
from kvshelf.kernels.quantize.rows import QuantizedRows, Rows

_LEAST_RUN = 512
"""Fewest entries of a run, so that a run writes far fewer bytes than it reads."""


def prefix_attention(
    queries: Tensor,
    prefixes: Sequence[Sequence[Prefix]],
    suffixes: Sequence[tuple[Tensor, Tensor]],
    layout: BatchLayout,
    scale: float,
) -> Tensor:
    """See `kvshelf.kernels.prefix_attention.prefix_attention`."""
    num_tokens, q_heads, dim = queries.shape
    grouped = queries.reshape(num_tokens, suffixes[0][0].shape[1], -1, dim)  # [N, kv_heads, group, D]
    if not _takes_all(grouped, suffixes, layout):
        return eager.attend_both(_attend_shares, queries, prefixes, suffixes, layout, scale)
    results = Results.of(grouped)
    ours = _ours(grouped, prefixes, layout)
    if all(ours):
        run([_part(grouped.contiguous(), prefixes, suffixes, layout, scale, results)])
    else:
        out, lse = _attend_shares(grouped, prefixes, dim, layout, scale)
        results = Results.given(out.float().contiguous(), lse.contiguous())
        run([_part(grouped.contiguous(), (), suffixes, layout, scale, results)])
    return results.out.to(queries.dtype).view(num_tokens, q_heads, dim)


def attention_part(
    states: tuple[Tensor, Tensor, Tensor],
    prefixes: Sequence[Sequence[Prefix]],
    suffixes: Sequence[tuple[Tensor, Tensor]],
    layout: BatchLayout,
    scale: float,
    results: Results,
) -> Part | None:
    """Attention of a batch that is still to be run, and then appends its tokens' keys and values to the suffixes.

    states: queries `[N, q_heads, D]` contiguous, keys and values `[N, kv_heads, D]`, each token's contiguous; fp32. The
    rest as in `prefix_attention`, but that suffixes have only room for the new tokens. The caller keeps all tensors,
    until it has run. None where C cannot attend to some of them.
    """
    queries, keys, values = states
    num_tokens, _, dim = queries.shape
    grouped = queries.view(num_tokens, keys.shape[1], -1, dim)
    plain = all(states.dtype == torch.float32 and states[0].is_contiguous() for states in (queries, keys, values))
    if not (plain and _takes_all(grouped, suffixes, layout) and all(_ours(grouped, prefixes, layout))):
        return None
    return _part(grouped, prefixes, suffixes, layout, scale, results, (keys, values))


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """See `kvshelf.kernels.prefix_attention.causal_attention`."""
    batch, q_heads, tokens, dim = queries.shape
    group = q_heads // keys.shape[1]
    ours = batch == 1 and all(_takes(queries, states, tokens * group) for states in (keys, values))
    if not ours:
        return eager.causal_attention(queries, keys, values, scale)
    grouped = queries[0].transpose(0, 1).reshape(tokens, -1, group, dim).contiguous()  # [T, kv_heads, group, D]
    results = Results.given(torch.zeros(grouped.shape), torch.full(grouped.shape[:3], -torch.inf))
    layout = BatchLayout((tokens,), (SuffixRows((tokens,), (0,), tokens),), queries.device)
    run([_part(grouped, (), [(keys, values)], layout, scale, results)])
    out, lse = results.out.to(queries.dtype), results.lse
    return out.view(1, tokens, q_heads, dim).transpose(1, 2), lse.view(tokens, q_heads).T.unsqueeze(0).contiguous()


def _takes_all(queries: Tensor, suffixes: Sequence[tuple[Tensor, Tensor]], layout: BatchLayout) -> bool:
    group = queries.shape[2]
    return all(
        _takes(queries, keys, rows.new * group) and _takes(queries, values)
        for rows, (keys, values) in zip(layout.suffixes, suffixes, strict=True)
    )


def _ours(queries: Tensor, prefixes: Sequence[Sequence[Prefix]], layout: BatchLayout) -> list[bool]:
    """Of each share, whether C can attend to its prefixes."""
    group = queries.shape[2]
    return [
        bool(parts) and all(_is_ours(part, queries, count * group) for part in parts)
        for parts, count in zip(prefixes, layout.shares, strict=True)
    ]


def _takes(queries: Tensor, states: Tensor, rows: int = 1) -> bool:
    """Whether C can attend with `rows` query rows of a KV head to plain states `[..., D]`. C receives only addresses,
    so dtype, strides and sizes are checked here."""
    return states.dtype == queries.dtype and states.stride(-1) == 1 and _fits(queries, states.shape[-1], rows)


def _fits(queries: Tensor, dim: int, rows: int) -> bool:
    few = rows <= FEW_ROWS or queries.dtype == torch.float32
    return few and queries.dtype in TYPES and queries.shape[-1] == dim and dim in WIDTHS


def _attend_shares(
    queries: Tensor, prefixes: Sequence[Sequence[Prefix]], value_dim: int, layout: BatchLayout, scale: float
) -> tuple[Tensor, Tensor]:
    """See `eager.attend_shares`. `eager` fills in the shares that C cannot compute."""
    ours = _ours(queries, prefixes, layout)
    if not any(ours):
        return eager.attend_shares(queries, prefixes, value_dim, layout, scale)
    mine = [parts if own else () for parts, own in zip(prefixes, ours, strict=True)]
    results = Results.of(queries)
    run([_part(queries.contiguous(), mine, (), layout, scale, results)])
    for own, parts, count, end in zip(ours, prefixes, layout.shares, layout.share_ends, strict=True):
        if not own:
            tokens = slice(end - count, end)
            results.out[tokens], results.lse[tokens] = eager.attend_share(queries[tokens], parts, value_dim, scale)
    return results.out, results.lse


_VERDICTS: WeakKeyDictionary[Prefix, dict[tuple[object, ...], bool]] = WeakKeyDictionary()
"""What `_is_ours` said of each prefix: a step asks it of every document at every layer."""


def _is_ours(prefix: Prefix, queries: Tensor, rows: int) -> bool:
    said, of = _VERDICTS.setdefault(prefix, {}), (queries.dtype, queries.shape[-1], rows <= FEW_ROWS)
    if of not in said:
        said[of] = _looked_at(prefix, queries, rows)
    return said[of]


def _looked_at(prefix: Prefix, queries: Tensor, rows: int) -> bool:
    if not isinstance(prefix, PackedPrefix | StackedPrefix) or type(prefix.keys) is not type(prefix.values):
        return False
    return all(_takes_rows(queries, states, rows) for states in (prefix.keys, prefix.values))


def _takes_rows(queries: Tensor, states: Rows, rows: int) -> bool:
    if not isinstance(states, QuantizedRows):
        return _takes(queries, states, rows)
    # C reads scales for 16 channels at once: these channels must be in 16 groups ("tokens") or in one.
    whole = states.axis == "tokens" or states.group % LANES == 0
    return whole and states.dtype == queries.dtype and _fits(queries, states.num_channels, rows)


@dataclass(eq=False)
class Results:
    """What attention gives: `out` `[N, kv_heads, group, D]` and log-sum-exps `lse` without D, both fp32. `of_runs`:
    memory for what runs of prefixes give; attentions that run one after the other may share it, and `lse`."""

    out: Tensor
    lse: Tensor
    of_runs: Tensor

    @classmethod
    def of(cls, queries: Tensor) -> Results:
        """Room for those of queries `[N, kv_heads, group, D]`."""
        return cls.given(torch.empty(queries.shape), torch.empty(queries.shape[:3]))

    @classmethod
    def given(cls, out: Tensor, lse: Tensor) -> Results:
        return cls(out, lse, torch.empty(0))


class _Launch(ctypes.Structure):
    """See `native.c`, as for the others."""

    _fields_ = (
        ("items", ctypes.c_void_p), ("count", ctypes.c_int64), ("keys", ctypes.c_int64 * 4),
        ("values", ctypes.c_int64 * 4),
    )  # fmt: skip


class _Suffixes(ctypes.Structure):
    _fields_ = (
        ("keys", ctypes.c_void_p), ("values", ctypes.c_void_p), ("strides", ctypes.c_int64 * 6),
        ("table", ctypes.c_void_p), ("rows", ctypes.c_int64), ("new", ctypes.c_int64),
    )  # fmt: skip


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values")),
        *((name, ctypes.c_int64) for name in ("key_step", "value_step", "tokens", "kv_heads", "group", "dim")),
        ("launches", ctypes.c_void_p), ("num_launches", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("outs", "lses", "shares", "places", "suffixes")),
        ("num_suffixes", ctypes.c_int64), ("out", ctypes.c_void_p), ("lse", ctypes.c_void_p),
        ("scale", ctypes.c_double), ("type", ctypes.c_int64),
    )  # fmt: skip


def _part(
    queries: Tensor,
    prefixes: Sequence[Sequence[Prefix]],
    suffixes: Sequence[tuple[Tensor, Tensor]],
    layout: BatchLayout,
    scale: float,
    results: Results,
    new: tuple[Tensor, Tensor] | None = None,
) -> Part:
    """queries: `[N, kv_heads, group, D]` contiguous. Without prefixes `results` holds what they gave. new: keys and
    values `[N, kv_heads, D]` that are to be appended to the suffixes; None where they are there."""
    tokens, kv_heads, group, dim = queries.shape
    found = _Attention(
        queries=queries.data_ptr(), tokens=tokens, kv_heads=kv_heads, group=group, dim=dim,
        out=results.out.data_ptr(), lse=results.lse.data_ptr(), scale=scale, type=TYPES[queries.dtype],
    )  # fmt: skip
    held: list[object] = [found, queries, new, suffixes, layout]
    if new is not None:
        (found.keys, found.key_step), (found.values, found.value_step) = ((x.data_ptr(), x.stride(0)) for x in new)
    if prefixes:
        setting = Setting(kv_heads, group, queries.itemsize, torch.get_num_threads(), _LEAST_RUN)
        table = work_of(prefixes, layout, setting)
        needed = table.scratch_rows * (dim + 1)
        if results.of_runs.numel() < needed:
            results.of_runs = torch.empty(needed)
        found.outs = at = results.of_runs.data_ptr()
        found.lses = at + table.scratch_rows * dim * results.of_runs.itemsize
        found.shares, found.places = table.shares.data_ptr(), layout.tables[0].data_ptr()
        launches = (_Launch * len(table.launches))(
            *((items.data_ptr(), len(items), kind.keys[:4], kind.values[:4]) for kind, items in table.launches)
        )
        found.launches, found.num_launches = ctypes.addressof(launches), len(launches)
        held += [table, launches, results.of_runs]
    if suffixes:
        of_rows = (_Suffixes * len(suffixes))(
            *(
                (k.data_ptr(), v.data_ptr(), (*k.stride()[:3], *v.stride()[:3]), at.data_ptr(), len(at), rows.new)
                for rows, at, (k, v) in zip(layout.suffixes, layout.tables[1], suffixes, strict=True)
            )
        )
        found.suffixes, found.num_suffixes = ctypes.addressof(of_rows), len(of_rows)
        held.append(of_rows)
    return Part(0, ctypes.addressof(found), held)
