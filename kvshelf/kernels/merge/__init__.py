"""Which kept token an evicted one resembles most, and the weighted mean of the tokens that resemble each other."""

from kvshelf.kernels.merge.eager import merge_weighted, nearest_pair

__all__ = ["merge_weighted", "nearest_pair"]
