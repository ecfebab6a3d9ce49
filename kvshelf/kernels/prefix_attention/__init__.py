"""Attention over a read-only, possibly ragged prefix followed by a causal suffix."""

from kvshelf.kernels.prefix_attention.eager import prefix_attention

__all__ = ["prefix_attention"]
