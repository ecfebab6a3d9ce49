"""What reading a cache needs of the model that vLLM runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kvshelf.artifact.coder import Coder, plain_layer
from kvshelf.artifact.identity import ModelIdentity
from kvshelf.artifact.opened.arriving import ArrivingCache
from kvshelf.artifact.records import Entries, LayerRecord, entries_of
from kvshelf.artifact.shape import LayerShape
from kvshelf.artifact.transforms import Transforms
from kvshelf.engine.engine import Engine
from kvshelf.engine.export import Places, plain_parts
from kvshelf.errors import ModelMismatch, PolicyUnsupported
from kvshelf.model.rope import Rope
from kvshelf.store.jobs.transforms import KeptTransforms


def require_pages(layers: Sequence[LayerShape], name: str) -> None:
    """Raises `PolicyUnsupported` for a model that vLLM gives other pages. layers: all of its."""
    for index, layer in enumerate(layers):
        plain = LayerShape(layer.kv_heads, layer.key_dim, layer.value_dim, layer.dtype)
        if layer != plain or not layer.kv_heads or layer.key_dim != layer.value_dim:
            raise PolicyUnsupported(
                f"layer {index} of {name!r} has a window, chunks, latents, states or no keys, and kvshelf's connector "
                "fills pages of plain layers only",
                param="model",
            )


@dataclass(frozen=True, eq=False)
class ReadingModel:
    """A model without its weights. coders: for caches under codec klt, by the digest of their transforms."""

    identity: ModelIdentity
    layers: tuple[LayerShape, ...]
    rope: Rope | None
    coders: dict[str, Coder]

    @classmethod
    def of(cls, folder: str, dtype: str) -> Self:
        """Loads the model once more and lets go of its weights, because their digest is over tensors as transformers
        names and converts them. In the checkpoint's dtype they are mapped pages of its files, no memory of their own.
        Raises `PolicyUnsupported` for models that vLLM gives other pages."""
        engine = Engine.load(folder, device="cpu", dtype=dtype)
        require_pages(engine.passes.layer_shapes, folder)
        coders = {engine.coders.own.transforms.digest: engine.coders.own} if engine.coders.has_own else {}
        return cls(engine.identity, engine.passes.layer_shapes, engine.rope, coders)

    def require_own(self, cache: ArrivingCache, kept: KeptTransforms | Mapping[str, bytes]) -> None:
        """Raises `ModelMismatch` for a cache of another model, weights, dtype or tokenizer, or under transforms that
        are neither the model's nor `kept`, `BlobError` for one that this model cannot have made, and
        `PolicyUnsupported` for one of residuals."""
        self.identity.require_match(cache.identity.model)
        cache.shape.require_bounds(self.identity)
        cache.shape.require_layers(self.layers)
        if cache.identity.images:
            raise PolicyUnsupported(
                "the cache is of a document with images, which vLLM was not tried with; ask kvshelf itself",
                param="cache_id",
            )
        if cache.projected:
            raise PolicyUnsupported(
                "the cache has residuals, of which the whole model makes keys and values, and vLLM's connector has no "
                "model of its own; compress the document by policy full",
                param="cache_id",
            )
        transforms_digest = cache.identity.transforms
        if transforms_digest and transforms_digest not in self.coders:
            data = kept.get(transforms_digest)
            if data is None or self.rope is None:
                raise ModelMismatch(
                    f"the cache is under codec klt with the transforms {transforms_digest[:16]}, which come neither "
                    f"from the shelf nor with {self.identity.name!r} here",
                    transforms=transforms_digest,
                )
            transforms = Transforms.from_bytes(data)
            transforms.require_of(self.identity, self.layers)
            self.coders[transforms_digest] = Coder(transforms, self.rope.rotate, self.rope.unrotate)

    def layer(self, cache: ArrivingCache, index: int, entries: int, heads: slice) -> tuple[Tensor, Tensor]:
        """Keys and values `[entries, heads, D]` of a layer, keys rotated to the places 0 to `entries` - 1. Waits for
        the layer. Raises what reading it raises, and `PolicyUnsupported` unless every head has so many."""
        places = Places(self.rope, stored_at_slots=cache.repositioned, wanted_at_slots=True)
        keys, values = places.layer(plain_parts(self._entries(cache, index), index), heads)
        if keys.shape[1] != entries:
            raise PolicyUnsupported(
                f"layer {index} keeps {keys.shape[1]} entries and the mean layer {entries}, and vLLM has as many in "
                "every layer; compress the document with a policy that shares no budget among layers",
                param="cache_id",
            )
        return keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous()

    def ragged_layer(self, cache: ArrivingCache, index: int, question: int, heads: slice) -> tuple[Tensor, Tensor]:
        """Keys and values `[entries of all these heads, 1, D]` of a layer, one head behind the other, keys as far
        before the position `question` as they are before a question to the cache. Otherwise as `layer`."""
        stored = cache.repositioned
        shift = question - cache.next_position
        places = Places(self.rope, stored_at_slots=stored, wanted_at_slots=stored, shift=shift)
        parts = plain_parts(self._entries(cache, index), index, uniform=False)
        keys, values = (torch.cat(part)[:, None] for part in zip(*places.heads(parts, heads), strict=True))
        return keys, values

    def _entries(self, cache: ArrivingCache, index: int) -> Entries:
        record: LayerRecord = cache.layers[index].result()
        if cache.coded:
            record = plain_layer(record, self.coders.get(cache.identity.transforms), index, cache.repositioned)
        kept = entries_of(record)
        assert kept is not None, "every layer of a model that `of` takes has entries"
        return kept
