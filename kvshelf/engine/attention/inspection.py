"""Passes over a few tokens before any document: they show the shapes of a model's layers, and whether kvshelf sees all
of its attention, which a configuration does not say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvshelf.artifact.shape import LayerShape
from kvshelf.engine.attention import attached
from kvshelf.engine.attention.function import CONTEXT, Attended, ForwardContext, kvshelf_attention
from kvshelf.engine.attention.latents import Absorbed, Handover, close
from kvshelf.engine.attention.states import StatefulCache, StateLayer, alone
from kvshelf.errors import PolicyUnsupported, StateConflict
from kvshelf.model.caches import cache_class
from kvshelf.model.devices import input_device
from kvshelf.model.layers import LayerKind, attending, readers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BEFORE, _BEHIND = 16, 2
_RESTARTED = 0.1
"""States that differ by more than this share of them began anew: rounding changes them by far less, and most of a state
is what came before."""

_ALIKE = 1e-2
"""Differences of keys up to this share of the largest are rounding: other positions change them by far more."""


def layer_shapes(
    model: PreTrainedModel, kinds: Sequence[LayerKind], absorbed: Mapping[int, Absorbed]
) -> tuple[LayerShape, ...]:
    """The shapes of the states that each layer caches, from a pass over two tokens behind an empty document. absorbed:
    the layers that have latents.

    Raises `PolicyUnsupported` for a model that changes cached states before it attends, that attends more than once in
    a layer, that counts positions in its own way, or whose layers are not of these kinds: its answers behind a document
    would be others than by itself.
    """
    tokens = torch.ones(1, 2, dtype=torch.int64, device=input_device(model))
    observer, name = _ShapeObserver(attending(kinds)), type(model).__name__
    handover = Handover(absorbed)
    layers = [_empty(index, kind, absorbed, handover) for index, kind in enumerate(kinds)]
    cache = cache_class(StatefulCache, model)(layers=attached.with_readers(layers, readers(kinds)))
    kwargs = {attached.CACHE_ARGUMENT: cache, CONTEXT: observer, **handover.begin()}
    with torch.no_grad(), kvshelf_attention(model):
        try:
            model.base_model(input_ids=tokens, use_cache=True, **kwargs)
        except StateConflict as error:
            raise PolicyUnsupported(
                f"{name} works on cached keys or values before it attends, so kvshelf cannot attach a document to it",
                param="model",
            ) from error
        except AttributeError as error:
            if not isinstance(error.obj, StatefulCache | attached.AttachedLayer | StateLayer):
                raise
            raise PolicyUnsupported(
                f"{name} asks its cache for {error.name}, which a cache of keys and values has not", param="model"
            ) from error
        if observer.first_keys is not None and not close(_keys_at(model, tokens), observer.first_keys, _ALIKE):
            raise PolicyUnsupported(
                f"{name} does not count positions from 0 as kvshelf does, so what it stores would stand elsewhere than "
                "where the model puts it",
                param="model",
            )
    require_every_layer(observer.layers, attending(kinds))
    for index, kind in enumerate(kinds):
        if kind.attends and (window := observer.layers[index].window) != kind.window:
            raise PolicyUnsupported(
                f"layer {index} attends with a sliding window of {window}, and the model's configuration says "
                f"{kind.window}; kvshelf stores no layer that it may misread",
                param="model",
            )
    return tuple(
        observer.layers.get(index, LayerShape())._replace(states=tuple(state.shape for state in alone(states, 0)))
        for index, states in enumerate(cache.states())
    )


def require_every_layer(layers: Iterable[int], expected: Sequence[int]) -> None:
    """Refuse a model with layers that did not run through kvshelf's attention. layers: those that did."""
    if sorted(layers) != list(expected):
        raise PolicyUnsupported(
            f"only the layers {sorted(layers)} of {len(expected)} ran through transformers' attention interface; this "
            "model cannot be compressed",
            param="model",
        )


