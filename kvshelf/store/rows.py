"""How the rows of a record are packed by head."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from kvshelf.kernels.quantize.rows import Axis, HeadRows, QuantizedRows, Rows, by_head, plain, scales_shape

__all__ = ["Axis", "HeadRows", "QuantizedRows", "Rows", "by_head", "offsets_of", "plain", "scales_shape"]


def offsets_of(lengths: Sequence[int]) -> tuple[int, ...]:
    """Where each head's rows begin and the last one's end: one number more than there are heads."""
    return tuple(accumulate(lengths, initial=0))
