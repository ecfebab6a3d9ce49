"""Random numbers that follow from seed, layer, head and position alone, whatever was drawn before."""

from __future__ import annotations

import torch
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15 - 2**64
_ROUND = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))
"""Shifts and factors."""


def drawn(
    seed: int,
    layer: int,
    positions: Tensor,
    attention: Tensor,
    of_heirs: Tensor,
    probability: float | None = None,
    first_head: int = 0,
) -> Tensor:
    """Which of the leaving entries merge, by CaM's rule: each with probability min(1, A / mean A of its heirs), where
    0 / 0 is 0, or with `probability`. Bool `[kv_heads, n]`.

    attention: A of the entries, `[kv_heads, n]` fp32. of_heirs: the mean A of their heirs, to which their values would
    go, `[kv_heads, n]` or `[kv_heads, 1]`. The other parameters are those of `uniform`.
    """
    if probability is None:
        likely = (attention / of_heirs).nan_to_num(nan=0.0).clamp(0, 1)
    else:
        likely = torch.full_like(attention, probability)
    return uniform(seed, layer, positions, first_head) < likely


def uniform(seed: int, layer: int, positions: Tensor, first_head: int = 0) -> Tensor:
    """A number in [0, 1) for each of the positions `[kv_heads, n]` int64: fp64. first_head: the first head's number.

    It is a hash of (seed, layer, head, position): one round of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) each. A
    generator with a state would give an answer other numbers in another batch.
    """
    heads = first_head + torch.arange(len(positions), device=positions.device).unsqueeze(1)
    mixed = torch.zeros_like(positions)
    for part in (seed, layer, heads, positions):
        mixed = mixed + part + _STEP
        for shift, factor in _ROUND:
            mixed = (mixed ^ _shifted(mixed, shift)) * factor
    return _shifted(mixed, 11).double() * 2.0**-53


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shifted to the right without its sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
