"""A compressed cache as a plain transformers `DynamicCache`, for code without kvshelf: one key and one value per token
and head, equally many in every head and layer, rotated to the requested positions, and copies of the states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor
from transformers import DynamicCache

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.packed import HeadView, Packed
from kvshelf.artifact.records import Entries, Merged, Recent, SlidingWindow, entries_of, parts_of, states_of
from kvshelf.engine.attention.states import fill, together
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.model.rope import Rope

Positions = Literal["absolute", "contiguous"]
"""Where exported keys stand: at their places in the document, or at 0..K-1."""


def export(cache: CompressedCache, positions: Positions, *, rope: Rope | None, config: Any) -> DynamicCache:
    """See `Engine.export`. cache: a prefix (`no_prefix`). config: the model's, which says which layers slide."""
    if positions not in get_args(Positions):
        raise InvalidRequest(f"positions is {positions!r}; one of {', '.join(get_args(Positions))}", param="positions")
    in_cache = cache.next_position < cache.num_tokens  # the keys are at their places in the cache already
    places = Places(rope, stored_at_slots=in_cache, wanted_at_slots=in_cache or positions == "contiguous")
    exported = DynamicCache(config=config)
    for index, record in enumerate(cache.layers):
        if (entries := entries_of(record)) is not None:
            keys, values = places.layer(plain_parts(entries, index))
            exported.update(keys.unsqueeze(0), values.unsqueeze(0), index)
    for layer, record in zip(exported.layers, cache.layers, strict=True):
        fill(layer, together([states_of(record)]))
    return exported


class Places:
    """Rotates the keys of a layer to the requested positions, each key at most once. shift: added to all of these."""

    def __init__(self, rope: Rope | None, *, stored_at_slots: bool, wanted_at_slots: bool, shift: int = 0) -> None:
        self._rope = rope
        self._stored_at_slots = stored_at_slots
        self._wanted_at_slots = wanted_at_slots
        self._shift = shift

    def layer(self, parts: Sequence[Packed], heads: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Keys `[heads, K, D]` and values `[heads, K, Dv]` of some heads of a layer (`plain_parts`)."""
        keys, values = zip(*self.heads(parts, heads), strict=True)
        return torch.stack(keys), torch.stack(values)

    def heads(self, parts: Sequence[Packed], heads: slice = slice(None)) -> list[tuple[Tensor, Tensor]]:
        """Keys `[K, D]` and values `[K, Dv]` of some heads of a layer, which may differ in K."""
        views = list(zip(*(part.views() for part in parts), strict=True))[heads]
        return [self._head(of_head, parts[0]) for of_head in views]

    def _head(self, views: Sequence[HeadView], like: Packed) -> tuple[Tensor, Tensor]:
        """Keys `[K, D]` and values `[K, Dv]` of a head, of all its parts, in ascending position."""
        positions, order = torch.cat([view.positions for view in views]).long().sort()
        keys = torch.cat([view.keys[:] for view in views])[order]
        values = torch.cat([view.values[:] for view in views])[order]
        slots = torch.arange(len(positions), device=positions.device)
        target = (slots if self._wanted_at_slots else positions) + self._shift
        if like.rope_mode == "pre":
            keys = self._undoable().rotate(keys, target)
        elif not torch.equal(stored := slots if self._stored_at_slots else positions, target):
            keys = self._undoable().moved(keys, stored, target)
        return keys.to(like.dtype), values

    def _undoable(self) -> Rope:
        if self._rope is None:
            raise _unsupported("the model has no rotary embedding, the same in all layers, that could be undone")
        if self._rope.length_dependent:
            raise _unsupported("the frequencies of the model's rotary embedding change with the length of the sequence")
        return self._rope


def plain_parts(record: Entries, index: int, *, uniform: bool = True) -> tuple[Packed, ...]:
    """The parts of a layer. uniform: with as many entries in every head. Raises `PolicyUnsupported` for a layer that is
    in no prefix."""
    if reason := _no_entries(record, index) or (uniform and _not_uniform(record, index)):
        raise _unsupported(reason)
    return tuple(part for part in parts_of(record) if isinstance(part, Packed))


def no_prefix(cache: CompressedCache) -> str:
    """Why the entries of a cache are no plain prefix of a text: one key and one value of a token in each place, equally
    many in every head and layer. "" where they are one."""
    layers = [
        (index, entries) for index, record in enumerate(cache.layers) if (entries := entries_of(record)) is not None
    ]
    reasons = (_no_entries(entries, index) or _not_uniform(entries, index) for index, entries in layers)
    if reason := next(filter(None, reasons), ""):
        return reason
    lengths = [len(record.positions[0]) for record in cache.reduced]
    if len(set(lengths)) > 1:  # transformers makes one mask for all layers, from the length of one layer
        return (
            f"its layers keep different numbers of entries ({min(lengths)} to {max(lengths)}), and transformers masks "
            "all layers by the length of one"
        )
    if cache.next_position < cache.num_tokens and cache.next_position != lengths[0]:
        return f"it counts positions within the cache up to {cache.next_position} and keeps {lengths[0]} entries"
    return ""


def _no_entries(record: Entries, index: int) -> str:
    """Why the entries of a layer are not a key and a value of a token in each place; "" where they are."""
    modes = set()
    for part in parts_of(record):
        if isinstance(part, Recent):
            sees = "a sliding window" if isinstance(part, SlidingWindow) else "chunked attention"
            return f"layer {index} has {sees}, of which only the last tokens are stored"
        if isinstance(part, Merged):
            return (
                f"layer {index} has merged tokens, which share a key direction. Merged with RoPE in them (pos='post') "
                "they cannot be un-rotated, because a direction stands for several positions; merged before it "
                "(pos='pre') every slot would become an entry of its own, and heads have different numbers of slots"
            )
        modes.add(part.rope_mode)
    if len(modes) > 1:
        return f"layer {index} has keys with and without their rotation"
    return ""


def _not_uniform(record: Entries, index: int) -> str:
    """Why the heads of a layer are no part of one prefix; "" where they are."""
    if record.uniform:
        return ""
    lengths = record.lengths
    return (
        f"the heads of layer {index} keep different numbers of entries ({min(lengths)} to {max(lengths)}), and a "
        "prefix has as many in every head"
    )


UNEXPORTED: Final = (
    "the cache cannot be exported: {reason}. Attach it with engine.attached(cache), or compress the document with a "
    "policy that keeps equally many tokens of every head, unmerged"
)


def _unsupported(reason: str) -> PolicyUnsupported:
    return PolicyUnsupported(UNEXPORTED.format(reason=reason), param="positions")
