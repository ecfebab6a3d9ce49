"""How much the last rows of a sequence attend to each token of a document."""

from kvshelf.kernels.window_scores.eager import window_attention

__all__ = ["window_attention"]
