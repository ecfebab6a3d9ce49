"""Which of a stored cache's entries a question reads: one selector, one file."""

from kvshelf.workers.selectors.base import Selector
from kvshelf.workers.selectors.registry import build, names

__all__ = ["Selector", "build", "names"]
