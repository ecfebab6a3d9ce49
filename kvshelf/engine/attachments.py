"""Caches as the layers of one model read them: attached, joined for one question, or exported to transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakValueDictionary

from transformers.cache_utils import Cache

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.identity import LinkedIdentity
from kvshelf.artifact.opened.arriving import ArrivingCache
from kvshelf.artifact.opened.partial import PartialCache
from kvshelf.artifact.shape import layers_made_by
from kvshelf.engine.attention.attached import AttachedCache
from kvshelf.engine.attention.attachment import Attached, Attachment, JointAttachment, PartialAttachment
from kvshelf.engine.attention.function import kvshelf_attention
from kvshelf.engine.coders import Coders
from kvshelf.engine.exclusions import Combination, require_possible
from kvshelf.engine.export import Positions, export
from kvshelf.engine.forward.passes import Passes
from kvshelf.errors import InvalidRequest
from kvshelf.model.caches import cache_class, own_class
from kvshelf.model.rope import reach

if TYPE_CHECKING:
    from transformers import DynamicCache


class Attachments:
    """The attached caches of one model. Each is attached once, as long as somebody refers to it. Thread-safe, but for
    `passing`."""

    def __init__(self, passes: Passes, coders: Coders) -> None:
        self._passes = passes
        self._facts = passes.facts
        self._coders = coders
        self.readable = LinkedIdentity(**asdict(passes.facts.identity))
        """The identities of the model and of linked models, whose caches are read."""
        self._of_caches: WeakKeyDictionary[CompressedCache | ArrivingCache, Attachment] = WeakKeyDictionary()
        self._joined: WeakValueDictionary[tuple[int, ...], JointAttachment] = WeakValueDictionary()

    def require_own(self, cache: CompressedCache | ArrivingCache | PartialCache) -> None:
        """Raises `ModelMismatch` for a cache of another model, `BlobError` for one that this model cannot have made."""
        _require_cache(cache)
        self.readable.require_own(cache.identity.model)
        self.require_readable(cache)

    def require_readable(self, cache: CompressedCache | ArrivingCache | PartialCache) -> None:
        """As `require_own`, but a cache of a linked model is no other's."""
        _require_cache(cache)
        self.readable.require_match(cache.identity.model)
        cache.shape.require_bounds(self._facts.identity)
        cache.shape.require_layers(
            layers_made_by(cache.identity.model, self._facts.identity, self._passes.layer_shapes)
        )

    def of(self, cache: CompressedCache | ArrivingCache) -> Attachment:
        """`cache` as the model's layers read it. Any number of questions may share it, also concurrently. A coded
        `CompressedCache` stays in memory beside its plain rows as long as its caller refers to it; an `ArrivingCache`
        does not. Raises as `require_readable` and `Coders.decoder_of`."""
        _require_cache(cache)
        attachment = self._of_caches.get(cache)
        if attachment is None or attachment.failed:
            self.require_readable(cache)
            coder, ranks = self._coders.decoder_of(cache), self._facts.ranks
            if cache.made_at_steps:
                coder = self._passes.projection.at_steps
            heads = None if ranks is None else ranks.heads_of(ranks.rank, self._facts.kv_heads)
            attachment = Attachment(cache, self._passes.devices.layers, self._facts.rotate, coder, heads=heads)
            self._of_caches[cache] = attachment
        return attachment

    def of_part(self, cache: PartialCache) -> PartialAttachment | None:
        """As `of`, for a cache of which questions read the rows that they select. None unless it has an index and its
        rows are read in place: on a CPU, by one process, under a codec that is not decoded first. Raises as
        `require_readable`."""
        devices = self._passes.devices.layers
        in_place = self._facts.ranks is None and all(device.type == "cpu" for device in devices)
        if not in_place or not cache.indexed or cache.coded:
            return None
        self.require_readable(cache)
        return PartialAttachment(cache, devices[0], self._facts.rotate)

    def joined(self, documents: Sequence[Attachment]) -> Attached:
        """Several documents for one question, whose tokens see all of each.

        Each document stays at its own positions and sees no other; the question stands behind the longest. One document
        is itself; the same documents in the same order are one object, so that a batch reads them once for all their
        questions. Raises `InvalidRequest` for none, for one twice and for documents that a question continues in
        different ways; `PolicyUnsupported` for a model with recurrent states, windows or chunks, with positions that
        change with the length, or in several processes.
        """
        if len(documents) == 1:
            return documents[0]
        key = tuple(document.number for document in documents)
        if len(set(key)) < max(1, len(key)):
            reason = "a document is given twice" if key else "no document is given"
            raise InvalidRequest(f"{reason}; give each document of the question once", param="cache_ids")
        require_possible(Combination(facts=self._facts, verb="join"))
        boundaries = sorted({document.identity.boundary for document in documents})
        if len(boundaries) > 1:
            raise InvalidRequest(
                f"the documents end as {' and '.join(boundaries)}, which one question cannot continue; ask documents "
                "of one layout together",
                param="cache_ids",
            )
        if any(document.identity.variables != documents[0].identity.variables for document in documents):
            raise InvalidRequest(
                "the documents were put with different chat_template_kwargs, and a question has one; ask documents "
                "with the same together",
                param="cache_ids",
            )
        return self._joined.setdefault(key, JointAttachment(documents))

    def attached(self, cache: CompressedCache) -> AbstractContextManager[AttachedCache]:
        """See `Engine.attached`. Raises `PolicyUnsupported` where several processes share the model."""
        require_possible(Combination(facts=self._facts, verb="attach"))
        return self.passing(self.of(cache))

    @contextmanager
    def passing(self, document: Attached) -> Iterator[AttachedCache]:
        """A transformers `Cache` with a document as its read-only prefix, inside a block in which the model runs
        kvshelf's attention.

        `model(ids, past_key_values=past)` takes the question's ids (from transformers 5.24 on: `cache=past`).
        `model.generate` takes the whole sequence: `past.with_document(ids)` puts stand-ins in the document's place.
        """
        past = self._passes.attached(document, reach(self._facts.model.config, document.num_tokens))
        with kvshelf_attention(self._facts.model), past.begun_by(self._facts.model.base_model):
            yield past

    def exported(self, cache: CompressedCache, positions: Positions) -> DynamicCache:
        """`cache` as a plain transformers `DynamicCache`, batch 1, for code that runs without kvshelf's attention.

        positions: "contiguous" rotates every key once, in fp32, from its place in the document to its slot 0..K-1; the
        result is an ordinary prefix of K tokens for positions, masks and `generate()`. "absolute" leaves keys as they
        are stored, for code that sets position ids itself, the first of them `cache.next_position`. Quantized caches
        are dequantized.

        Raises `ModelMismatch`, and `PolicyUnsupported` for a cache that is no such prefix: heads or layers of different
        lengths, merged tokens, and, where keys have to move, a RoPE that cannot be undone.
        """
        self.require_readable(cache)
        plain, model = self._coders.decoded(cache).to(self._passes.devices.layers), self._facts.model
        require_possible(Combination(facts=self._facts, verb="export", cache=plain))
        past = export(plain, positions, rope=self._facts.rope, config=model.config)
        return past if own_class(model) is None else cache_class(Cache, model)(layers=past.layers)


def _require_cache(cache: object) -> None:
    if not isinstance(cache, CompressedCache | ArrivingCache | PartialCache):
        raise InvalidRequest(
            f"{type(cache).__name__} is no cache; CompressedCache.from_bytes reads a blob, and a store gets a cache by "
            "its id",
            param="cache",
        )
