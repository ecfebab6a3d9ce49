"""The model's rotary position embedding, applied and undone outside its forward pass."""

from __future__ import annotations

import inspect
import math
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
    differences drifts. `channels`: the first channels of a head, where the model cuts them off before it calls its
    function (Phi); None where the function itself knows (GLM, Phi-3).
    """

    embedding: nn.Module
    apply: Callable[..., tuple[Tensor, Tensor]]
    length_dependent: bool
    channels: int | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Rope | None:
        """The RoPE of a model; None where it has none, or not the same in every layer, or none that can be undone from
        outside."""
        base = model.base_model
        embedding = getattr(base, "rotary_emb", None)
        layers = getattr(base, "layers", None)
        attention = getattr(layers[0], "self_attn", None) if layers else None
        apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
        if embedding is None or apply is None or "layer_type" in inspect.signature(embedding.forward).parameters:
            return None
        if _differs_by_layer(model):
            return None
        kind = getattr(embedding, "rope_type", "default")
        return cls(
            embedding,
            apply,
            length_dependent=any(changing in kind for changing in _CHANGES_WITH_LENGTH),
            channels=getattr(attention, "rotary_ndims", None),
        )

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

    def moved(self, states: Tensor, positions: Tensor, to: Tensor) -> Tensor:
        """`states` `[..., N, D]` rotated to `positions` `[N]`, as if they stood at `to` `[N]`. Rotated once, fp32."""
        return self.rotate(self.unrotate(states, positions), to)

    def mean_rotation(self, size: int, positions: Tensor) -> Tensor:
        """The mean over `positions` of the matrices that rotate a state of `size` channels, `[size, size]` fp32.

        A rotation is linear in its tables, so the unit vectors are turned once, by the mean tables.
        """
        cos, sin = (table.mean(dim=0).expand(size, -1) for table in self.tables(positions))
        return self._turned(torch.eye(size, device=positions.device), cos, sin).T  # column i: what unit vector i became

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin at `positions` `[N]`: `[N, rotated channels]`, fp32, as the model makes them."""
        like: Any = torch.zeros(1, 1, device=positions.device)
        cos, sin = self.embedding(like, positions.long().unsqueeze(0))
        return cos[0].float(), sin[0].float()

    def _turned(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = math.prod(states.shape[:-2])  # not -1, which is ambiguous where a head keeps nothing
        flat = states.reshape(1, heads, *states.shape[-2:]).float()
        part = flat[..., : self.channels]
        turned, _ = self.apply(part, part[:, :1], cos.unsqueeze(0), sin.unsqueeze(0))
        if self.channels is not None:
            turned = torch.cat([turned, flat[..., self.channels :]], dim=-1)
        return turned.reshape(states.shape)


def reach(config: Any, num_tokens: int) -> int | None:
    """The longest sequence whose keys go with those of a call of `num_tokens` tokens; None: any.

    LongRoPE has two sets of frequencies, and a call that reaches beyond a certain position takes the other one for all
    of its positions: keys of a shorter call, asked by a longer one, would be wrong without a sign of it. (transformers'
    own `generate` computes the whole sequence anew there.)
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [kind for kind in parameters.values() if isinstance(kind, dict)]
    places = [
        kind["original_max_position_embeddings"]
        for kind in by_layer or [parameters]
        if kind.get("rope_type") == "longrope"
    ]
    return min((place for place in places if num_tokens <= place), default=None)


def _differs_by_layer(model: PreTrainedModel) -> bool:
    """Whether some layers may go without RoPE.

    Some models say so per layer (SmolLM3); others rotate in sliding layers only (Cohere 2, EXAONE 4) and do not say so
    anywhere, so a mixture of layer kinds is refused although a few of them rotate alike in both.
    """
    mixed = len(set(getattr(model.config, "layer_types", None) or ())) > 1
    layers: Any = model.base_model.layers
    return mixed or not all(getattr(getattr(layer, "self_attn", None), "use_rope", True) for layer in layers)
