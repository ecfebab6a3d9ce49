"""How unusual each token of a partition is in the scale of the partition that follows it, or in its own."""

from kvshelf.kernels.lag_scores.eager import lag_scores

__all__ = ["lag_scores"]
