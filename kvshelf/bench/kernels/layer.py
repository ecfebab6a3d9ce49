"""The layer that `kvshelf bench kernels` works on, and what a case of it says of itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvshelf.errors import InvalidRequest

WINDOW, LAG = 64, 128
_KEPT = 8  # one entry of so many stays


@dataclass(frozen=True)
class Shape:
    """One layer of a model."""

    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int


LLAMA_8B = Shape(q_heads=32, kv_heads=8, head_dim=128, hidden=4096, intermediate=14336)


@dataclass(frozen=True)
class Case:
    """One call of `run` on what `make` makes anew. nbytes: what it must read and write at least; flops: what it must
    compute; `beside` names the case whose result it gets in another way."""

    name: str
    make: Callable[[], tuple[Any, ...]]
    run: Callable[..., object]
    nbytes: float
    flops: float
    beside: str = ""


class Layer:
    """Random states of a layer for a document of `tokens`, as a model hands them over: token-major in memory."""

    def __init__(self, shape: Shape, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        if tokens < _KEPT * WINDOW or tokens % LAG:
            raise InvalidRequest(
                f"{tokens} tokens: give a multiple of {LAG} from {_KEPT * WINDOW}, so that what is kept holds a window",
                param="lengths",
            )
        self.shape, self.tokens, self.dtype, self.device = shape, tokens, dtype, device
        self.kept = tokens // _KEPT
        self.scale = shape.head_dim**-0.5
        self.row_bytes = shape.head_dim * dtype.itemsize

    def random(self, size: Sequence[int]) -> Tensor:
        """Normally distributed, in the layer's dtype."""
        return torch.randn(*size, device=self.device).to(self.dtype)

    def states(self, heads: int, tokens: int) -> Tensor:
        """`[heads, tokens, D]`, a view."""
        return self.random((tokens, heads, self.shape.head_dim)).transpose(0, 1)

    def packed(self, rows: int) -> Tensor:
        """`[rows, D]`, contiguous."""
        return self.random((rows, self.shape.head_dim))

    def window(self) -> tuple[Tensor, Tensor, Tensor]:
        """The last queries, and the keys and values of the document."""
        return (
            self.states(self.shape.q_heads, WINDOW),
            self.states(self.shape.kv_heads, self.tokens),
            self.states(self.shape.kv_heads, self.tokens),
        )
