"""Groups of quantized rows, without torch: blobs are also checked in code that makes no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Axis = Literal["tokens", "channels"]
"""The members of a group: consecutive rows of one channel, or consecutive channels of one row."""


def scales_shape(axis: Axis, group: int, lengths: Sequence[int], num_channels: int) -> tuple[int, int]:
    """The shape of the scales, and of the zeros."""
    if axis == "tokens":
        return sum(-(-length // group) for length in lengths), num_channels
    return sum(lengths), -(-num_channels // group)
