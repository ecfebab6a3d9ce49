"""What each layer of a model caches, from the model's configuration. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from kvshelf.artifact.shape import tokens_seen
from kvshelf.errors import PolicyUnsupported

_CHUNKED: Final = "chunked_attention"
_ATTEND: Final = frozenset({"full_attention", "sliding_attention", _CHUNKED, "hybrid", "hybrid_sliding"})
_HAVE_STATES: Final = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
_SLIDE: Final = frozenset({"sliding_attention", "hybrid_sliding"})
_KEEP_NOTHING: Final = frozenset({"mlp", "moe"})


class LayerKind(NamedTuple):
    """One layer. attends: whether it has keys and values of its own; otherwise it may use those of a layer before.
    reads: that layer, where `layer_map` names it and not the model's code. window: tokens that its queries see,
    themselves included; None: all. states: how many pairs of a recurrent and a convolution state it has, whose size
    does not grow with the document. latents: with latent attention (MLA), the channels of a token's latent and of its
    rotated part, which are cached in place of keys and values; None: it caches keys and values. chunk: queries see the
    tokens of their own chunk, which begins at a multiple of this; None: all."""

    attends: bool = True
    window: int | None = None
    states: int = 0
    latents: tuple[int, int] | None = None
    chunk: int | None = None
    reads: int | None = None

    @property
    def sees_all(self) -> bool:
        """Whether queries, if there are any, see all tokens before them."""
        return self.window is None and self.chunk is None

    @property
    def reducible(self) -> bool:
        """Whether policies choose among its entries."""
        return self.attends and self.sees_all

    def seen(self, num_tokens: int) -> int:
        """How many tokens of a document the queries after it see."""
        return tokens_seen(num_tokens, self.window, self.chunk)


def hiding(window: int | None, config: Any) -> int | None:
    """The window, or None where it hides no token of any sequence that the model takes, as that of Phi-3-mini-128k."""
    longest = getattr(config, "max_position_embeddings", None) or math.inf
    return None if window is None or window >= longest else window


def layer_kinds(config: Any) -> tuple[LayerKind, ...]:
    """The layers of a model. Raises `PolicyUnsupported` for kinds that kvshelf does not know."""
    window = hiding(getattr(config, "sliding_window", None), config)
    names = getattr(config, "layer_types", None) or ["sliding_attention"] * int(config.num_hidden_layers)
    foreign = sorted({*names} - _ATTEND - _HAVE_STATES - _KEEP_NOTHING)
    if foreign:
        raise PolicyUnsupported(
            f"{config.model_type} has layers of kind {' and '.join(foreign)}, which kvshelf cannot attach yet",
            param="model",
        )
    if not _ATTEND & {*names}:
        raise PolicyUnsupported(
            f"{config.model_type} has no layer that attends, so there are no keys and values to compress", param="model"
        )
    states, rank = int(getattr(config, "number_of_conv_states", None) or 1), getattr(config, "kv_lora_rank", None)
    latents = None if rank is None else (int(rank), int(config.qk_rope_head_dim))
    # The last layers may use the keys and values of a layer before (Gemma 3n).
    num_own = len(names) - int(getattr(config, "num_kv_shared_layers", None) or 0)
    kinds = tuple(
        LayerKind(
            name in _ATTEND,
            int(window) if window is not None and name in _SLIDE else None,
            states if name in _HAVE_STATES else 0,
            latents if name in _ATTEND else None,
            chunk_of(config, layer),
        )
        if layer < num_own
        else LayerKind(attends=False)
        for layer, name in enumerate(names)
    )
    if latents and any(kind.window is not None or (kind.attends and kind.states) for kind in kinds):
        others = " and ".join(sorted({*names} - {"full_attention", "linear_attention", "conv"}))
        raise PolicyUnsupported(
            f"{config.model_type} has latent attention (MLA) beside layers of kind {others}, which kvshelf cannot "
            "attach together yet",
            param="model",
        )
    return _mapped(kinds, getattr(config, "layer_map", None))


def _mapped(kinds: tuple[LayerKind, ...], layer_map: Any) -> tuple[LayerKind, ...]:
    """The layers of a model that was trained for some of them to read the keys and values of others (Stochastic KV
    Routing): its configuration's `layer_map` names for each layer the one that it reads, itself or one before it."""
    if layer_map is None or list(layer_map) == list(range(len(kinds))):
        return kinds
    if len(layer_map) != len(kinds) or any(
        type(leader) is not int or not 0 <= leader <= layer or layer_map[leader] != leader
        for layer, leader in enumerate(layer_map)
    ):
        raise PolicyUnsupported(
            f"layer_map is {layer_map!r}; it must name for each of the {len(kinds)} layers itself, or a layer before "
            "it that reads itself",
            param="model",
        )
    if any(kind != LayerKind() for kind in kinds):
        raise PolicyUnsupported(
            "layer_map goes with layers that all see the whole document and keep keys and values alone", param="model"
        )
    return tuple(
        kind if leader == layer else LayerKind(attends=False, reads=leader)
        for layer, (kind, leader) in enumerate(zip(kinds, layer_map, strict=True))
    )


def readers(kinds: Sequence[LayerKind]) -> dict[int, int]:
    """The layers that read another layer's keys and values by `layer_map`, each with that layer."""
    return {layer: kind.reads for layer, kind in enumerate(kinds) if kind.reads is not None}


def chunk_of(config: Any, layer: int) -> int | None:
    """As `LayerKind.chunk`. Only the configuration has it: attention functions do not get it."""
    names = getattr(config, "layer_types", None)
    if not names or names[layer] != _CHUNKED:
        return None
    size = getattr(config, "attention_chunk_size", None)
    if not size:
        raise PolicyUnsupported(
            f"{config.model_type} has layers with chunked attention and no attention_chunk_size", param="model"
        )
    return int(size)


def counts_by_cache(config: Any) -> bool:
    """Whether some layers count positions by the length of the cache and not by the positions of a call: the
    temperature that layers without RoPE give their queries (Llama 4)."""
    return bool(getattr(config, "attn_temperature_tuning", False))


def attending(kinds: Sequence[LayerKind]) -> list[int]:
    """The layers that have keys and values."""
    return [index for index, kind in enumerate(kinds) if kind.attends]


def reducible(kinds: Sequence[LayerKind]) -> list[int]:
    """The layers that policies reduce."""
    return [index for index, kind in enumerate(kinds) if kind.reducible]
