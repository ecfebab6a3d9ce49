"""Transforms of no model: random orthogonal bases, for caches of random numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from kvshelf.artifact.coder import Coder
from kvshelf.artifact.transforms import Kind, RowTransform, Transforms, pack
from kvshelf.training.transform_search import _tables


@cache
def make_coder(
    layers: int = 2,
    heads: int = 2,
    dims: tuple[int, int] = (8, 8),
    seed: int = 0,
    multipliers: tuple[float, float] = (1.0, 1.0),
) -> Coder:
    """Rotations turn pairs of neighbouring channels by a hundredth of the position. multipliers: of steps of keys and
    values."""
    generator = torch.Generator().manual_seed(seed)
    made: list[dict[Kind, RowTransform]] = [
        {
            "keys": replace(_transform(heads, dims[0], generator), multiplier=multipliers[0]),
            "values": replace(_transform(heads, dims[1], generator), multiplier=multipliers[1]),
        }
        for _ in range(layers)
    ]
    sizes = np.exp(-np.arange(1 << 13) / (1 << 7) * 1.4)
    data = pack("0f" * 20, made, _tables(sizes), {"model": "none"})
    return Coder(Transforms.from_bytes(data), lambda x, at: turned(x, at, 1), lambda x, at: turned(x, at, -1))


def _transform(heads: int, dim: int, generator: torch.Generator) -> RowTransform:
    joint, *rotations = (
        torch.linalg.qr(torch.randn(size, size, generator=generator)).Q for size in (heads * dim, *(dim,) * heads)
    )
    mean = torch.randn(heads, dim, generator=generator)
    return RowTransform(mean, joint, torch.stack(rotations), (0,) * heads * dim, ((0,) * dim,) * heads, 1.0)


def turned(states: Tensor, positions: Tensor, sign: int) -> Tensor:
    angles = sign * positions.float()[:, None] / 100
    pairs = states.unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    out = torch.stack([even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], dim=-1)
    return out.flatten(-2)
