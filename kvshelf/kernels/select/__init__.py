"""Choose the entries to keep, and pack them."""

from kvshelf.kernels.select.eager import gather, select

__all__ = ["gather", "select"]
