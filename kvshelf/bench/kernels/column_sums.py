"""What `column_sums` costs beside the attention whose columns it sums, and beside two other ways to the same sums."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvshelf.kernels.column_sums import column_sums
from kvshelf.kernels.prefix_attention.attend import CPU_ATTENTION

_WHOLE_WEIGHTS_BYTES = {"cpu": 256 << 20, "cuda": 8 << 30}
"""On a CPU one head at 8192 tokens. A GPU is not kept busy by one head of a shorter sequence."""


@dataclass(frozen=True)
class ColumnSumTimes:
    """Seconds of this process's CPU time, each the median of its repeats, of one layer of one sequence.

    attention: plain causal attention. column_sums: the operation in use. naive: the same sums from all N x N weights of
    one query head at a time. second_attention: a second call of the stock attention kernel, `column_sums_by_attention`,
    without the first one, which must return its log-sum-exp.
    """

    attention: float
    column_sums: float
    naive: float
    second_attention: float


def time_column_sums(
    num_tokens: int = 8192,
    q_heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 128,
    dtype: torch.dtype = torch.float32,
    repeats: int = 3,
) -> ColumnSumTimes:
    """Time the four on the CPU, on random states of a fixed seed, with torch's current number of threads.

    The naive form takes at least 12 bytes * num_tokens^2 of memory: 0.8 GB at 8192 tokens.
    """
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (
        torch.randn(heads, num_tokens, head_dim, generator=generator).to(dtype)
        for heads in (q_heads, kv_heads, kv_heads)
    )
    scale = head_dim**-0.5
    _, lse = _flash(queries, _repeated(keys, q_heads), _repeated(values, q_heads), scale)
    return ColumnSumTimes(
        attention=_median_s(lambda: _attention(queries, keys, values, scale), repeats),
        column_sums=_median_s(lambda: column_sums(queries, keys, scale), repeats),
        naive=_median_s(lambda: column_sums_of_whole_weights(queries, keys, scale), repeats),
        second_attention=_median_s(lambda: column_sums_by_attention(queries, keys, scale, lse), repeats),
    )


def column_sums_of_whole_weights(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """The sums `[q_heads, N]` of queries `[q_heads, N, D]` in three steps: all logits, their softmax, its sums.

    Of as many query heads at a time as `_WHOLE_WEIGHTS_BYTES` of fp32 hold, at least one: of one head at 8192 tokens
    they are 268 MB, three times of which exist at once.
    """
    num_tokens = queries.shape[1]
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=queries.device).triu_(1)
    heads = max(1, _WHOLE_WEIGHTS_BYTES[queries.device.type] // (4 * num_tokens * num_tokens))
    sums = []
    blocks = (torch.split(states, heads) for states in (queries, _repeated(keys, queries.shape[0])))
    for rows, repeated in zip(*blocks, strict=True):
        logits = (torch.matmul(rows, repeated.mT).float() * scale).masked_fill_(future, -torch.inf)
        sums.append(torch.softmax(logits, dim=-1).sum(dim=1))
    return torch.cat(sums)


def column_sums_by_attention(queries: Tensor, keys: Tensor, scale: float, lse: Tensor) -> Tensor:
    """The sums `[q_heads, N]` out of a causal attention kernel that returns log-sum-exps, its roles swapped.

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
    as_queries = torch.cat([_repeated(keys, queries.shape[0]), ones, unused], dim=-1).flip(1)
    _, sums = _flash(as_queries, as_keys, as_keys, scale)
    return sums.exp().flip(1)


def _attention(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    return functional.scaled_dot_product_attention(
        queries[None], keys[None], values[None], is_causal=True, scale=scale, enable_gqa=True
    )


def _flash(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = CPU_ATTENTION(queries[None], keys[None], values[None], 0.0, True, attn_mask=None, scale=scale)
    return out[0], lse[0]


def _repeated(states: Tensor, q_heads: int) -> Tensor:
    return states.repeat_interleave(q_heads // states.shape[0], dim=0)


def _median_s(call: Callable[[], Tensor | tuple[Tensor, Tensor]], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)
