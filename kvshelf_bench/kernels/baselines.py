"""The baselines of the kernels: the same results as other implementations compute them, from torch's own operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kvshelf.kernels.prefix_attention.attend import CPU_ATTENTION

WHOLE_WEIGHTS_BYTES = {"cpu": 256 << 20, "cuda": 8 << 30}
"""On a CPU one head at 8192 tokens. On a GPU more, because one head of a shorter sequence does not keep it busy."""


def snapkv_by_expansion(queries: Tensor, keys: Tensor, values: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """SnapKV with kvpress's flow of data: keys repeated for every query head, a mask of full size, weights in fp32.

    queries: `[q_heads, W, D]`, the last of the document; keys, values: `[kv_heads, N, D]`. Scores are the mean over
    rows and group, averaged over 5 neighbours. Returns keys and values `[kv_heads, kept, D]` in the order of their
    scores. kvpress also recomputes these queries; this function does not.

    Bytes, of N columns: keys read and written once per query head, then read; logits, mask and weights of
    `q_heads * W * N` each, written and read, weights twice as wide; int64 indices of `kept * D` per KV head.
    """
    kv_heads, num_tokens, dim = keys.shape
    q_heads, window, _ = queries.shape
    logits = torch.matmul(queries, repeated(keys, q_heads).mT) * dim**-0.5
    logits = logits + torch.full_like(logits, -torch.inf).triu(num_tokens - window + 1)
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).to(queries.dtype)[..., :-window]
    pooled = functional.avg_pool1d(weights.mean(dim=1).unsqueeze(0), kernel_size=5, stride=1, padding=2)
    scores = pooled.view(kv_heads, -1, num_tokens - window).mean(dim=1)
    highest = scores.max().item()  # waits for the device, as kvpress does
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


def column_sums_of_whole_weights(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """The sums `[q_heads, N]` of queries `[q_heads, N, D]` in three steps: all logits, their softmax, its sums.

    Computes as many query heads at once as `WHOLE_WEIGHTS_BYTES` of fp32 weights allow, at least one: the weights of a
    head of 8192 tokens are 268 MB and exist three times.
    """
    num_tokens = queries.shape[1]
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=queries.device).triu_(1)
    heads = max(1, WHOLE_WEIGHTS_BYTES[queries.device.type] // (4 * num_tokens * num_tokens))
    sums = []
    blocks = (torch.split(states, heads) for states in (queries, repeated(keys, queries.shape[0])))
    for rows, row_keys in zip(*blocks, strict=True):
        logits = (torch.matmul(rows, row_keys.mT).float() * scale).masked_fill_(future, -torch.inf)
        sums.append(torch.softmax(logits, dim=-1).sum(dim=1))
    return torch.cat(sums)


def column_sums_by_attention(queries: Tensor, keys: Tensor, scale: float, lse: Tensor) -> Tensor:
    """The sums `[q_heads, N]` from a causal attention kernel that returns log-sum-exps, with the roles swapped.

    The weight of row i on key j is exp(scale * q_i . k_j - lse_i). Queries that carry -lse / scale in two further
    channels (a high and a low part, so that bf16 loses nothing) against keys with ones there have this exponent as
    their logit; given to the kernel as keys, with the keys as queries and both reversed, so that causal means i >= j,
    the log-sum-exp of "row" j is the logarithm of column sum j. lse: `[q_heads, N]` of the first attention.
    """
    offset = -lse / scale
    high = offset.to(queries.dtype)
    low = (offset - high.float()).to(queries.dtype)
    width = -(queries.shape[-1] + 2) % 8  # a head size that is no multiple of 8 takes a slower path
    unused = queries.new_zeros(*queries.shape[:2], width)
    ones = queries.new_ones(*queries.shape[:2], 2)
    as_keys = torch.cat([queries, high.unsqueeze(-1), low.unsqueeze(-1), unused], dim=-1).flip(1)
    as_queries = torch.cat([repeated(keys, queries.shape[0]), ones, unused], dim=-1).flip(1)
    _, sums = flash(as_queries, as_keys, as_keys, scale)
    return sums.exp().flip(1)


def flash(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """torch's causal attention on a CPU with its log-sum-exps: `[q_heads, N, D]` and `[q_heads, N]`."""
    out, lse = CPU_ATTENTION(queries[None], keys[None], values[None], 0.0, True, attn_mask=None, scale=scale)
    return out[0], lse[0]


def repeated(states: Tensor, q_heads: int) -> Tensor:
    """States of the KV heads, once per query head."""
    return states.repeat_interleave(q_heads // states.shape[0], dim=0)
