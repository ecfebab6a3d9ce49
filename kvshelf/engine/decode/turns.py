"""A finished turn: question and answer, whose keys and values a batch has made already, as layers of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvshelf.artifact.packed import offsets_of
from kvshelf.artifact.records import Entries, Kept, Latents, LayerRecord, Recent, State, States, entries_of
from kvshelf.model.layers import LayerKind


@dataclass(frozen=True)
class Turn:
    """The tokens of a turn, T of them, as they ran behind their document.

    layers: of each layer keys `[kv_heads, T, D]` and values, with Dv for D, or one tensor of latents with their rotated
    parts `[1, T, rank + rope]`; empty where the layer does not attend. states: of each layer behind the last token.
    """

    token_ids: tuple[int, ...]
    layers: tuple[tuple[Tensor, ...], ...]
    states: tuple[tuple[State, ...], ...]

    def part(self, start: int, end: int) -> Turn:
        """Its tokens from `start` to the one before `end`. Of a model with states only one that ends with the turn."""
        layers = tuple(tuple(tensor[:, start:end] for tensor in layer) for layer in self.layers)
        return replace(self, token_ids=self.token_ids[start:end], layers=layers)

    def records(self, kinds: Sequence[LayerKind], before: Sequence[LayerRecord], first: int) -> tuple[LayerRecord, ...]:
        """All of its entries, at their places in the whole document. kinds: of all layers. before: the layers of the
        cache that the turn continues, and `first` the position of its first token."""
        of_layers = (self._entries(index, kind, before[index], first) for index, kind in enumerate(kinds))
        return tuple(
            entries if entries is not None and not states else States(states, entries)
            for entries, states in zip(of_layers, self.states, strict=True)
        )

    def _entries(self, index: int, kind: LayerKind, before: LayerRecord, first: int) -> Entries | None:
        if not kind.attends:
            return None
        if kind.latents:
            rank, _ = kind.latents
            (joined,) = self.layers[index]
            keys, values = joined[..., :rank], joined[..., rank:]
        else:
            keys, values = self.layers[index]
        recent, end = entries_of(before), first + len(self.token_ids)
        if isinstance(recent, Recent):
            return recent.followed_by(keys, values, end)
        heads, tokens = keys.shape[:2]
        positions = torch.arange(first, end, dtype=torch.int32, device=keys.device).repeat(heads)
        fields: dict[str, Any] = {
            "keys": keys.flatten(0, 1).contiguous(),
            "values": values.flatten(0, 1).contiguous(),
            "entries_at": positions,
            "offsets": offsets_of([tokens] * heads),
            "importance": positions.float(),
        }
        return Latents(**fields) if kind.latents else Kept(**fields)
