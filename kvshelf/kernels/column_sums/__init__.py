"""How much attention each token receives, summed over the rows of a causal sequence.

    total_j = sum over rows i >= j of exp(scale * q_i . k_j - lse_i)
    lse_i = log sum over keys j <= i of exp(scale * q_i . k_j)

Bytes it must move: queries and keys once, both sums written. FLOPs: `q_heads * R * N * D` over a causal square (R = N),
half of an attention's forward, and `q_heads * R * N / 2` exponentials; as much again where log-sum-exps are not given.
`every` divides all this work. Beyond its results it takes O(q_heads * R) memory on CUDA, O(N) elsewhere. Share of the
limit on a GPU: not measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvshelf.kernels.checks import require, require_states
from kvshelf.kernels.dispatch import implementation


def column_sums(
    queries: Tensor, keys: Tensor, scale: float, local_rows: int = 0, *, every: int = 1, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax weights that each key receives, summed over all rows and over the last `local_rows` of them.

    queries: `[q_heads, R, D]`, the last R rows of a causal sequence; keys: `[kv_heads, N, D]`, R <= N. Row r sees the
    first N - R + r + 1 keys. Query head h reads KV head h // (q_heads // kv_heads). Returns both sums, `[q_heads, N]`
    fp32; the second is 0 if local_rows is 0 and equals the first if it is R or more. Weights and sums are fp32 (a bf16
    sum stops growing at 256 times its addend). If a sequence is given in chunks, each with the keys up to its end, the
    chunks' sums add up to those of the whole.

    every: of the rows before the last `local_rows`, only each `every`-th is computed, counted back from the last of
    these rows, and weighs `every` times: `total` is an estimate for 1 / `every` of the work. `local` stays exact.

    lse: the rows' log-sum-exps of the scaled logits, `[q_heads, R]` fp32, natural logarithms, as an attention kernel
    saves them for its backward pass (torch: the second result of `aten._scaled_dot_product_flash_attention` on CUDA,
    of `aten._scaled_dot_product_flash_attention_for_cpu` elsewhere). They save one of two matrix products.

    Raises `InvalidTensor` for other shapes.
    """
    require_states("column_sums", {"queries": 3, "keys": 3}, queries=queries, keys=keys)
    require(
        keys.shape[0] > 0
        and queries.shape[0] % keys.shape[0] == 0
        and queries.shape[1] <= keys.shape[1]
        and queries.shape[2] == keys.shape[2]
        and local_rows >= 0
        and every >= 1,
        "column_sums",
        "queries must be [q_heads, R, D] and keys [kv_heads, N, D], q_heads a multiple of kv_heads, R <= N, local_rows "
        f"from 0 (given {local_rows}), every from 1 (given {every})",
        queries=queries,
        keys=keys,
    )
    if lse is not None:
        fits = lse.shape == queries.shape[:2] and lse.dtype == torch.float32 and lse.device == queries.device
        require(fits, "column_sums", "lse must be [q_heads, R] float32 beside the queries", queries=queries, lse=lse)
    local_rows = min(local_rows, queries.shape[1])
    form = implementation("column_sums", keys.device)
    total, local = form.column_sums(queries, keys, scale, local_rows, every, lse)
    return total.float(), local.float()
