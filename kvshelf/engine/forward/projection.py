"""Keys and values of stored residuals, made by the model's own modules (KV-Direct, arXiv 2603.19664).

A copy of the decoder with one layer alone gets the residuals as the input of that layer, at their positions, and a
cache that ends the pass with the first keys and values. So norms, biases, rotations and whatever else a family has are
the model's own, and neither attention nor anything behind it runs. A token of a layer takes
2 * width * (q_heads + 2 * kv_heads) * D FLOPs: the module makes queries, too.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Final, NoReturn, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvshelf.artifact.records import PackedRecord, Residuals
from kvshelf.engine.attention.attached import CACHE_ARGUMENT, IMPLEMENTATION, PassingLayer
from kvshelf.engine.attention.latents import close
from kvshelf.errors import BlobError, PolicyUnsupported
from kvshelf.kernels.quantize.rows import plain

RUN: Final = 1024
"""Rows of which keys and values are made at once: the module makes as many queries and other states."""

_TRIED: Final = 9, 3
"""Numbers of tokens on which a model is tried: from position 0 on, and up to the last position of the model."""


@dataclass(frozen=True, eq=False)
class Projection:
    """Makes keys and values of one model. name: of the list of `layers` in the decoder. clone: the decoder without
    hooks. devices: of each layer. max_tokens: the longest sequence. streams: whether records make keys and values
    whenever attention reads them, and keep none.

    Any thread may use it while the model runs: the clone's modules have neither the hooks nor the attention that are
    set on the model's modules for a pass, and run one pass at a time.
    """

    decoder: nn.Module
    name: str
    clone: nn.Module
    devices: Sequence[torch.device]
    max_tokens: int
    streams: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, decoder: nn.Module, devices: Sequence[torch.device], max_tokens: int) -> Projection:
        """Raises `PolicyUnsupported` for a decoder without a list of its layers, and as `_unhooked`."""
        for name, child in decoder.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == len(devices):
                return cls(decoder, name, _unhooked(decoder), devices, max_tokens)
        raise _unsupported(f"{type(decoder).__name__} has no list of its {len(devices)} layers")

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The layers of the model itself."""
        return list(cast(nn.ModuleList, self.decoder.get_submodule(self.name)))

    @property
    def at_steps(self) -> Projection:
        """The same with `streams`."""
        return replace(self, streams=True)

    def layer(self, index: int, repositioned: bool) -> LayerProjection:  # noqa: ARG002
        """For the records of one layer: see `coder.CacheDecoder`."""
        return LayerProjection(self, index)

    def project(self, index: int, residuals: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys `[kv_heads, N, D]` and values `[kv_heads, N, Dv]` of residuals `[N, width]` at positions `[N]`, on the
        layer's device, `RUN` tokens at a time. Raises `PolicyUnsupported` for a layer that puts none into its cache."""
        if len(residuals) <= RUN:
            return self._run_layer(index, residuals, positions)
        states: tuple[Tensor, ...] = ()
        for first in range(0, len(residuals), RUN):
            rows = slice(first, first + RUN)
            pair = self._run_layer(index, residuals[rows], positions[rows])
            states = states or tuple(part.new_empty(len(part), len(residuals), part.shape[2]) for part in pair)
            for whole, part in zip(states, pair, strict=True):
                whole[:, rows] = part
        keys, values = states
        return keys, values

    def require_exact(self, index: int, residuals: Tensor, positions: Tensor, states: Sequence[Tensor]) -> None:
        """Raises `PolicyUnsupported` where the projections of residuals `[N, width]` are not the layer's keys and
        values, `[kv_heads, N, D]` each."""
        rounding = max(1e-5, 4 * torch.finfo(residuals.dtype).eps)  # another number of rows is summed in another order
        for actual, expected in zip(self.project(index, residuals, positions), states, strict=True):
            same_kind = actual.shape == expected.shape and actual.dtype == expected.dtype
            if not (same_kind and close(actual, expected, rounding)):
                raise _unsupported(
                    f"layer {index} of {type(self.decoder).__name__} makes keys and values of more than the residual "
                    "stream"
                )

    @cached_property
    def tried(self) -> Projection:
        """This projection. Raises `PolicyUnsupported` where the projections of a few residuals are not the keys and
        values of a pass."""
        device, config = self.devices[0], cast(Any, self.clone.config)
        for tokens, last in zip(_TRIED, (0, self.max_tokens), strict=True):
            positions = torch.arange(tokens) + max(0, last - tokens)
            layers = [_Fed(layer) for layer in self._layers]
            cache = Cache(layers=[PassingLayer() for _ in layers])
            ids = torch.arange(tokens, device=device)[None] % config.vocab_size
            self._run(self._with(layers), cache, positions.to(device), input_ids=ids)
            for index, (layer, passed) in enumerate(zip(layers, cache.layers, strict=True)):
                assert layer.residuals is not None
                self.require_exact(index, layer.residuals[0], positions, [states[0] for states in passed.visible])
        return self

    @property
    def _layers(self) -> Sequence[nn.Module]:
        return list(cast(nn.ModuleList, self.clone.get_submodule(self.name)))

    def _run_layer(self, index: int, residuals: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
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
        residuals that are not of this model, and as `Projection.project`."""
        if not isinstance(record, Residuals):
            return record
        if self.projection.streams:
            self._project(record, 1)  # to raise; the result is not kept
            return replace(record, maker=partial(self.projection.project, self.index))
        keys, values = self._project(record, record.lengths[0])
        return replace(record.with_rows(keys, values), entries_at=record.entry_positions.to(keys.device))

    def _project(self, record: Residuals, tokens: int) -> tuple[Tensor, Tensor]:
        residuals = plain(record.keys)[:tokens]  # type: ignore[arg-type]  # coded rows have been decoded
        keys, values = self.projection.project(self.index, residuals, record.positions[0][:tokens])
        if (len(keys), keys.shape[2], values.shape[2]) != (record.kv_heads, *record.full_dims):
            raise BlobError(
                f"the residuals of layer {self.index} stand for other keys and values than its model makes",
                reason="wrong_shape",
            )
        return keys, values


class _Fed(nn.Module):
    """A layer that runs on these residuals in place of its input; without residuals it keeps its input as such. Other
    attributes are the layer's."""

    def __init__(self, layer: nn.Module, residuals: Tensor | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.residuals = residuals

    def forward(self, states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.residuals = states if self.residuals is None else self.residuals
        return self.layer(self.residuals, *args, **kwargs)

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
    """Ends the pass with the keys and values of its update, `[1, kv_heads, N, D]`."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> NoReturn:
        raise _Ended(self.layer, key_states, value_states)


def _unhooked(decoder: nn.Module) -> nn.Module:
    """A decoder with the same weights and attributes whose modules have no hooks, are in eval mode and call kvshelf's
    attention. Raises `PolicyUnsupported` where a module's `forward` is another than its class's: it would run the
    module that is hooked."""
    config: Any = copy.copy(decoder.config)
    config._attn_implementation = IMPLEMENTATION  # of which every mask is none
    clones: dict[nn.Module, nn.Module] = {}

    def cloned(module: nn.Module) -> nn.Module:
        if module in clones:
            return clones[module]
        if "forward" in vars(module):
            raise _unsupported(f"a {type(module).__name__} of the model has been given another forward")
        clones[module] = clone = copy.copy(module)
        attributes = vars(clone)
        attributes |= {name: type(hooks)() for name, hooks in attributes.items() if name.startswith("_forward_")}
        attributes |= {"training": False, "_compiled_call_impl": None}
        if attributes.get("config") is decoder.config:
            attributes["config"] = config
        attributes["_modules"] = {name: child and cloned(child) for name, child in module._modules.items()}
        return clone

    return cloned(decoder)


def _unsupported(reason: str) -> PolicyUnsupported:
    return PolicyUnsupported(
        f"{reason}, so residuals cannot stand for its keys and values; take policy full, with codec int8 say",
        param="policy",
    )
