"""Softmax attention with its log-sum-exp, and the union of two such attentions."""

from __future__ import annotations

import torch
from torch import Tensor

from kvshelf.kernels.prefix_attention.prefixes import LogitRules

CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""The only CPU attention of torch that returns the log-sum-exp; it aborts the process on an empty key tensor."""

_LOGITS_PER_BLOCK = 1 << 22
"""Most logits held at once by the generic path: 16 MiB of fp32, whatever the length of question and prefix."""


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, rules: LogitRules, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask) v for each batch row and head separately, with the softcap of the rules.

    queries: `[B, H, R, D]`, keys: `[B, H, K, D]`, values: `[B, H, K, Dv]`, all of one dtype; additive fp32 mask:
    `[B or 1, H or 1, R or 1, K]`. Returns the output `[B, H, R, Dv]` in that dtype and the log-sum-exp of the logits
    `[B, H, R]` in fp32, which is -inf (and the output 0) where K is 0.
    """
    if keys.shape[2] == 0:
        out = queries.new_zeros(*queries.shape[:3], values.shape[-1])
        return out, out.new_full(queries.shape[:3], -torch.inf, dtype=torch.float32)
    plain = not rules.softcap and rules.since is None
    if plain and queries.device.type == "cpu" and keys.shape[-1] == values.shape[-1]:
        if mask is not None:
            mask = mask.to(queries.dtype).expand(*queries.shape[:3], keys.shape[2])
        out, lse = CPU_ATTENTION(queries, keys, values, 0.0, False, attn_mask=mask, scale=rules.scale)
        return out, lse
    return attend_in_blocks(queries, keys, values, rules, mask)


def attend_in_blocks(
    queries: Tensor, keys: Tensor, values: Tensor, rules: LogitRules, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`attend` on any device, for any head sizes, and for masks that hide every key of a row, whose output is then 0.
    Logits in fp32, a block of rows at a time."""
    batch, heads, num_rows, _ = queries.shape
    keys_t, values = keys.float().transpose(2, 3), values.float()
    step = rows_per_block(batch * heads * keys.shape[2])
    outs, lses = [], []
    for start in range(0, num_rows, step):
        logits = torch.matmul(queries[:, :, start : start + step].float() * rules.scale, keys_t)  # [B, H, rows, K]
        logits = capped(logits, rules)
        if mask is not None:
            logits += mask if mask.shape[2] == 1 else mask[:, :, start : start + step]
        lse = logits.logsumexp(dim=-1)
        shift = lse.clamp_min(torch.finfo(lse.dtype).min)  # -inf - -inf would be NaN
        outs.append(torch.matmul(logits.sub_(shift.unsqueeze(-1)).exp_(), values))
        lses.append(lse)
    return torch.cat(outs, dim=2).to(queries.dtype), torch.cat(lses, dim=2)


def capped(logits: Tensor, rules: LogitRules) -> Tensor:
    """Scaled logits under the softcap, in place."""
    return logits.div_(rules.softcap).tanh_().mul_(rules.softcap) if rules.softcap else logits


def attention_weights(queries: Tensor, keys: Tensor, lse: Tensor, rules: LogitRules) -> Tensor:
    """The weights that tokens gave to some of their keys, computed again from the log-sum-exps.

    queries: `[rows, q_heads, D]`, a token each, keys: `[rows, kv_heads, K, D]`, lse: `[rows, q_heads]` fp32, over all
    keys of the token and the sinks. Returns `[rows, q_heads, K]` fp32. Bytes: the keys once. FLOPs: 2 * rows * q_heads
    * K * D.
    """
    grouped = queries.reshape(*keys.shape[:2], -1, keys.shape[3]).float() * rules.scale  # [rows, kv_heads, group, D]
    logits = capped(torch.matmul(grouped, keys.float().transpose(2, 3)), rules)
    return logits.sub_(lse.view(*grouped.shape[:3], 1)).exp_().flatten(1, 2)


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
