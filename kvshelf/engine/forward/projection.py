"""Keys and values of stored residuals, made by the model's own modules (KV-Direct, arXiv 2603.19664).

A copy of the decoder that has one layer alone is given the residuals in place of what would reach that layer, at their
positions, and a cache that ends the pass with the first keys and values it is given. So norms, biases, rotations and
whatever else a family has are the model's own, and neither attention nor anything behind it runs. Of each token and
layer that takes 2 * width * (q_heads + 2 * kv_heads) * D FLOPs: the module makes queries, too.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvshelf.artifact.records import PackedRecord, Residuals
from kvshelf.engine.attention.attached import CACHE_ARGUMENT, IMPLEMENTATION, PassingLayer
from kvshelf.engine.attention.latents import close
from kvshelf.errors import BlobError, PolicyUnsupported
from kvshelf.kernels.quantize.rows import plain

RUN: Final = 1024
"""Rows of which keys and values are made at once: a layer's queries and what else it makes are as many."""

_TRIED: Final = 9, 3
"""Numbers of tokens on which a model is tried: from position 0 on, and up to the last that it has."""


@dataclass(frozen=True, eq=False)
class Projection:
    """Of one model. name: of the list of `layers` in the decoder. clone: the decoder without hooks. devices: of each
    layer. max_tokens: the longest sequence.

    Any thread may use it, whatever runs in the model: nothing that is set on the model's modules for a pass, hooks or
    another attention, is seen by the clone's, and one pass at a time runs in these.
    """

    decoder: nn.Module
    name: str
    clone: nn.Module
    devices: Sequence[torch.device]
    max_tokens: int
    streams: bool = False
    """Whether the records of a layer make theirs whenever attention reads them, and keep none."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, decoder: nn.Module, devices: Sequence[torch.device], max_tokens: int) -> Projection:
        """Raises `PolicyUnsupported` for a decoder without a list of its layers, and for modules that others run."""
        for name, child in decoder.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == len(devices):
                return cls(decoder, name, _unhooked(decoder), devices, max_tokens)
        raise _unsupported(f"{type(decoder).__name__} has no list of its {len(devices)} layers")

    @property
    def layers(self) -> Sequence[nn.Module]:
        """Of the model itself."""
        layers: Any = self.decoder.get_submodule(self.name)
        return list(layers)

    @property
    def at_steps(self) -> Projection:
        """This one, for records that make keys and values whenever attention reads them."""
        return replace(self, streams=True)

    def layer(self, index: int, repositioned: bool) -> LayerProjection:  # noqa: ARG002
        """For the records of one layer: see `coder.CacheDecoder`."""
        return LayerProjection(self, index)

    def made(self, index: int, residuals: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys `[kv_heads, N, D]` and values `[kv_heads, N, Dv]` of residuals `[N, width]` at positions `[N]`, on the
        layer's device, `RUN` tokens at a time. Raises `PolicyUnsupported` for a layer that gives its cache none."""
        made: tuple[Tensor, ...] = ()
        for first in range(0, max(1, len(residuals)), RUN):
            rows = slice(first, first + RUN)
            pair = self._made(index, residuals[rows], positions[rows])
            if len(residuals) <= RUN:
                return pair
            made = made or tuple(part.new_empty(len(part), len(residuals), part.shape[2]) for part in pair)
            for whole, part in zip(made, pair, strict=True):
                whole[:, rows] = part
        keys, values = made
        return keys, values

    def require_exact(self, index: int, residuals: Tensor, positions: Tensor, own: Sequence[Tensor]) -> None:
        """Raises `PolicyUnsupported` where keys and values that are made of residuals `[N, width]` are not the layer's
        own, `[kv_heads, N, D]` each."""
        rounding = max(1e-5, 4 * torch.finfo(residuals.dtype).eps)  # another number of rows is summed in another order
        for one, other in zip(self.made(index, residuals, positions), own, strict=True):
            if one.shape != other.shape or one.dtype != other.dtype or not close(one, other, rounding):
                raise _unsupported(
                    f"layer {index} of {type(self.decoder).__name__} makes keys and values of more than the residual "
                    "stream"
                )

    @cached_property
    def tried(self) -> Projection:
        """This one, once keys and values have been made of a few residuals and are those of a pass. Raises
        `PolicyUnsupported` where they are not."""
        device = self.devices[0]
        for tokens, last in zip(_TRIED, (0, self.max_tokens), strict=True):
            positions = torch.arange(tokens) + max(0, last - tokens)
            layers = [_Fed(layer) for layer in self._layers]
            cache = Cache(layers=[PassingLayer() for _ in layers])
            ids = torch.arange(tokens, device=device)[None] % self._vocabulary
            self._run(self._with(layers), cache, positions.to(device), input_ids=ids)
            for index, (layer, seen) in enumerate(zip(layers, cache.layers, strict=True)):
                assert layer.residuals is not None
                own = [states[0] for states in seen.given]
                self.require_exact(index, layer.residuals[0], positions, own)
        return self

    @property
    def _vocabulary(self) -> int:
        config: Any = self.clone.config
        return int(config.vocab_size)

    @property
    def _layers(self) -> Sequence[nn.Module]:
        layers: Any = self.clone.get_submodule(self.name)
        return list(layers)

    def _made(self, index: int, residuals: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        device = self.devices[index]
        residuals = residuals.to(device)[None]
        cache = Cache(layers=[_Ending(number) for number in range(len(self.devices))])
        alone = self._with([_Fed(self._layers[index], residuals)])
        if types := getattr(alone.config, "layer_types", None):
            alone.config = copy.copy(alone.config)
            alone.config.layer_types = [types[index]]
        try:
            self._run(alone, cache, positions.to(device), inputs_embeds=residuals)
        except _Ended as end:
            if end.layer == index:
                return end.keys[0], end.values[0]
        raise _unsupported(f"layer {index} of {type(self.decoder).__name__} gives its cache no keys and values")

    def _run(self, decoder: nn.Module, cache: Cache, positions: Tensor, **inputs: Tensor) -> None:
        places = positions.to(torch.int64)[None]
        with torch.no_grad(), self._lock:
            decoder(position_ids=places, use_cache=True, **inputs, **{CACHE_ARGUMENT: cache})

    def _with(self, layers: Sequence[nn.Module]) -> Any:
        """The clone with these layers."""
        view = copy.copy(self.clone)
        view._modules = self.clone._modules | {self.name: nn.ModuleList(layers)}
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
        if self.projection.streams:
            self._made(record, 1)  # which tells what is wrong, and is not kept
            return replace(record, maker=partial(self.projection.made, self.index))
        keys, values = self._made(record, record.lengths[0])
        return replace(record.with_rows(keys, values), entries_at=record.entry_positions.to(keys.device))

    def _made(self, record: Residuals, tokens: int) -> tuple[Tensor, Tensor]:
        """Of the first tokens."""
        residuals = plain(record.keys)[:tokens]  # type: ignore[arg-type]  # coded rows have been decoded
        keys, values = self.projection.made(self.index, residuals, record.positions[0][:tokens])
        if (len(keys), keys.shape[2], values.shape[2]) != (record.kv_heads, *record.full_dims):
            raise BlobError(
                f"the residuals of layer {self.index} stand for other keys and values than its model makes",
                reason="wrong_shape",
            )
        return keys, values


class _Fed(nn.Module):
    """A layer that is given these residuals, whatever reaches it; without any it keeps what does. Other attributes are
    the layer's."""

    def __init__(self, layer: nn.Module, residuals: Tensor | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.residuals = residuals

    def forward(self, states: Tensor, *others: Any, **named: Any) -> Any:
        self.residuals = states if self.residuals is None else self.residuals
        return self.layer(self.residuals, *others, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


class _Ended(Exception):
    def __init__(self, layer: int, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.layer, self.keys, self.values = layer, keys, values


class _Ending(PassingLayer):
    """Ends the pass with the keys and values that it is given, each `[1, kv_heads, N, D]`."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> NoReturn:
        raise _Ended(self.layer, key_states, value_states)


def _unhooked(decoder: nn.Module) -> nn.Module:
    """The decoder with modules of its own, which have no hooks, are in eval mode and call kvshelf's attention. They
    share weights and all else. Raises `PolicyUnsupported` where a module's `forward` is another than its class's: it
    would run the module that is hooked."""
    config: Any = copy.copy(decoder.config)
    config._attn_implementation = IMPLEMENTATION  # of which every mask is none
    clones: dict[nn.Module, nn.Module] = {}

    def cloned(module: nn.Module) -> nn.Module:
        if module in clones:
            return clones[module]
        if "forward" in vars(module):
            raise _unsupported(f"a {type(module).__name__} of the model has been given another forward")
        clones[module] = clone = copy.copy(module)
        own = vars(clone)
        own |= {name: type(hooks)() for name, hooks in own.items() if name.startswith("_forward_")}
        own |= {"training": False, "_compiled_call_impl": None}
        if own.get("config") is decoder.config:
            own["config"] = config
        own["_modules"] = {name: child and cloned(child) for name, child in module._modules.items()}
        return clone

    return cloned(decoder)


def _unsupported(reason: str) -> PolicyUnsupported:
    return PolicyUnsupported(
        f"{reason}, so residuals cannot stand for its keys and values; take policy full, with codec int8 say",
        param="policy",
    )
