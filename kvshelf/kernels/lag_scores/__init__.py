"""How unusual each token of a partition is on the scale of the partition that follows it, or on the scale of its own
partition."""

from __future__ import annotations

from torch import Tensor

from kvshelf.kernels.checks import require, require_states
from kvshelf.kernels.dispatch import implementation


def lag_scores(keys: Tensor, values: Tensor, lag: int, *, own_scale: bool = False, value_weight: float = 1.0) -> Tensor:
    """LagKV's equation 11 for all partitions but the last: the score of keys plus `value_weight` times that of values.

        low_d, high_d = min, max over the scale partition of x_d                (eq. 7, 8)
        y_d = (x_d - low_d) / (high_d - low_d)                                  (eq. 9)
        score = softmax over the partition's tokens of the deviation of y over its channels   (eq. 10)

    keys: `[kv_heads, partitions * lag, D]`, values: `[kv_heads, partitions * lag, Dv]`, partitions at least 1; lag, D
    and Dv at least 2. The scale partition is the next one; with `own_scale` it is the token's own (LocalKV, eq. 14 and
    15). The standard deviation is the unbiased one. A channel that is constant over the scale partition counts with a
    spread of 1e-6: the paper leaves 0/0 open, and a NaN would poison the softmax. Computed and returned in fp32,
    `[kv_heads, partitions - 1, lag]`; a NaN in a partition or in its scale partition makes all of its scores NaN.
    Raises `InvalidTensor` for other shapes.

    Bytes: keys and values once, 4 a token and head written. FLOPs: 9 per element, so the memory is the limit. One
    launch on CUDA. Share of the limit on a GPU: not measured.
    """
    require_states("lag_scores", {"keys": 3, "values": 3}, keys=keys, values=values)
    require(
        lag > 1
        and keys.shape[:2] == values.shape[:2]
        and keys.shape[1] >= lag
        and keys.shape[1] % lag == 0
        and min(keys.shape[2], values.shape[2]) > 1,
        "lag_scores",
        f"keys must be [kv_heads, partitions * lag, D] and values [kv_heads, partitions * lag, Dv], with partitions "
        f"from 1 and lag (given {lag}), D and Dv from 2",
        keys=keys,
        values=values,
    )
    scores: Tensor = implementation("lag_scores", keys.device).lag_scores(keys, values, lag, own_scale, value_weight)
    return scores.float()
