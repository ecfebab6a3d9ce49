"""Which tokens of its document a stored cache kept, by layer and head, beside the text of each token; and which a
question builds."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from pydantic import TypeAdapter, ValidationError

from kvshelf.api.inspect import BuiltPrompt, KeptLayer, KeptTokens
from kvshelf.api.strict import JsonBounds, MessageList
from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.identity import Identity
from kvshelf.artifact.records import LayerRecord, Merged, Recent, entries_of, is_latent, parts_of, states_of
from kvshelf.engine.decode.shown import built_prompt, pieces
from kvshelf.engine.engine import Engine
from kvshelf.engine.inputs.encode import Document
from kvshelf.engine.inputs.job import Job
from kvshelf.errors import InvalidRequest, SourceNotKept, StateConflict
from kvshelf.methods.policies.view import DocumentView
from kvshelf.model.text import EncodedDocument
from kvshelf.store.base import Store
from kvshelf.store.manifest import Manifest
from kvshelf.store.types import TokenIds

BITMAP_BYTES: Final = 4 << 20
"""Most bytes of bitmaps in one answer, in base64. 80 layers of 8 heads and 100,000 tokens have 10.7 MB: three pages."""

_OWN = "A kept token has its own key and value in the cache, of which a codec may have fewer bits."
_MERGED = (
    "A kept token is the center of a class: its key direction and value are the mean over the tokens merged into it. A "
    "merged token has no key and value of its own, only a place in a class and its key's length."
)
_RECENT = (
    " Layers with a sliding window or chunked attention keep the last tokens, as many as questions see of them, and no "
    "count has theirs."
)
_WITH_STATES = " Recurrent and convolution states are kept whole, and no count has them."
_LATENT = " The heads of a layer share one latent of a token, and count as one head."
_MOVED = (
    " Keys were rotated to their places in the cache: the model reads what was kept side by side, not where it stood."
)


class Marks(NamedTuple):
    """`kept` and `merged` tokens of one layer: `[kv_heads, num_tokens]` bool. A token is at most one of both."""

    kept: npt.NDArray[np.bool_]
    merged: npt.NDArray[np.bool_]


def kept_tokens(
    engine: Engine, store: Store, cache_id: str, document: Document | None, *, tenant: str, first_layer: int = 0
) -> KeptTokens:
    """Which tokens a cache kept, with the bitmaps of the layers from `first_layer` on. A cache holds positions and no
    text: its document is tokenized again.

    `document` None stands for the kept source. Raises as `Store.open_cache`, `Engine.prepare` and
    `Attachments.require_own` do; also `SourceNotKept`, `StateConflict` for a document other than the cache's, and
    `InvalidRequest` for a missing layer.
    """
    manifest = store.stat(cache_id, tenant=tenant)
    identity = Identity.from_dict(manifest.identity)
    engine.identity.require_match(identity.model)
    if identity.parent:
        raise SourceNotKept(
            f"cache {cache_id} was made by appending to another, and no text of all of it is kept; ask for the tokens "
            f"of the cache that it was appended to, {manifest.parent_id or 'which was stored elsewhere'}",
            param="cache_id",
        )
    if document is None:
        job = source_job(engine, store, manifest, identity)
    else:
        job = _job_of_own(engine, store, manifest, identity, document)
    source = job.document
    with store.open_cache(cache_id, tenant=tenant) as arriving:
        engine.attachments.require_own(arriving)  # the bitmaps below have the size that its header claims
        arriving.read(together=True)
        cache = arriving.cache()
    num_layers = len(cache.layers)
    if first_layer >= num_layers:
        raise InvalidRequest(
            f"there is no layer {first_layer}; the cache has the layers 0 to {num_layers - 1}", param="first_layer"
        )
    layers = list(_page(cache, first_layer))
    following = first_layer + len(layers)
    first_page: dict[str, Any] = {}
    if first_layer == 0:
        assert engine.text is not None, "without a tokenizer the document was refused"
        first_page["tokens"] = pieces(engine.text.decoder(), source.token_ids)
        first_page["template_tokens"] = source.protected_prefix
        first_page |= _counts(cache)
    return KeptTokens(
        id=manifest.id,
        document_id=manifest.document_id,
        policy=manifest.policy,
        num_tokens=cache.num_tokens,
        num_layers=num_layers,
        num_heads=sum(layer.kv_heads for layer in cache.reduced),
        meaning=_meaning(cache),
        layers=layers,
        next_layer=following if following < num_layers else None,
        **first_page,
    )


def marks_of(record: LayerRecord, num_tokens: int) -> Marks:
    """Which tokens have an entry in a layer, and which are only merged into another token's entry."""
    entries = entries_of(record)
    kept = np.zeros((entries.kv_heads if entries is not None else 0, num_tokens), np.bool_)
    in_class = np.zeros_like(kept)
    for part in () if entries is None else parts_of(entries):
        for head, positions in enumerate(part.positions):
            kept[head, positions.numpy()] = True
        if isinstance(part, Merged):
            for head, positions in enumerate(torch.split(part.slot_positions, part.slot_lengths)):
                in_class[head, positions.numpy()] = True
    return Marks(kept, in_class & ~kept)


def shown_prompt(
    engine: Engine, store: Store, manifest: Manifest, behind: Sequence[int], texts: Sequence[str], read: int, id: str
) -> BuiltPrompt:
    """The prompt of tokens behind a cache, as of `built_prompt`: with the document's where its source is kept. id: of
    the cache that has the first `read` of them."""
    identity = Identity.from_dict(manifest.identity)
    engine.attachments.readable.require_match(identity.model)
    document = None
    if manifest.has_source and not identity.parent:
        document = kept_source(engine, store, manifest, identity)
    return built_prompt(engine.encoder.require_text("prompt"), identity, document, behind, texts, read=read, id=id)


