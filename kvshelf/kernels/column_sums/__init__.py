"""How much attention each token receives, summed over the rows of a causal sequence.

    total_j = sum over rows i >= j of softmax_j(scale * q_i . k_0..i)
"""

from __future__ import annotations

from torch import Tensor

from kvshelf.kernels.checks import require, require_states
from kvshelf.kernels.dispatch import implementation

__all__ = ["column_sums"]


def column_sums(queries: Tensor, keys: Tensor, scale: float, local_rows: int = 0) -> tuple[Tensor, Tensor]:
    """Softmax weights that each key receives, summed over all rows and over the last `local_rows` of them.

    queries: `[q_heads, R, D]`, the last R rows of a causal sequence; keys: `[kv_heads, N, D]`, R <= N. Row r sees the
    first N - R + r + 1 keys. Query head h reads KV head h // (q_heads // kv_heads). Returns both sums, `[q_heads, N]`
    fp32; the second is 0 if local_rows is 0 and equals the first if it is R or more. Logits, weights and sums are fp32
    (a bf16 sum stops growing at 256 times its addend). The sums of a sequence given in chunks, each with the keys up to
    its end, add up to those of the whole. Raises `InvalidTensor` for other shapes.
    """
    require_states("column_sums", {"queries": 3, "keys": 3}, queries=queries, keys=keys)
    require(
        keys.shape[0] > 0
        and queries.shape[0] % keys.shape[0] == 0
        and queries.shape[1] <= keys.shape[1]
        and queries.shape[2] == keys.shape[2]
        and local_rows >= 0,
        "column_sums",
        "queries must be [q_heads, R, D] and keys [kv_heads, N, D], q_heads a multiple of kv_heads, R <= N, local_rows "
        f"from 0 (given {local_rows})",
        queries=queries,
        keys=keys,
    )
    total, local = implementation("column_sums", keys.device).column_sums(queries, keys, scale, local_rows)
    return total.float(), local.float()
