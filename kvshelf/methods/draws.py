"""Random numbers that depend on what they are for, and on nothing that was drawn before."""

from __future__ import annotations

import torch
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_SHIFTS = (30, 27, 31)


def drawn(
    seed: int,
    layer: int,
    positions: Tensor,
    attention: Tensor,
    of_heirs: Tensor,
    probability: float | None = None,
    first_head: int = 0,
) -> Tensor:
    """Which entries that leave merge, by CaM's rule: each with probability min(1, A / mean A of its heirs), where 0 / 0
    is 0, or with `probability`. Bool `[kv_heads, n]`.

    attention: A of the entries, `[kv_heads, n]` fp32; of_heirs: the mean A of those that their values would go to,
    `[kv_heads, n]` or `[kv_heads, 1]`. The others as of `uniform`.
    """
    if probability is None:
        likely = (attention / of_heirs).nan_to_num(nan=0.0).clamp(0, 1)
    else:
        likely = torch.full_like(attention, probability)
    return uniform(seed, layer, positions, first_head) < likely


def uniform(seed: int, layer: int, positions: Tensor, first_head: int = 0) -> Tensor:
    """A number in [0, 1) for each position of each head, fp64, of positions `[kv_heads, n]` int64. first_head: the
    number of the first of these heads in the layer.

    A hash of (seed, layer, head, position) by the mixing function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a
    round each. A generator with a state would give an answer other numbers in another batch.
    """
    heads = first_head + torch.arange(len(positions), device=positions.device).unsqueeze(1)
    mixed = torch.zeros_like(positions)
    for part in (seed, layer, heads, positions):
        mixed = _mix(mixed + part + _STEP)
    return _shifted(mixed, 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        x = (x ^ _shifted(x, shift)) * factor
    return x ^ _shifted(x, _SHIFTS[-1])


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shifted to the right as if it had no sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
