"""Prefix and suffix attended apart and combined by log-sum-exp, so that the prefix is read in place.

Bytes: every prefix key and value once per 512 queries, for all rows of the batch together. FLOPs: 2 * q_heads * T * (K
+ S) * (D + Dv) for a dense prefix; `prefixes.py` says what the other kinds cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvshelf.kernels.prefix_attention.attend import attend, combine
from kvshelf.kernels.prefix_attention.prefixes import Prefix

_QUERIES_PER_BLOCK = 512
"""Longer questions go in blocks of rows, so that the causal mask of the suffix stays small."""


def prefix_attention(
    queries: Tensor,
    prefix: Sequence[Sequence[Prefix]],
    suffix_keys: Tensor,
    suffix_values: Tensor,
    scale: float,
) -> Tensor:
    """softmax(scale * q [prefix_keys; suffix_keys]^T) [prefix_values; suffix_values], the suffix causal.

    queries: `[B, q_heads, T, D]`, the last T tokens of the suffix. prefix: for each KV head a sequence of prefixes with
    disjoint tokens, all visible to every query of every batch row; a sequence, or a prefix in it, may be empty.
    suffix_keys: `[B, kv_heads, S, D]`, suffix_values: `[B, kv_heads, S, Dv]`, with S >= T >= 1; query t sees the first
    S - T + t + 1 of them. Query head h reads KV head h // (q_heads // kv_heads). Returns `[B, q_heads, T, Dv]` in the
    dtype of the queries; softmax in fp32.
    """
    visible = suffix_keys.shape[2] - queries.shape[2]
    outs = []
    for block in torch.split(queries, _QUERIES_PER_BLOCK, dim=2):
        visible += block.shape[2]
        suffix = _attend_suffix(block, suffix_keys[:, :, :visible], suffix_values[:, :, :visible], scale)
        out, _ = combine(*_attend_prefix(block, prefix, suffix_values.shape[-1], scale), *suffix)
        outs.append(out.to(queries.dtype))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _attend_prefix(
    queries: Tensor, prefix: Sequence[Sequence[Prefix]], value_dim: int, scale: float
) -> tuple[Tensor, Tensor]:
    batch, q_heads, num_queries, dim = queries.shape
    kv_heads = len(prefix)
    group = q_heads // kv_heads
    # Every row of the batch and every query head of a group reads the same keys, and nothing is masked: they fold into
    # one long list of rows per KV head. [kv_heads, B * group * T, D]
    rows = queries.view(batch, kv_heads, group, num_queries, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
    heads = [_attend_all(row, parts, value_dim, scale) for row, parts in zip(rows, prefix, strict=True)]
    shape = (kv_heads, batch, group, num_queries)
    out = torch.cat([out for out, _ in heads]).reshape(*shape, value_dim).transpose(0, 1)
    lse = torch.cat([lse for _, lse in heads]).reshape(shape).transpose(0, 1)
    return out.reshape(batch, q_heads, num_queries, value_dim), lse.reshape(batch, q_heads, num_queries)


def _attend_all(rows: Tensor, parts: Sequence[Prefix], value_dim: int, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of one KV head's rows `[R, D]` over the union of its prefixes."""
    if not parts:
        return rows.new_zeros(rows.shape[0], value_dim), rows.new_full(rows.shape[:1], -torch.inf, dtype=torch.float32)
    out, lse = parts[0].attend(rows, scale)
    for part in parts[1:]:
        out, lse = combine(out, lse, *part.attend(rows, scale))
    return out, lse


def _attend_suffix(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, q_heads, num_queries, dim = queries.shape
    kv_heads, suffix_len = keys.shape[1:3]
    group = q_heads // kv_heads
    rows = queries.reshape(batch, kv_heads, group * num_queries, dim)
    mask = None
    if num_queries > 1:
        visible = torch.ones(num_queries, suffix_len, dtype=torch.bool, device=keys.device)
        visible = visible.tril(suffix_len - num_queries).repeat(group, 1)  # [group * T, S]
        mask = torch.zeros(visible.shape, dtype=queries.dtype, device=keys.device).masked_fill_(~visible, -torch.inf)
    out, lse = attend(rows, keys, values, scale, mask)
    return out.reshape(batch, q_heads, num_queries, -1), lse.reshape(batch, q_heads, num_queries)
