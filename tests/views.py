"""Layers made up of random numbers, and what their observing rows attend to, written out row by row."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from kvshelf.methods.policies.view import DocumentView, LayerView, Probed


def random_layer(
    tokens: int,
    *,
    index: int = 0,
    num_layers: int = 1,
    kv_heads: int = 2,
    group: int = 2,
    dim: int = 8,
    hidden: int = 24,
    protected: int = 0,
    probes: tuple[int, ...] = (),
    seed: int = 0,
) -> LayerView:
    """A layer with real attention weights of its own; `probes`: the lengths of the passes behind the document."""
    generator = torch.Generator().manual_seed(1000 * seed + index)
    # Queries three times as long as keys: rows that attend to something, not to everything alike.
    states = lambda heads, length, scale=1.0: scale * torch.randn(heads, length, dim, generator=generator)  # noqa: E731
    config = LlamaConfig(
        hidden_size=hidden, num_attention_heads=kv_heads * group, num_key_value_heads=kv_heads, head_dim=dim
    )
    module = LlamaAttention(config, index).requires_grad_(False)
    module.o_proj.weight.copy_(torch.randn(module.o_proj.weight.shape, generator=generator))
    return LayerView(
        layer_idx=index,
        place=index,
        keys=states(kv_heads, tokens),
        values=states(kv_heads, tokens),
        queries=states(kv_heads * group, tokens, 3.0),
        scaling=dim**-0.5,
        document=DocumentView(range(tokens), protected),
        num_layers=num_layers,
        probes=tuple(
            Probed(states(kv_heads * group, length, 3.0), states(kv_heads, length), states(kv_heads, length))
            for length in probes
        ),
        module=module,
    )


def observed(layer: LayerView, window: int) -> Tensor:
    """Weights of observing rows on the tokens they judge, one softmax at a time: `[q_heads, rows, columns]` fp64."""
    shortest = min((probed.queries.shape[1] for probed in layer.probes), default=0)
    tail = max(0, window - shortest)
    columns = layer.num_tokens - tail
    weights = []
    for head, queries in enumerate(layer.all_queries.double()):
        kv_head = head * layer.kv_heads // len(layer.all_queries)
        keys = layer.keys[kv_head].double()
        rows = [(queries[i], keys[: i + 1]) for i in range(columns, layer.num_tokens)]
        for probed in layer.probes:
            length = probed.queries.shape[1]
            for i in range(max(0, length - window), length):
                rows.append(
                    (probed.queries[head, i].double(), torch.cat([keys, probed.keys[kv_head, : i + 1].double()]))
                )
        weights.append(
            torch.stack([torch.softmax(layer.scaling * visible @ query, 0)[:columns] for query, visible in rows])
        )
    return torch.stack(weights)


def pooled_mean(scores: Tensor, kernel: int) -> Tensor:
    """Mean over neighbours along the last dimension, zeros beyond the edges, one token at a time."""
    out = torch.zeros_like(scores)
    for j in range(scores.shape[-1]):
        start, stop = max(0, j - kernel // 2), j + kernel // 2 + 1
        out[..., j] = scores[..., start:stop].sum(dim=-1) / kernel
    return out


def best(scores: list[float], always: set[int], count: int) -> list[int]:
    """Positions of `always` and the best others, `count` in all, equal ones by the smaller position."""
    others = sorted((j for j in range(len(scores)) if j not in always), key=lambda j: (-scores[j], j))
    return sorted([*always, *others[: count - len(always)]])
