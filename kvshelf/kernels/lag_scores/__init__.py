"""How unusual each token of a partition is in the scale of the partition that follows it, or in its own."""

from __future__ import annotations

from torch import Tensor

from kvshelf.kernels.checks import require, require_states
from kvshelf.kernels.dispatch import implementation

__all__ = ["lag_scores"]


def lag_scores(states: Tensor, scale: Tensor) -> Tensor:
    """softmax over each partition of the channel-wise standard deviation of its states, in the scale of `scale`.

    LagKV's equations 7 to 10. states, scale: `[heads, partitions, lag, D]`, keys or values, D from 2. Each partition of
    `states` is normalised by the minimum and maximum of its partner in `scale` (eq. 7, 8, 9): for LagKV the partition
    that follows it, for LocalKV itself (eq. 14, 15). The standard deviation is the unbiased one. A channel that is
    constant over the partner counts with a spread of 1e-6. Returns `[heads, partitions, lag]` fp32. Raises
    `InvalidTensor` for other shapes.
    """
    require_states("lag_scores", {"states": 4, "scale": 4}, states=states, scale=scale)
    require(
        states.shape == scale.shape and states.shape[2] > 0 and states.shape[3] > 1,
        "lag_scores",
        "states and scale must both be [heads, partitions, lag, D] with D from 2",
        states=states,
        scale=scale,
    )
    scores: Tensor = implementation("lag_scores", states.device).lag_scores(states, scale)
    return scores.float()
