"""How much attention each token receives, summed over the rows of a causal sequence."""

from kvshelf.kernels.column_sums.eager import column_sums

__all__ = ["column_sums"]
