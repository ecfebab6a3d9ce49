"""What the kernels are measured against: the same results as others compute them, out of torch's own operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def snapkv_by_expansion(queries: Tensor, keys: Tensor, values: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """SnapKV with kvpress's flow of data: keys repeated for every query head, a mask of full size, weights in fp32.

    queries: `[q_heads, W, D]`, the last of the document; keys, values: `[kv_heads, N, D]`. Scores are the mean over
    rows and group, averaged over 5 neighbours. Returns keys and values `[kv_heads, kept, D]` in the order of their
    scores. kvpress also computes these queries anew, which is left out here.

    Bytes, of N columns: keys read and written once per query head, then read; logits, mask and weights of
    `q_heads * W * N` each, written and read, weights twice as wide; int64 indices of `kept * D` per KV head.
    """
    kv_heads, num_tokens, dim = keys.shape
    q_heads, window, _ = queries.shape
    repeated = keys.unsqueeze(1).expand(-1, q_heads // kv_heads, -1, -1).reshape(q_heads, num_tokens, dim)
    logits = torch.matmul(queries, repeated.mT) * dim**-0.5
    logits = logits + torch.full_like(logits, -torch.inf).triu(num_tokens - window + 1)
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).to(queries.dtype)[..., :-window]
    pooled = functional.avg_pool1d(weights.mean(dim=1).unsqueeze(0), kernel_size=5, stride=1, padding=2)
    scores = pooled.view(kv_heads, -1, num_tokens - window).mean(dim=1)
    highest = scores.max().item()  # the device is waited for, as there
    chosen = functional.pad(scores, (0, window), value=highest + 1).topk(kept, dim=-1).indices
    return gather_expanded(keys, chosen), gather_expanded(values, chosen)


def gather_expanded(states: Tensor, chosen: Tensor) -> Tensor:
    """Rows `chosen` `[kv_heads, kept]` of states `[kv_heads, N, D]`, by an index that names every single channel."""
    return states.gather(1, chosen.unsqueeze(-1).expand(-1, -1, states.shape[-1])).contiguous()


def attention_of_full_cache(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One decode step `[q_heads, 1, D]` over a preallocated cache of everything, `[kv_heads, N, D]`."""
    return functional.scaled_dot_product_attention(queries[None], keys[None], values[None], enable_gqa=True)


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """A layer's attention in a prefill: `[q_heads, N, D]` over `[kv_heads, N, D]`."""
    return functional.scaled_dot_product_attention(
        queries[None], keys[None], values[None], is_causal=True, enable_gqa=True
    )


def layer_prefill(hidden: Tensor, weights: Sequence[Tensor], head_dim: int) -> Tensor:
    """One layer of a Llama without its norms and rotations, which are small: hidden `[N, H]` in and out.

    weights: those of queries, keys, values, output, gate, up and down projection, `[in, out]` each.
    """
    queries, keys, values, output, gate, up, down = weights
    split = (hidden.shape[0], -1, head_dim)
    states = [(hidden @ weight).view(split).transpose(0, 1) for weight in (queries, keys, values)]
    attended = causal_attention(*states)[0].transpose(0, 1).flatten(1)
    hidden = hidden + attended @ output
    return hidden + (functional.silu(hidden @ gate) * (hidden @ up)) @ down
