"""The model's rotary position embedding, applied and undone outside its forward pass."""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvshelf.kernels.rotate import rotate
from kvshelf.model.devices import input_device
from kvshelf.model.layers import layer_kinds
from kvshelf.model.loading import head_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Turn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A model's rotation function: from states `[n, D]` and tables `[n, T]` to rotated states."""

_REMEMBERED = 64 << 20

_CHANGES_WITH_LENGTH = ("dynamic", "longrope")
"""Kinds of RoPE whose frequencies depend on the length of the sequence: without it a key cannot be moved."""


@dataclass(frozen=True, eq=False)
class _Planes:
    """The planes in which a model rotates heads of D channels by tables of T columns, `[D]` tensors. Channel c turns by
    column `columns[c]`, in one plane with channel `partners[c]`, whose part has the sign `signs[c]`. Channels that are
    never rotated have sign 0. plain: all channels are rotated, and channel c by column c.
    """

    partners: Tensor
    signs: Tensor
    columns: Tensor
    plain: bool

    @classmethod
    def of(cls, turn: _Turn, size: int, width: int, device: torch.device) -> _Planes:
        """The planes of a model's function, read from its results on unit vectors. Its formula is not written again
        here, because layouts differ: halves or interleaved pairs, all of a head or a part of it."""
        unit = torch.eye(size, dtype=torch.float32, device=device)
        nothing = unit.new_zeros(size, width)
        still = turn(unit, nothing, nothing)  # only unrotated channels are left
        crossed = turn(unit, nothing, nothing + 1) - still  # [from, to]
        partners = crossed.abs().argmax(dim=0)
        one_column = torch.eye(width, dtype=torch.float32, device=device)
        ones = unit.new_ones(width, size)
        columns = (turn(ones, one_column, one_column * 0) - ones @ still).argmax(dim=0)
        rotated = still.diagonal() == 0
        signs = crossed.gather(0, partners[None])[0] * rotated
        return cls(partners, signs, columns, bool(rotated.all()) and columns.tolist() == list(range(size)))

    def on(self, device: torch.device) -> _Planes:
        """The same planes on a device."""
        return _Planes(self.partners.to(device), self.signs.to(device), self.columns.to(device), self.plain)

    def tables(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The model's tables `[N, T]` as `rotate` takes them, `[N, D]`."""
        if not self.plain:
            cos, sin = cos[:, self.columns].masked_fill(self.signs == 0, 1), sin[:, self.columns]
        return cos, sin * self.signs


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotates states to positions and back, in fp32, with the model's own tables, in the planes of its own function.

    A rotation is always made once, from un-rotated states: repeated rotation by differences drifts.
    """

    embedding: nn.Module
    planes: _Planes
    length_dependent: bool
    _planes: dict[torch.device, _Planes] = field(default_factory=dict, init=False, repr=False)
    _last: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Rope | None:
        """The RoPE of a model; None if it has none, if layers differ in it, or if it cannot be undone from outside, as
        with latents (MLA), where it rotates a part that is computed from them."""
        if any(kind.latents for kind in layer_kinds(model.config)):
            return None
        base = model.base_model
        embedding = getattr(base, "rotary_emb", None)
        layers = getattr(base, "layers", None)
        attentions = (getattr(layer, "self_attn", None) for layer in layers or ())
        attention = next(filter(None, attentions), None)
        apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
        if embedding is None or apply is None or "layer_type" in inspect.signature(embedding.forward).parameters:
            return None
        if _differs_by_layer(model):
            return None
        kind = getattr(embedding, "rope_type", "default")
        # Phi slices the rotated channels before it calls its function; in GLM and Phi-3 the function slices them.
        channels = getattr(attention, "rotary_ndims", None)

        def turn(states: Tensor, *tables: Tensor) -> Tensor:
            part = states[None, None, :, :channels]
            turned, _ = apply(part, part, *(table.unsqueeze(0) for table in tables))
            return torch.cat([turned[0, 0], states[:, turned.shape[-1] :]], dim=-1)

        device = input_device(model)
        cos, sin = _tables(embedding, torch.arange(1, 3, device=device))
        planes = _Planes.of(turn, head_size(model.config), cos.shape[1], device)
        rope = cls(embedding, planes, length_dependent=any(changing in kind for changing in _CHANGES_WITH_LENGTH))
        some = torch.linspace(1, 2, 2 * len(planes.signs), device=device).view(2, -1)
        return rope if torch.allclose(rope._turned(some, cos, sin), turn(some, cos, sin), atol=1e-4) else None

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

    def transposed(self, gradients: Tensor, positions: Tensor) -> Tensor:
        """Gradients by rotated states as those by states without rotation, fp32: the transpose of `rotate`, which is
        its inverse where the tables have no factor."""
        cos, sin = self.tables(positions)
        return self._turned(gradients, cos, -sin)

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
        """cos and sin at `positions` `[N]`: `[N, rotated channels]`, fp32, as the model makes them; to be read.

        The last ones are remembered up to `_REMEMBERED` bytes, because every layer of a cache asks for the same ones:
        making them takes as long as rotating the keys of a layer three times. Those of another device than the CPU are
        made each time: to compare positions would wait for it.
        """
        if positions.device.type != "cpu":
            return _tables(self.embedding, positions)
        last = self._last.get(positions.device)
        if last is not None and last[0].shape == positions.shape and torch.equal(last[0], positions):
            return last[1], last[2]
        cos, sin = _tables(self._on_cpu, positions)
        if not self.length_dependent and cos.nbytes + sin.nbytes <= _REMEMBERED:
            self._last[positions.device] = positions.clone(), cos, sin
        return cos, sin

    @cached_property
    def _on_cpu(self) -> nn.Module:
        """The embedding, for positions of the CPU: one on a card would send its frequencies at each call."""
        elsewhere = any(buffer.is_cuda for buffer in self.embedding.buffers())
        return copy.deepcopy(self.embedding).cpu() if elsewhere and not self.length_dependent else self.embedding

    def _turned(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = math.prod(states.shape[:-2])  # not -1, which is ambiguous where a head keeps nothing
        planes = self._planes.get(states.device)
        if planes is None:
            planes = self._planes[states.device] = self.planes.on(states.device)
        turned = rotate(states.reshape(heads, *states.shape[-2:]), *planes.tables(cos, sin), planes.partners)
        return turned.reshape(states.shape)


def _tables(embedding: nn.Module, positions: Tensor) -> tuple[Tensor, Tensor]:
    like: Any = torch.zeros(1, 1, device=positions.device)
    cos, sin = embedding(like, positions.long().unsqueeze(0))
    return cos[0].float().to(positions.device), sin[0].float().to(positions.device)


def changes_with_length(config: Any) -> bool:
    """Whether the frequencies of a RoPE, of any layer, depend on the length of the sequence."""
    return any(changing in str(kind.get("rope_type")) for kind in _kinds(config) for changing in _CHANGES_WITH_LENGTH)


def reach(config: Any, num_tokens: int) -> int | None:
    """The longest sequence whose keys have the same frequencies as those of a call of `num_tokens` tokens; None: any.

    LongRoPE has two sets of frequencies. A call that reaches beyond a certain position takes the other set for all of
    its positions, so it would silently misread the keys of a shorter call. (transformers' own `generate` computes the
    whole sequence anew there.)
    """
    places = [
        kind["original_max_position_embeddings"] for kind in _kinds(config) if kind.get("rope_type") == "longrope"
    ]
    return min((place for place in places if num_tokens <= place), default=None)


def _kinds(config: Any) -> list[dict[str, Any]]:
    """The parameters of each kind of RoPE: of one, or of one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [kind for kind in parameters.values() if isinstance(kind, dict)] or [parameters]


def _differs_by_layer(model: PreTrainedModel) -> bool:
    """Whether some layers may go without RoPE.

    Some models set it per layer (SmolLM3). Others rotate in sliding layers only (Cohere 2, EXAONE 4), and no field says
    so. So every mixture of layer kinds is refused, although a few models rotate alike in both.
    """
    mixed = len({(kind.window, kind.chunk) for kind in layer_kinds(model.config) if kind.attends}) > 1
    layers: Any = model.base_model.layers
    return mixed or not all(getattr(getattr(layer, "self_attn", None), "use_rope", True) for layer in layers)
