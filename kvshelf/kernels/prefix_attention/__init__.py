"""Attention over a read-only, possibly ragged prefix followed by a causal suffix."""

from kvshelf.kernels.prefix_attention.eager import prefix_attention
from kvshelf.kernels.prefix_attention.prefixes import Block, DensePrefix, MergedPrefix, Prefix, StreamedPrefix

__all__ = ["Block", "DensePrefix", "MergedPrefix", "Prefix", "StreamedPrefix", "prefix_attention"]
