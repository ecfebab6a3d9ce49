"""Keys and values of stored residuals, made by the model's own modules (KV-Direct, arXiv 2603.19664).

A view of the decoder that has one layer alone is given the residuals in place of what would reach that layer, at their
positions, and a cache that ends the pass with the first keys and values it is given. So norms, biases, rotations and
whatever else a family has are the model's own, and neither attention nor anything behind it runs. Of each token and
layer that takes 2 * width * (q_heads + 2 * kv_heads) * D FLOPs: the module makes queries, too.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvshelf.artifact.records import PackedRecord, Residuals
from kvshelf.engine.attention.attached import CACHE_ARGUMENT, IMPLEMENTATION, PassingLayer
from kvshelf.engine.attention.function import Attended, ForwardContext
from kvshelf.engine.attention.latents import close
from kvshelf.engine.forward.calls import Calls
from kvshelf.errors import BlobError, PolicyUnsupported
from kvshelf.kernels.quantize.rows import plain

SAMPLE: Final = 9
"""Tokens on which a model is tried."""

_ROUNDING = 1e-5
"""How far what is made of them may be from the model's own, over the largest number: the same operations made both."""


@dataclass(frozen=True, eq=False)
class Projection:
    """Of one model. name: of the list of `layers` in the decoder. devices: of each layer. Any thread may use it, but
    for `require_exact`."""

    decoder: nn.Module
    name: str
    devices: Sequence[torch.device]

    @classmethod
    def of(cls, decoder: nn.Module, devices: Sequence[torch.device]) -> Projection:
        """Raises `PolicyUnsupported` for a decoder without a list of its layers."""
        for name, child in decoder.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == len(devices):
                return cls(decoder, name, devices)
        raise _unsupported(f"{type(decoder).__name__} has no list of its {len(devices)} layers")

    @property
    def layers(self) -> Sequence[nn.Module]:
        layers: Any = self.decoder.get_submodule(self.name)
        return list(layers)

    def layer(self, index: int, repositioned: bool) -> LayerProjection:  # noqa: ARG002
        """For the records of one layer: see `coder.CacheDecoder`."""
        return LayerProjection(self, index)

    def made(self, index: int, residuals: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys `[kv_heads, N, D]` and values `[kv_heads, N, Dv]` of residuals `[N, width]` at positions `[N]`, on the
        layer's device. Raises `PolicyUnsupported` for a layer that gives its cache none."""
        device = self.devices[index]
        residuals = residuals.to(device)[None]
        cache = Cache(layers=[_Ending() for _ in self.devices])
        places = positions.to(device, torch.int64)[None]
        try:
            with torch.no_grad():
                view = self._alone(index, residuals)
                view(inputs_embeds=residuals, position_ids=places, use_cache=True, **{CACHE_ARGUMENT: cache})
        except _Ended as end:
            return end.keys[0], end.values[0]
        raise _unsupported(f"layer {index} of {type(self.decoder).__name__} gives its cache no keys and values")

    def require_exact(self, states: Mapping[int, tuple[Tensor, Tensor, Tensor]]) -> None:
        """Raises `PolicyUnsupported` where keys and values that are made of residuals are not the layer's own. states:
        of an `Observer`, by layer, in a pass over tokens at the positions from 0 on."""
        for index, (residuals, *own) in states.items():
            pair = self.made(index, residuals, torch.arange(len(residuals)))
            for one, other in zip(pair, own, strict=True):
                if one.shape != other.shape or one.dtype != residuals.dtype or not close(one, other, _ROUNDING):
                    raise _unsupported(
                        f"layer {index} of {type(self.decoder).__name__} makes keys and values of more than the "
                        "residual stream"
                    )

    def _alone(self, index: int, residuals: Tensor) -> nn.Module:
        """The decoder with one layer alone, which shares all weights."""
        view = copy.copy(self.decoder)
        view._modules = dict(self.decoder._modules)
        view._modules[self.name] = nn.ModuleList([_Fed(self.layers[index], residuals)])
        config: Any = copy.copy(self.decoder.config)
        config._attn_implementation = IMPLEMENTATION  # of which every mask is none
        if types := getattr(config, "layer_types", None):
            config.layer_types = [types[index]]
        view.config = config
        return view


@dataclass(frozen=True, eq=False)
class LayerProjection:
    """Makes the entries of the residuals of one layer."""

    projection: Projection
    index: int

    def decoded(self, record: PackedRecord) -> PackedRecord:
        """The entries of residuals whose rows are plain or quantized; any other record as it is. Raises `BlobError` for
        residuals that are not of this model, and as `Projection.made`."""
        if not isinstance(record, Residuals):
            return record
        decoder: Any = self.projection.decoder
        width = int(decoder.config.hidden_size)
        if record.keys.shape[1] != width:
            raise BlobError(
                f"the cache has in layer {self.index} residuals of {record.keys.shape[1]} numbers; its model makes "
                f"{width}",
                reason="wrong_shape",
            )
        residuals = plain(record.keys)  # type: ignore[arg-type]  # coded rows have been decoded
        keys, values = self.projection.made(self.index, residuals, record.positions[0])
        if (len(keys), keys.shape[2], values.shape[2]) != (record.kv_heads, *record.full_dims):
            raise BlobError(
                f"the residuals of layer {self.index} stand for other keys and values than its model makes",
                reason="wrong_shape",
            )
        return replace(record.made(keys, values), entries_at=record.entry_positions.to(keys.device))


@dataclass(eq=False)
class Observer(ForwardContext):
    """Takes what each layer gets in a pass, `[N, width]`, and its keys and values, `[kv_heads, N, D]`. calls: see
    those of the `layers`."""

    calls: Calls
    layers: Sequence[nn.Module]

    def __post_init__(self) -> None:
        self.states: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def after_attention(self, layer: Attended) -> None:
        residuals = self.calls.take(self.layers[layer.layer_idx]).arguments.get("hidden_states")
        if not isinstance(residuals, Tensor) or residuals.dim() != 3:
            raise _unsupported(f"{type(self.layers[0]).__name__} takes no hidden_states `[B, N, width]`")
        self.states[layer.layer_idx] = residuals[0], layer.keys[0], layer.values[0]


class _Fed(nn.Module):
    """A layer that is given these residuals, whatever reaches it. Other attributes are the layer's."""

    def __init__(self, layer: nn.Module, residuals: Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.residuals = residuals

    def forward(self, _states: Tensor, *others: Any, **named: Any) -> Any:
        return self.layer(self.residuals, *others, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


class _Ended(Exception):
    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values


class _Ending(PassingLayer):
    """Ends the pass with the keys and values that it is given, each `[1, kv_heads, N, D]`."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> NoReturn:
        raise _Ended(key_states, value_states)


def _unsupported(reason: str) -> PolicyUnsupported:
    return PolicyUnsupported(
        f"{reason}, so residuals cannot stand for its keys and values; take policy full, with codec int8 say",
        param="policy",
    )
