"""Prefix and suffix attended apart and combined by log-sum-exp, so that the prefix is read in place.

Bytes: every prefix key and value once per call, for all rows of the batch together. FLOPs: 4 * q_heads * T * (K + S) *
D.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_QUERIES_PER_BLOCK = 512
"""Longer questions go in blocks of rows, so that the causal mask of the suffix stays small."""

_LOGITS_PER_BLOCK = 1 << 22
"""Most logits held at once by the generic path: 16 MiB of fp32, whatever the length of question and prefix."""


def prefix_attention(
    queries: Tensor,
    prefix: Sequence[tuple[Tensor, Tensor]],
    suffix_keys: Tensor,
    suffix_values: Tensor,
    scale: float,
) -> Tensor:
    """softmax(scale * q [prefix_keys; suffix_keys]^T) [prefix_values; suffix_values], the suffix causal.

    queries: `[B, q_heads, T, D]`, the last T tokens of the suffix. prefix: for each KV head keys `[K_h, D]` and values
    `[K_h, Dv]`, all visible to every query of every batch row; a head may be empty. suffix_keys: `[B, kv_heads, S, D]`,
    suffix_values: `[B, kv_heads, S, Dv]`, with S >= T >= 1; query t sees the first S - T + t + 1 of them. Query head h
    reads KV head h // (q_heads // kv_heads). Returns `[B, q_heads, T, Dv]` in the dtype of the queries; softmax in
    fp32.
    """
    visible = suffix_keys.shape[2] - queries.shape[2]
    outs = []
    for block in torch.split(queries, _QUERIES_PER_BLOCK, dim=2):
        visible += block.shape[2]
        suffix_out, suffix_lse = _attend_suffix(
            block, suffix_keys[:, :, :visible], suffix_values[:, :, :visible], scale
        )
        prefix_out, prefix_lse = _attend_prefix(block, prefix, scale)
        lse = torch.logaddexp(prefix_lse, suffix_lse)
        out = prefix_out.float() * (prefix_lse - lse).exp().unsqueeze(-1)
        out += suffix_out.float() * (suffix_lse - lse).exp().unsqueeze(-1)
        outs.append(out.to(queries.dtype))
    return torch.cat(outs, dim=2)


def _attend_prefix(queries: Tensor, prefix: Sequence[tuple[Tensor, Tensor]], scale: float) -> tuple[Tensor, Tensor]:
    batch, q_heads, num_queries, dim = queries.shape
    kv_heads = len(prefix)
    group = q_heads // kv_heads
    # Every row of the batch and every query head of a group reads the same keys, and nothing is masked: they fold into
    # one long list of rows per KV head. [kv_heads, B * group * T, D]
    rows = queries.view(batch, kv_heads, group, num_queries, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
    heads = [
        _attend(row.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), scale)
        for row, (keys, values) in zip(rows, prefix, strict=True)
    ]
    shape = (kv_heads, batch, group, num_queries)
    out = torch.cat([out for out, _ in heads]).reshape(*shape, -1).transpose(0, 1)
    lse = torch.cat([lse for _, lse in heads]).reshape(shape).transpose(0, 1)
    return out.reshape(batch, q_heads, num_queries, -1), lse.reshape(batch, q_heads, num_queries)


def _attend_suffix(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, q_heads, num_queries, dim = queries.shape
    kv_heads, suffix_len = keys.shape[1:3]
    group = q_heads // kv_heads
    rows = queries.reshape(batch * kv_heads, group * num_queries, dim)
    mask = None
    if num_queries > 1:
        visible = torch.ones(num_queries, suffix_len, dtype=torch.bool, device=keys.device)
        visible = visible.tril(suffix_len - num_queries).repeat(group, 1)  # [group * T, S]
        mask = torch.zeros(visible.shape, dtype=queries.dtype, device=keys.device).masked_fill_(~visible, -torch.inf)
    out, lse = _attend(rows, keys.flatten(0, 1), values.flatten(0, 1), scale, mask)
    return out.reshape(batch, q_heads, num_queries, -1), lse.reshape(batch, q_heads, num_queries)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One softmax attention per leading index: queries `[H, R, D]`, keys `[H, K, D]`, values `[H, K, Dv]`, additive
    mask `[R, K]`. Returns the output `[H, R, Dv]` and the fp32 log-sum-exp `[H, R]` of the logits; -inf where K is
    0."""
    if keys.shape[1] == 0:
        out = queries.new_zeros(*queries.shape[:2], values.shape[-1])
        return out, out.new_full(queries.shape[:2], -torch.inf, dtype=torch.float32)
    if queries.device.type == "cpu" and keys.shape[-1] == values.shape[-1]:
        # The only CPU attention of torch that returns the log-sum-exp; it aborts the process on an empty key tensor.
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), 0.0, False, attn_mask=mask, scale=scale
        )
        return out[0], lse[0]
    return _attend_in_blocks(queries, keys, values, scale, mask)


def _attend_in_blocks(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same on any device and any head sizes. Logits in fp32, a block of rows at a time."""
    heads, num_rows, _ = queries.shape
    keys_t, values = keys.float().transpose(1, 2), values.float()
    step = max(1, _LOGITS_PER_BLOCK // (heads * keys.shape[1]))
    outs, lses = [], []
    for start in range(0, num_rows, step):
        logits = torch.matmul(queries[:, start : start + step].float() * scale, keys_t)  # [H, rows, K]
        if mask is not None:
            logits += mask[start : start + step]
        lse = logits.logsumexp(dim=-1)
        outs.append(torch.matmul((logits - lse.unsqueeze(-1)).exp_(), values))
        lses.append(lse)
    return torch.cat(outs, dim=1).to(queries.dtype), torch.cat(lses, dim=1)
