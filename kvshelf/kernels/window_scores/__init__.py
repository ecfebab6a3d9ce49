"""How much the last rows of a document attend to each of its tokens."""

from kvshelf.kernels.window_scores.eager import window_scores

__all__ = ["window_scores"]
