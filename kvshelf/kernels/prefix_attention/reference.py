"""The naive form: for each row and head, one softmax over the prefix and the visible part of the suffix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def prefix_attention(
    queries: Tensor,
    prefix: Sequence[tuple[Tensor, Tensor]],
    suffix_keys: Tensor,
    suffix_values: Tensor,
    scale: float,
) -> Tensor:
    """See `kvshelf.kernels.prefix_attention.eager.prefix_attention`; computed in fp64, a row at a time."""
    batch, q_heads, num_queries, _ = queries.shape
    kv_heads, suffix_len = suffix_keys.shape[1:3]
    out = queries.new_zeros(batch, q_heads, num_queries, suffix_values.shape[-1], dtype=torch.float64)
    for b in range(batch):
        for h in range(q_heads):
            kv = h // (q_heads // kv_heads)
            prefix_keys, prefix_values = prefix[kv]
            for t in range(num_queries):
                visible = suffix_len - num_queries + t + 1
                keys = torch.cat([prefix_keys, suffix_keys[b, kv, :visible]]).double()
                values = torch.cat([prefix_values, suffix_values[b, kv, :visible]]).double()
                weights = torch.softmax(scale * (keys @ queries[b, h, t].double()), dim=0)
                out[b, h, t] = weights @ values
    return out
