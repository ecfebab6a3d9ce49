"""What a model's forward pass shows before any document: the shapes of its layers, and whether kvshelf sees all of its
attention. A configuration does not tell."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvshelf.errors import PolicyUnsupported, StateConflict
from kvshelf.store.artifact.shape import LayerShape
from kvshelf.workers.engine.attention.attached import CACHE_ARGUMENT, AttachedLayer
from kvshelf.workers.engine.attention.function import CONTEXT, Attended, kvshelf_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ALIKE = 1e-2
"""Differences of keys up to this share of the largest are rounding: other positions change them by far more."""


def layer_shapes(model: PreTrainedModel) -> dict[int, LayerShape]:
    """The shape of each layer's keys and values, from a pass over two tokens behind an empty document.

    Raises `PolicyUnsupported` for a model that changes cached states before it attends, that attends more than once in
    a layer, or that counts positions in its own way: behind a document it would say something else than by itself.
    """
    tokens = torch.ones(1, 2, dtype=torch.int64, device=model.device)
    observer, kind = _ShapeObserver(), type(model).__name__
    cache = Cache(layers=[AttachedLayer((), 0) for _ in range(model.config.num_hidden_layers)])
    with torch.no_grad(), kvshelf_attention(model):
        try:
            model.base_model(input_ids=tokens, use_cache=True, **{CACHE_ARGUMENT: cache, CONTEXT: observer})
        except StateConflict as error:
            raise PolicyUnsupported(
                f"{kind} works on cached keys or values before it attends, so kvshelf cannot attach a document to it",
                param="model",
            ) from error
        except AttributeError as error:
            if not isinstance(error.obj, Cache | AttachedLayer):
                raise
            raise PolicyUnsupported(
                f"{kind} asks its cache for {error.name}, which a cache of keys and values has not", param="model"
            ) from error
        if observer.first_keys is not None and not _alike(observer.first_keys, _keys_at(model, tokens)):
            raise PolicyUnsupported(
                f"{kind} does not count positions from 0 as kvshelf does, so what it stores would stand elsewhere than "
                "where the model puts it",
                param="model",
            )
    return dict(sorted(observer.layers.items()))


class _ShapeObserver:
    """A `ForwardContext` that notes the shape of each layer's keys and values, and the keys of the first layer."""

    probe_lengths: tuple[int, ...] = ()
    reads_attention = False

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}
        self.first_keys: Tensor | None = None

    def after_attention(self, layer: Attended) -> None:
        (_, heads, _, key_dim), value_dim = layer.keys.shape, layer.values.shape[-1]
        dtype = str(layer.keys.dtype).removeprefix("torch.")
        index: int = layer.module.layer_idx  # type: ignore[assignment]
        if index in self.layers:
            raise PolicyUnsupported(
                f"layer {index} attends more than once in a pass, and kvshelf stores the keys of one", param="model"
            )
        if self.first_keys is None:
            self.first_keys = layer.keys
        self.layers[index] = LayerShape(heads, key_dim, value_dim, dtype, layer.window, layer.chunk)


class _Ended(Exception):
    """Ends a pass whose first layer has been seen."""


class _FirstKeys:
    """A `ForwardContext` that takes the keys of the first layer, and ends the pass."""

    probe_lengths: tuple[int, ...] = ()
    reads_attention = False
    keys: Tensor

    def after_attention(self, layer: Attended) -> None:
        self.keys = layer.keys
        raise _Ended


def _keys_at(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The keys of the first layer for tokens `[1, N]` whose positions are told, as kvshelf tells them: from 0 on."""
    observer = _FirstKeys()
    positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    with suppress(_Ended):
        model.base_model(input_ids=tokens, position_ids=positions, use_cache=False, **{CONTEXT: observer})
    return observer.keys


def _alike(keys: Tensor, others: Tensor) -> bool:
    """Also where weights are broken and keys are no numbers, which is refused elsewhere."""
    return not float((keys - others).abs().max()) > _ALIKE * float(keys.abs().max())