def tokens_at_once(model: PreTrainedModel, kinds: Sequence[LayerKind], absorbed: Mapping[int, Absorbed]) -> int | None:
    """How many tokens of a row a pass behind a document may have: None for any number, 1 where recurrent layers begin
    anew in a pass of several tokens in place of continuing their states. Transformers' code of the first Mamba does so
    (Jamba, 5.24), and nothing but the answers would show it.

    Raises `PolicyUnsupported` for a model whose layers begin anew in a pass of one token, too.
    """
    if not any(kind.states for kind in kinds):
        return None
    tokens = torch.arange(_BEFORE + _BEHIND, device=input_device(model)).unsqueeze(0) % model.config.vocab_size
    with torch.no_grad(), kvshelf_attention(model):
        whole, together, single = (
            _states_behind(model, kinds, absorbed, torch.split(tokens, pieces, dim=1))
            for pieces in ([_BEFORE + _BEHIND], [_BEFORE, _BEHIND], [_BEFORE] + [1] * _BEHIND)
        )
    if not _continued(single, whole):
        raise PolicyUnsupported(
            f"{type(model).__name__} forgets its recurrent states from one pass to the next, so an answer behind a "
            "stored document would not be its own",
            param="model",
        )
    return None if _continued(together, whole) else 1


def _continued(states: Sequence[Tensor], whole: Sequence[Tensor]) -> bool:
    """Whether states are those of one pass; also where weights are broken and states are no numbers."""
    return not any(
        float((one - other).norm()) > _RESTARTED * float(other.norm()) for one, other in zip(states, whole, strict=True)
    )


def _states_behind(
    model: PreTrainedModel, kinds: Sequence[LayerKind], absorbed: Mapping[int, Absorbed], pieces: Sequence[Tensor]
) -> list[Tensor]:
    """The recurrent states behind tokens that are read in these pieces `[1, T]`."""
    handover, start = Handover(absorbed), 0
    layers = [_empty(index, kind, absorbed, handover) for index, kind in enumerate(kinds)]
    cache = cache_class(StatefulCache, model)(layers=layers)
    for piece in pieces:
        positions = torch.arange(start, start + piece.shape[1], device=piece.device).unsqueeze(0)
        kwargs = {attached.CACHE_ARGUMENT: cache, **handover.begin()}
        model.base_model(input_ids=piece, position_ids=positions, use_cache=True, **kwargs)
        start += piece.shape[1]
    return [state.tensor.float() for states in cache.states() for state in states if state.role == "recurrent"]


def _empty(
    index: int, kind: LayerKind, absorbed: Mapping[int, Absorbed], handover: Handover
) -> attached.AttachedLayer | StateLayer:
    """A layer of a cache without a document."""
    if not kind.attends:
        return StateLayer(kind.states)
    if index in absorbed:
        return attached.LatentLayer((), 0, None, index=index, absorbed=absorbed[index], handover=handover)
    return attached.AttachedStateLayer((), 0, None, kind.states) if kind.states else attached.AttachedLayer((), 0)


class _ShapeObserver(ForwardContext):
    """Notes the shape of each layer's keys and values, and the keys of the first layer."""

    reads_attention = False

    def __init__(self, attending: Sequence[int]) -> None:
        """attending: the layers with keys and values of their own; others may use these."""
        self._attending = frozenset(attending)
        self.layers: dict[int, LayerShape] = {}
        self.first_keys: Tensor | None = None

    def after_attention(self, layer: Attended) -> None:
        index = layer.layer_idx
        if index not in self._attending:
            return
        if index in self.layers:
            raise PolicyUnsupported(
                f"layer {index} attends more than once in a pass, and kvshelf stores the keys of one", param="model"
            )
        if self.first_keys is None:
            self.first_keys = layer.keys
        keys, values = layer.latents or (layer.keys, layer.values)
        (_, heads, _, key_dim), value_dim = keys.shape, values.shape[-1]
        dtype, latent = str(layer.keys.dtype).removeprefix("torch."), layer.latents is not None
        self.layers[index] = LayerShape(heads, key_dim, value_dim, dtype, layer.window, layer.chunk, latent)


class FirstLayersSeen(Exception):
    """Ends a pass whose later layers nobody needs."""


class FirstLayers(ForwardContext):
    """Collects the states of the first layers, and ends the pass by `FirstLayersSeen`."""

    reads_attention = False

    def __init__(self, count: int) -> None:
        self._count = count
        self.attended: list[Attended] = []

    def after_attention(self, layer: Attended) -> None:
        self.attended.append(layer)
        if len(self.attended) == self._count:
            raise FirstLayersSeen


def _keys_at(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The keys of the first layer for tokens `[1, N]` in a pass with position ids, from 0 on."""
    observer = FirstLayers(1)
    positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    with suppress(FirstLayersSeen):
        model.base_model(input_ids=tokens, position_ids=positions, use_cache=False, **{CONTEXT: observer})
    return observer.attended[0].keys
