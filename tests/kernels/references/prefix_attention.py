"""The naive form: for each token and head, one softmax over the prefix and the visible part of the suffix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvshelf.kernels.prefix_attention.prefixes import (
    BatchLayout,
    LogitRules,
    MergedPrefix,
    PackedPrefix,
    Prefix,
    SelectedPrefix,
    StackedPrefix,
    StreamedPrefix,
    channels_of,
    choices_of,
)
from tests.kernels.references.choose import choose


def prefix_attention(
    queries: Tensor,
    prefixes: Sequence[Sequence[Prefix]],
    suffixes: Sequence[tuple[Tensor, Tensor]],
    layout: BatchLayout,
    rules: LogitRules,
) -> Tensor:
    """See `kvshelf.kernels.prefix_attention.prefix_attention`; computed in fp64, a row at a time."""
    num_tokens, q_heads, _ = queries.shape
    kv_heads, value_dim = suffixes[0][1].shape[1], suffixes[0][1].shape[3]
    out = queries.new_zeros(num_tokens, q_heads, value_dim, dtype=torch.float64)
    share_of = [share for share, count in enumerate(layout.shares) for _ in range(count)]
    for rows, (keys, values) in zip(layout.suffixes, suffixes, strict=True):
        for r, (first, length) in enumerate(zip(rows.first, rows.lengths, strict=True)):
            for t in range(rows.new if first >= 0 else 0):
                visible = length - rows.new + t + 1
                for choice in choices_of(prefixes[share_of[first + t]]):
                    choose(queries[first + t], choice)
                for h in range(q_heads):
                    kv = h // (q_heads // kv_heads)
                    seen, query = prefixes[share_of[first + t]], queries[first + t, h].double()
                    parts = [token_states(prefix, kv) for prefix in seen]
                    products = [k @ _gathered(query, prefix, kv) for (k, _), prefix in zip(parts, seen, strict=True)]
                    all_values = torch.cat([*(v for _, v in parts), values[r, kv, :visible].double()])
                    logits = rules.scale * torch.cat([*products, keys[r, kv, :visible].double() @ query])
                    if rules.softcap:
                        logits = rules.softcap * torch.tanh(logits / rules.softcap)
                    if rules.window is not None:
                        logits[: -rules.window] = -torch.inf
                    if rules.chunk is not None:
                        position = layout.starts[share_of[first + t]] + visible - 1
                        logits[: -(position % rules.chunk) - 1] = -torch.inf
                    if rules.sinks is not None:
                        logits = torch.cat([logits, rules.sinks[h : h + 1].double()])
                    out[first + t, h] = torch.softmax(logits, dim=0)[: len(all_values)] @ all_values
    return out


def _gathered(query: Tensor, prefix: Prefix, head: int) -> Tensor:
    """The channels of a query `[D]` that the keys of one head of a prefix have."""
    channels = channels_of(prefix)
    return query if channels is None else query[channels[head].long()]


def token_states(prefix: Prefix, head: int) -> tuple[Tensor, Tensor]:
    """The key and the value of every token of one head of a prefix, fp64: `[tokens, D]` (D' where keys are pruned) and
    `[tokens, Dv]`."""
    match prefix:
        case PackedPrefix():
            keys, values = prefix.heads[head]
            return keys[:].double(), values[:].double()
        case StackedPrefix():
            return prefix.keys[head].double(), prefix.values[head].double()
        case StreamedPrefix(lengths=lengths, block=block):
            made_keys, made_values = block(head, 0, lengths[head])
            return made_keys.double(), made_values.double()
        case SelectedPrefix():
            keys, values = prefix.head(head)
            return keys.double(), values.double()
        case MergedPrefix():
            keys, values, scales, classes = prefix.heads[head]
            return scales.double()[:, None] * keys[:].double()[classes], values[:].double()[classes]
