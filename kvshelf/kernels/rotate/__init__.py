"""Rotary position embedding: rows turned in planes of two channels each."""

from __future__ import annotations

import torch
from torch import Tensor

from kvshelf.kernels.checks import require, require_states
from kvshelf.kernels.dispatch import implementation


def rotate(states: Tensor, cos: Tensor, sin: Tensor, partners: Tensor) -> Tensor:
    """out[n, c] = x[n, c] cos[n, c] + x[n, partners[c]] sin[n, c], in fp32, for each head.

    states: `[heads, N, D]`, any strides as long as the last dimension is contiguous. cos, sin: `[N, D]` fp32; `sin`
    includes the sign of the partner's term, and a channel that is not rotated has cos 1 and sin 0. partners: `[D]`
    int64, the other channel of each one's plane, below D: on a card nothing checks this. Returns
    `[heads, N, D]` fp32. Not the model's function: `Rope` in the workers reads from that how its planes lie. Raises
    `InvalidTensor` for other shapes.

    Bytes: states once, 4 an element written, the tables once if they stay in the cache. FLOPs: 3 per element, so the
    memory is the limit. Share of the limit on a GPU: not measured.
    """
    require_states("rotate", {"states": 3}, states=states)
    _, num_rows, dim = states.shape
    require(
        cos.shape == sin.shape == (num_rows, dim)
        and partners.shape == (dim,)
        and cos.dtype == sin.dtype == torch.float32
        and partners.dtype == torch.int64,
        "rotate",
        "cos and sin must be [N, D] float32 and partners [D] int64",
        states=states,
        cos=cos,
        sin=sin,
        partners=partners,
    )
    if states.numel() == 0:
        return torch.zeros(states.shape, dtype=torch.float32, device=states.device)
    turned: Tensor = implementation("rotate", states.device).rotate(states, cos, sin, partners)
    return turned.float()
