"""One softmax attention that also returns its log-sum-exp, and the sum of two of them."""

from __future__ import annotations

import torch
from torch import Tensor

CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""The only CPU attention of torch that returns the log-sum-exp; it aborts the process on an empty key tensor."""

_LOGITS_PER_BLOCK = 1 << 22
"""Most logits held at once by the generic path: 16 MiB of fp32, whatever the length of question and prefix."""


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask) v for each batch row and head separately.

    queries: `[B, H, R, D]`, keys: `[B, H, K, D]`, values: `[B, H, K, Dv]`, all of one dtype; additive fp32 mask:
    `[B or 1, 1, R or 1, K]`. Returns the output `[B, H, R, Dv]` in that dtype and the log-sum-exp of the logits
    `[B, H, R]` in fp32, which is -inf (and the output 0) where K is 0.
    """
    if keys.shape[2] == 0:
        out = queries.new_zeros(*queries.shape[:3], values.shape[-1])
        return out, out.new_full(queries.shape[:3], -torch.inf, dtype=torch.float32)
    if queries.device.type == "cpu" and keys.shape[-1] == values.shape[-1]:
        if mask is not None:
            mask = mask.to(queries.dtype).expand(*queries.shape[:3], keys.shape[2])
        out, lse = CPU_ATTENTION(queries, keys, values, 0.0, False, attn_mask=mask, scale=scale)
        return out, lse
    return attend_in_blocks(queries, keys, values, scale, mask)


def attend_in_blocks(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`attend` on any device and for any head sizes. Logits in fp32, a block of rows at a time."""
    batch, heads, num_rows, _ = queries.shape
    keys_t, values = keys.float().transpose(2, 3), values.float()
    step = rows_per_block(batch * heads * keys.shape[2])
    outs, lses = [], []
    for start in range(0, num_rows, step):
        logits = torch.matmul(queries[:, :, start : start + step].float() * scale, keys_t)  # [B, H, rows, K]
        if mask is not None:
            logits += mask if mask.shape[2] == 1 else mask[:, :, start : start + step]
        lse = logits.logsumexp(dim=-1)
        outs.append(torch.matmul(logits.sub_(lse.unsqueeze(-1)).exp_(), values))
        lses.append(lse)
    return torch.cat(outs, dim=2).to(queries.dtype), torch.cat(lses, dim=2)


def rows_per_block(logits_per_row: int) -> int:
    """How many rows of queries to take at a time when each has this many logits; at least 1."""
    return max(1, _LOGITS_PER_BLOCK // max(1, logits_per_row))


def combine(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the attention over each.

    out, other_out: `[..., R, Dv]`, lse, other_lse: `[..., R]` fp32. Returns the union's output and log-sum-exp, fp32; 0
    and -inf where both sets are empty.
    """
    total = torch.logaddexp(lse, other_lse)
    # Where both sets are empty, -inf - -inf would be NaN; against any finite shift the weights are exp(-inf) = 0.
    shift = total.clamp_min(torch.finfo(total.dtype).min)
    union = out.float() * (lse - shift).exp_().unsqueeze(-1)
    union += other_out.float() * (other_lse - shift).exp_().unsqueeze(-1)
    return union, total
