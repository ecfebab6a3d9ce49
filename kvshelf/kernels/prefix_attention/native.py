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
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvshelf.kernels.native import FEW_ROWS, LANES, TYPES, WIDTHS, compiled, pointer
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
    kv_heads = suffixes[0][0].shape[1]
    ours = all(
        _takes(queries, keys, rows.new * q_heads // kv_heads) and _takes(queries, values)
        for rows, (keys, values) in zip(layout.suffixes, suffixes, strict=True)
    )
    if not ours:
        return eager.attend_both(_attend_shares, queries, prefixes, suffixes, layout, scale)
    grouped = queries.reshape(num_tokens, kv_heads, -1, dim).contiguous()  # [N, kv_heads, group, D]
    out, lse = _attend_shares(grouped, prefixes, dim, layout, scale)
    out, lse = out.float().contiguous(), lse.contiguous()
    _add_suffixes(out, lse, grouped, suffixes, layout, scale)
    return out.to(queries.dtype).view(num_tokens, q_heads, dim)


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """See `kvshelf.kernels.prefix_attention.causal_attention`."""
    batch, q_heads, tokens, dim = queries.shape
    group = q_heads // keys.shape[1]
    ours = batch == 1 and all(_takes(queries, states, tokens * group) for states in (keys, values))
    if not ours:
        return eager.causal_attention(queries, keys, values, scale)
    grouped = queries[0].transpose(0, 1).reshape(tokens, -1, group, dim).contiguous()  # [T, kv_heads, group, D]
    out = torch.zeros(grouped.shape)
    lse = torch.full(grouped.shape[:3], -torch.inf)
    layout = BatchLayout((tokens,), (SuffixRows((tokens,), (0,), tokens),), queries.device)
    _add_suffixes(out, lse, grouped, [(keys, values)], layout, scale)
    out = out.to(queries.dtype)
    return out.view(1, tokens, q_heads, dim).transpose(1, 2), lse.view(tokens, q_heads).T.unsqueeze(0).contiguous()


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
    group = queries.shape[2]
    ours = [
        bool(parts) and all(_is_ours(part, queries, count * group) for part in parts)
        for parts, count in zip(prefixes, layout.shares, strict=True)
    ]
    if not any(ours):
        return eager.attend_shares(queries, prefixes, value_dim, layout, scale)
    mine = [parts if own else () for parts, own in zip(prefixes, ours, strict=True)]
    out, lse = _attend_runs(queries.contiguous(), mine, layout, scale)
    for own, parts, count, end in zip(ours, prefixes, layout.shares, layout.share_ends, strict=True):
        if not own:
            tokens = slice(end - count, end)
            out[tokens], lse[tokens] = eager.attend_share(queries[tokens], parts, value_dim, scale)
    return out, lse


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


def _attend_runs(
    queries: Tensor, prefixes: Sequence[Sequence[Prefix]], layout: BatchLayout, scale: float
) -> tuple[Tensor, Tensor]:
    """Output `[N, kv_heads, group, D]` and log-sum-exp `[N, kv_heads, group]`, fp32; 0 and -inf without a prefix."""
    native = compiled()
    _, kv_heads, group, dim = queries.shape
    threads = torch.get_num_threads()
    table = work_of(prefixes, layout, Setting(kv_heads, group, queries.itemsize, threads, _LEAST_RUN))
    outs = queries.new_empty(table.scratch_rows, dim, dtype=torch.float32)
    lses = queries.new_empty(table.scratch_rows, dtype=torch.float32)
    shape = _shape(queries)
    for kind, items in table.launches:
        native.kvshelf_attend_runs(
            pointer(queries), pointer(items), ctypes.c_int64(len(items)), pointer(outs), pointer(lses), *shape,
            (ctypes.c_int64 * 8)(*kind.keys[:4], *kind.values[:4]), ctypes.c_float(scale), TYPES[queries.dtype],
            threads,
        )  # fmt: skip
    out = queries.new_empty(queries.shape, dtype=torch.float32)
    lse = queries.new_empty(queries.shape[:3], dtype=torch.float32)
    native.kvshelf_unite_runs(
        pointer(outs), pointer(lses), (ctypes.c_int64 * len(layout.shares))(*layout.shares), pointer(table.shares),
        ctypes.c_int64(len(layout.shares)), pointer(out), pointer(lse), *shape,
    )  # fmt: skip
    return out, lse


def _add_suffixes(
    out: Tensor,
    lse: Tensor,
    queries: Tensor,
    suffixes: Sequence[tuple[Tensor, Tensor]],
    layout: BatchLayout,
    scale: float,
) -> None:
    """Add the suffixes, in place, to the prefixes' fp32 results: `[N, kv_heads, group, D]`, `[N, kv_heads, group]`."""
    native = compiled()
    for rows, table, (keys, values) in zip(layout.suffixes, layout.tables[1], suffixes, strict=True):
        strides = (ctypes.c_int64 * 6)(*keys.stride()[:3], *values.stride()[:3])
        native.kvshelf_attend_suffixes(
            pointer(queries), pointer(keys), pointer(values), strides, pointer(table), ctypes.c_int64(len(table)),
            ctypes.c_int64(rows.new), pointer(out), pointer(lse), *_shape(queries), ctypes.c_float(scale),
            TYPES[queries.dtype], torch.get_num_threads(),
        )  # fmt: skip


def _shape(queries: Tensor) -> list[Any]:
    """KV heads, group and D of `[N, kv_heads, group, D]`."""
    return [ctypes.c_int64(size) for size in queries.shape[1:]]
