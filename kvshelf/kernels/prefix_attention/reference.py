"""The naive form: for each row and head, one softmax over the prefix and the visible part of the suffix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvshelf.kernels.prefix_attention.prefixes import DensePrefix, MergedPrefix, Prefix, StreamedPrefix


def prefix_attention(
    queries: Tensor,
    prefix: Sequence[Sequence[Prefix]],
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
            tokens = [token_states(part) for part in prefix[kv]]
            for t in range(num_queries):
                visible = suffix_len - num_queries + t + 1
                keys = torch.cat([*(keys for keys, _ in tokens), suffix_keys[b, kv, :visible].double()])
                values = torch.cat([*(values for _, values in tokens), suffix_values[b, kv, :visible].double()])
                weights = torch.softmax(scale * (keys @ queries[b, h, t].double()), dim=0)
                out[b, h, t] = weights @ values
    return out


def token_states(prefix: Prefix) -> tuple[Tensor, Tensor]:
    """The key and the value of every token of a prefix, fp64: `[tokens, D]`, `[tokens, Dv]`."""
    match prefix:
        case DensePrefix(keys, values):
            return keys.double(), values.double()
        case StreamedPrefix(num_rows, block):
            keys, values = block(0, num_rows)
            return keys.double(), values.double()
        case MergedPrefix(num_classes, block, slot_scales, slot_classes):
            keys, values = block(0, num_classes)
            return slot_scales.double()[:, None] * keys.double()[slot_classes], values.double()[slot_classes]
        case _:
            raise TypeError(f"no reference for a prefix of type {type(prefix).__name__}")
