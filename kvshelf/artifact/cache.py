"""The artifact: what remains of a document's KV cache after compression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kvshelf.artifact import codecs, records
from kvshelf.artifact.blob import PackedBlob, as_view, tensors
from kvshelf.artifact.blob.header import Header
from kvshelf.artifact.coder import CacheDecoder, Coder, plain_layer
from kvshelf.artifact.encoding import Refusals, apart, classes_of, encode
from kvshelf.artifact.exported import split
from kvshelf.artifact.identity import Identity
from kvshelf.artifact.shape import LayerShape, Shape
from kvshelf.kernels.staging import carried, events_of


@dataclass(frozen=True, eq=False)
class CompressedCache:
    """A document's reduced KV cache, ready to be attached to the model it was made under.

    `next_position` is the position of the first query token: the document's length, not the number of entries kept,
    unless the policy counts positions within the cache. `codec` is the canonical text of the layers' codec.
    `sentence_ends` are the positions of the tokens that end the document's sentences, ascending, the last one that of
    its last token; empty where the document was token ids without a tokenizer. They follow from the document, so the
    identity does not name them.
    `summary`: by layer, the codes by which a search finds the document, little-endian (`engine.summary`); empty where
    nobody made any. It is no part of the identity: answers do not depend on it.
    """

    layers: tuple[records.LayerRecord, ...]
    num_tokens: int
    next_position: int
    identity: Identity
    codec: str = "none"
    sentence_ends: tuple[int, ...] = ()
    summary: tuple[bytes, ...] = ()

    def __repr__(self) -> str:
        """One line. The document is shown by the beginning of its digest: a cache has an id only on a shelf."""
        identity = self.identity
        return (
            f"CompressedCache(document={identity.document[:12]}, model={identity.model.name!r}, "
            f"policy={identity.policy}, "
            f"kept={self.kept_tokens} of {self.num_tokens}, codec={self.codec}, nbytes={self.nbytes})"
        )

    @property
    def nbytes(self) -> int:
        """Bytes held in memory by all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def bytes_full(self) -> int:
        """Bytes of the document's keys, values and states in the model's dtypes, of layers with a sliding window or
        chunks those that questions see: the model itself need hold no more."""
        entries_bytes = sum(
            (layer.entries if isinstance(layer, records.Recent) else layer.kv_heads * self.num_tokens)
            * (layer.key_dim + layer.value_dim)
            * layer.dtype.itemsize
            for layer in self._with_entries
        )
        return entries_bytes + sum(layer.states_nbytes for layer in self.layers if isinstance(layer, records.States))

    @property
    def _with_entries(self) -> list[records.Entries]:
        return [entries for layer in self.layers if (entries := records.entries_of(layer)) is not None]

    @property
    def attached_bytes(self) -> int:
        """Bytes of the layers while questions are asked. Those of a coded cache are then decoded, and latents joined
        with their rotated parts. Keys and values replace their residuals, or stand beside them, one layer at a time."""
        parts = [part for entries in self._with_entries for part in records.parts_of(entries)]
        read = self.nbytes + sum(part.joined_bytes + part.unpacked_bytes for part in parts)
        sizes = [part.made_bytes for part in parts]
        return read + (max(sizes)[0] if self.made_at_steps else sum(made - rows for made, rows in sizes))

    @property
    def made_at_steps(self) -> bool:
        """Whether keys and values are made of its residuals whenever attention reads them."""
        return self.projected and self.identity.policy_params.get("made") == "step"

    @property
    def coded(self) -> bool:
        """Whether rows have to be decoded before attention reads them: under klt and lossless, and residuals."""
        return codecs.Codec.parse(self.codec).coded or self.projected

    @property
    def projected(self) -> bool:
        """Whether the model makes some of its keys and values before attention reads them, of residuals."""
        return bool(self.residual_widths)

    @property
    def residual_widths(self) -> Set[int]:
        """How many numbers its residuals have; none where it has none."""
        parts = (part for entries in self._with_entries for part in records.parts_of(entries))
        return {part.keys.shape[1] for part in parts if part.projected}

    @property
    def reduced(self) -> Sequence[records.Entries]:
        """The entries among which the policy chose: of layers that see the whole document, or without any of all."""
        entries = self._with_entries
        return [layer for layer in entries if not isinstance(layer, records.Recent)] or entries

    @property
    def kept_tokens(self) -> int:
        """Entries kept per `reduced` layer and KV head, the mean rounded to the nearest integer."""
        heads = sum(layer.kv_heads for layer in self.reduced)
        return round(sum(layer.entries for layer in self.reduced) / heads)

    @property
    def shape(self) -> Shape:
        return Shape(tuple(map(_layer_shape, self.layers)), self.num_tokens, self.next_position)

    def to(self, device: torch.device | str | Sequence[torch.device]) -> CompressedCache:
        """The same cache on another device, or on one for each layer. To the CPU and to a card it goes through pinned
        memory; a copy to the CPU waits for nothing that a card was given behind `events`."""
        devices = [torch.device(device)] * len(self.layers) if isinstance(device, torch.device | str) else device
        layers = list(self.layers)
        for target in dict.fromkeys(devices):
            indices = [
                index
                for index, layer in enumerate(layers)
                if devices[index] == target and records.devices_of(layer) != {target}
            ]
            elsewhere = [layers[index] for index in indices]
            tensors_there = carried(records.tensors_of(elsewhere), target, self.events)
            for index, layer in zip(indices, records.with_tensors(elsewhere, tensors_there), strict=True):
                layers[index] = layer
        return replace(self, layers=tuple(layers))

    @cached_property
    def events(self) -> Mapping[torch.device, torch.cuda.Event]:
        """For each card that holds layers, the event after which they are there. It covers the work that the card had
        when this property was first read, so the code that makes a cache reads it at once."""
        return events_of(device for layer in self.layers for device in records.devices_of(layer))

    def encoded(self, codec: str, coder: Coder | None = None, *, whole_groups: bool = False) -> CompressedCache:
        """The cache under a codec (see `kvshelf.artifact.codecs`); itself if nothing changes. Only `klt` needs a
        coder, which an engine has. whole_groups: as of `encode`.

        "none" adds no encoding: an encoded cache stays as it is. Raises `InvalidRequest` for an unknown codec, for a
        cache under another codec, and for layers that the codec cannot encode.
        """
        target = codecs.resolve(self.codec, codec)
        if str(target) == self.codec:
            return self
        layers = list((self.to("cpu") if target.coded else self).layers)  # the CPU codes them
        whole = {
            index: entries
            for index, layer in enumerate(layers)
            if (entries := records.entries_of(layer)) is not None and not isinstance(entries, records.Recent)
        }
        parted = dict(zip(whole, apart(list(whole.values()), self.identity.protect), strict=True))
        unprotected = {index: records.entries_from(others) for index, (_, others) in parted.items() if others}
        classes: Sequence[Tensor | None] = [None] * len(unprotected)
        if target.classes:
            target.require_kept(self.identity.budget_tokens, self.num_tokens)
            classes = classes_of(target, list(unprotected.values()), self.num_tokens)
        refusals = Refusals()
        for (index, entries), members in zip(unprotected.items(), classes, strict=True):
            layer_coder = None if coder is None else coder.layer(index, self.repositioned)
            encoded = encode(target, entries, f"layer {index}", layer_coder, members, whole_groups, refusals)
            # Protected entries come first: the last record of a layer may be the residual of its codec.
            parts = [*parted[index][0], *records.parts_of(encoded)]
            layers[index] = records.with_entries(layers[index], records.entries_from(parts))
        refusals.settle()
        identity = self.identity
        if target.name == "klt":
            assert coder is not None
            identity = coder.transforms.mark(identity)
        return replace(self, layers=tuple(layers), identity=identity, codec=str(target))

    def decoded(self, coder: CacheDecoder | None = None) -> CompressedCache:
        """The cache with plain rows in place of those under codec `klt`, which takes its `coder`, of residuals, which
        take the model's, or under `lossless`, for attention. It is no artifact any more: its codec says what its
        numbers went through, and it cannot be written.
        """
        layers = (plain_layer(layer, coder, index, self.repositioned) for index, layer in enumerate(self.layers))
        return replace(self, layers=tuple(layers))

    @property
    def repositioned(self) -> bool:
        """Whether its policy counts positions within the cache, and rotated the keys to those."""
        return self.next_position != self.num_tokens

    def to_bytes(self, codec: str | None = None) -> bytes:
        """The blob of docs/internals/format.md; equal caches give equal bytes. `codec` None keeps the cache's encoding.

        Raises `InvalidRequest` as `encoded` does, and for a cache that the format cannot hold.
        """
        cache = self if codec is None else self.encoded(codec)
        return b"".join(cache.pack().buffers)

    def pack(self) -> PackedBlob:
        """The blob as buffers that share the tensors' memory. Raises `InvalidRequest` as `tensors.pack` does."""
        return tensors.pack(
            self.to("cpu").layers,
            self.num_tokens,
            self.next_position,
            self.identity,
            self.codec,
            self.sentence_ends,
            self.summary,
        )

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> CompressedCache:
        """Read a blob, alone or in an export. Checks every digest first. Raises `BlobError` for any other bytes."""
        return cls.of(*tensors.decode(split(as_view(data)).blob))

    @classmethod
    def of(cls, header: Header, layers: tuple[records.LayerRecord, ...]) -> CompressedCache:
        """The cache with these layers that a blob's header describes."""
        return cls(
            layers,
            header.num_tokens,
            header.next_position,
            header.to_identity(),
            header.codec,
            header.sentences,
            tuple(header.summary),
        )


def _layer_shape(layer: records.LayerRecord) -> LayerShape:
    states, entries = tuple(state.shape for state in records.states_of(layer)), records.entries_of(layer)
    if entries is None:
        return LayerShape(states=states)
    dims = (entries.kv_heads, entries.key_dim, entries.value_dim, str(entries.dtype).removeprefix("torch."))
    first = records.parts_of(entries)[0]
    return LayerShape(*dims, *first.sees, first.latent, states)
