"""The model's rotary position embedding, applied and undone outside its forward pass."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_CHANGES_WITH_LENGTH = ("dynamic", "longrope")
"""Kinds of RoPE whose frequencies depend on how long the sequence is: a key can not be moved without knowing it."""


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotates states to positions and back, in fp32, with the model's own tables and its own function.

    The model's function is called rather than written again here, because layouts differ: halves or interleaved pairs,
    all of a head or a part of it. A rotation is always made once, from un-rotated states: repeated rotation by
    differences drifts.
    """

    embedding: nn.Module
    apply: Callable[..., tuple[Tensor, Tensor]]
    length_dependent: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> Rope | None:
        """The RoPE of a model; None where it has none, or one per kind of layer, that can be undone from outside."""
        base = model.base_model
        embedding = getattr(base, "rotary_emb", None)
        layers = getattr(base, "layers", None)
        attention = getattr(layers[0], "self_attn", None) if layers else None
        apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
        if embedding is None or apply is None or "layer_type" in inspect.signature(embedding.forward).parameters:
            return None
        kind = getattr(embedding, "rope_type", "default")
        return cls(embedding, apply, length_dependent=kind in _CHANGES_WITH_LENGTH)

    def rotate(self, states: Tensor, positions: Tensor) -> Tensor:
        """`states` `[..., N, D]` un-rotated, at `positions` `[N]`. Returns them rotated, fp32."""
        cos, sin = self.tables(positions)
        return self._turned(states, cos, sin)

    def unrotate(self, states: Tensor, positions: Tensor) -> Tensor:
        """The inverse of `rotate`, fp32."""
        cos, sin = self.tables(positions)
        # Scaled kinds (YaRN) multiply both tables by a factor; dividing by its square makes this the inverse on the
        # rotated channels and leaves channels that are never rotated alone.
        square = (cos[:, :1] ** 2 + sin[:, :1] ** 2).mean()
        return self._turned(states, cos / square, -sin / square)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin at `positions` `[N]`: `[N, rotated channels]`, fp32, as the model makes them."""
        like: Any = torch.zeros(1, 1, device=positions.device)
        cos, sin = self.embedding(like, positions.long().unsqueeze(0))
        return cos[0].float(), sin[0].float()

    def _turned(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        flat = states.reshape(1, -1, *states.shape[-2:]).float()
        turned, _ = self.apply(flat, flat[:, :1], cos.unsqueeze(0), sin.unsqueeze(0))
        return turned.reshape(states.shape)