def kept_source(engine: Engine, store: Store, manifest: Manifest, identity: Identity) -> DocumentView:
    """The tokens of the document that was kept beside a cache. Raises `SourceNotKept`."""
    return source_job(engine, store, manifest, identity).document


def source_job(engine: Engine, store: Store, manifest: Manifest, identity: Identity) -> Job:
    """The job that makes the full cache of the document that was kept beside a cache: of a text, the messages of a
    conversation, or token ids. Raises `SourceNotKept`."""
    source = store.source(manifest.id, tenant=manifest.tenant)
    document: Document | EncodedDocument
    if isinstance(source, TokenIds):
        ids = EncodedDocument(list(source.ids), source.protected_prefix, identity.layout, identity.boundary)
        document = engine.encode_document(ids)
    else:
        document = source if identity.boundary in ("text", "document") else json.loads(source)
    return _job_of_own(engine, store, manifest, identity, document)


def _job_of_own(
    engine: Engine, store: Store, manifest: Manifest, identity: Identity, document: Document | EncodedDocument
) -> Job:
    """The job that makes the full cache of a document, which must be the cache's own."""
    of_ids = not isinstance(document, str | EncodedDocument) and not (len(document) and isinstance(document[0], dict))
    layout, variables = (None, None) if of_ids else (identity.layout, identity.variables)
    encoded = engine.encode_document(document, layout=layout, date=identity.date, chat_template_kwargs=variables)
    job = engine.prepare(encoded, policy="full")
    document_id = store.document_id(job.identity, tenant=manifest.tenant)
    if document_id != manifest.document_id:
        raise StateConflict(
            f"this is another document than that of cache {manifest.id}: {job.num_tokens} tokens with the id "
            f"{document_id}, and the cache is of {manifest.num_tokens} tokens with the id {manifest.document_id}. Send "
            "the text as it was when the cache was made",
            param="document",
            document_id=manifest.document_id,
        )
    return job


def require_source(engine: Engine, identity: Identity, source: str) -> None:
    """Raises `StateConflict` for a text that is not the document of the cache with this identity, and `InvalidRequest`
    for one that is no document. `source` is as kept: the text, or the messages of a conversation as JSON."""
    engine.attachments.readable.require_match(identity.model)
    document: Document = source
    if identity.boundary not in ("text", "document"):
        JsonBounds().take(source.encode())
        try:
            document = [message.model_dump() for message in TypeAdapter(MessageList).validate_json(source)]
        except ValidationError as error:
            raise InvalidRequest("the source is no list of messages, as the cache's is", param="source") from error
    job = engine.prepare(document, layout=identity.layout, policy="full", chat_template_kwargs=identity.variables)
    source_id = job.identity
    if (source_id.document, source_id.boundary) != (identity.document, identity.boundary):
        raise StateConflict(
            f"the source is another document than the cache's: it has {source_id.num_tokens} tokens with the digest "
            f"{source_id.document[:12]}, and the cache is of {identity.num_tokens} tokens with the digest "
            f"{identity.document[:12]}; import the blob without it",
            param="source",
        )


def _page(cache: CompressedCache, first_layer: int) -> Iterator[KeptLayer]:
    """The bitmaps of as many layers as one answer holds, at least one."""
    room = BITMAP_BYTES
    for index in range(first_layer, len(cache.layers)):
        marks = marks_of(cache.layers[index], cache.num_tokens)
        kept = _bitmaps(marks.kept)
        merged = _bitmaps(marks.merged) if _merges(cache.layers[index]) else None
        room -= sum(map(len, kept + (merged or [])))
        if room < 0 and index > first_layer:
            return
        yield KeptLayer(layer=index, kept=kept, merged=merged)


def _bitmaps(marks: npt.NDArray[np.bool_]) -> list[str]:
    """Base64 of one bit per token for each head, least significant bit first, as in blobs."""
    return [base64.b64encode(row.tobytes()).decode() for row in np.packbits(marks, axis=1, bitorder="little")]


def _counts(cache: CompressedCache) -> dict[str, Any]:
    """For each token, the number of heads that keep it, and of heads that merge it into another."""
    kept = np.zeros(cache.num_tokens, np.int64)
    merged = np.zeros(cache.num_tokens, np.int64)
    for layer in cache.reduced:
        marks = marks_of(layer, cache.num_tokens)
        kept += marks.kept.sum(axis=0)
        merged += marks.merged.sum(axis=0)
    some = any(map(_merges, cache.layers))
    return {"counts": kept.tolist(), "merged_counts": merged.tolist() if some else None}


def _merges(record: LayerRecord) -> bool:
    entries = entries_of(record)
    return any(isinstance(part, Merged) for part in (() if entries is None else parts_of(entries)))


def _meaning(cache: CompressedCache) -> str:
    meaning = _MERGED if any(map(_merges, cache.layers)) else _OWN
    if any(isinstance(entries_of(layer), Recent) for layer in cache.layers):
        meaning += _RECENT
    if any(map(states_of, cache.layers)):
        meaning += _WITH_STATES
    if any(map(is_latent, cache.reduced)):
        meaning += _LATENT
    return meaning + (_MOVED if cache.next_position != cache.num_tokens else "")
