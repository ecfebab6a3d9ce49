"""Creations of several caches joined by labels: the parts of a document that is too long for the model, and the
episodes of a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from kvshelf.api import CreateCache
from kvshelf.api.answers import in_sequence
from kvshelf.api.creation import EPISODE_LABELS, PART_LABELS
from kvshelf.artifact.identity import canonical_msgpack
from kvshelf.engine.engine import Engine
from kvshelf.engine.progress import Checkpoint, nothing
from kvshelf.errors import KvshelfError
from kvshelf.store.base import Store
from kvshelf.store.jobs.requests import REQUEST_ID
from kvshelf.workers.replica.api import Created
from kvshelf.workers.replica.create.spec import document_of, encode

_ID_CHARACTERS: Final = 16
_OF_ALL_PARTS: Final = {
    *("name", "labels", "ttl_s", "expires_at", "ttl_renew", "guaranteed_until", "keep_source", "source_ttl_s")
}
"""Fields that do not change which caches a split makes."""


def parts_of(
    engine: Engine,
    store: Store,
    spec: CreateCache,
    max_document_tokens: int | None,
    *,
    tenant: str,
    checkpoint: Checkpoint | None = None,
) -> Iterator[CreateCache]:
    """The creation of each part or episode of a document, with the labels that join them, one at a time: the work is
    done before the first, and of texts one part is copied. The model does not run. checkpoint: as of `Encoder.split`.

    Raises as `Encoder.split` and `Compressor.episodes`.
    """
    if spec.episodes is not None:
        return iter(_episodes_of(engine, store, spec, max_document_tokens, tenant))
    options = spec.split_options
    assert options is not None
    assert spec.document is not None
    size = options.max_tokens or min(engine.encoder.part_tokens, max_document_tokens or engine.encoder.part_tokens)
    texts = engine.encoder.split(
        spec.document,
        spec.layout,
        size=size,
        overlap=options.overlap_tokens,
        checkpoint=checkpoint or nothing,
        variables=spec.chat_template_kwargs,
    )
    split_id = _split_id(engine, store, spec, tenant)
    labels = {"document": spec.name or split_id} | spec.labels
    return (
        spec.model_copy(
            update={
                "document": text,
                "split": False,
                "labels": labels | _labels(PART_LABELS, number, len(texts), split_id),
            }
        )
        for number, text in enumerate(texts, 1)
    )


def _episodes_of(
    engine: Engine, store: Store, spec: CreateCache, max_document_tokens: int | None, tenant: str
) -> list[CreateCache]:
    assert spec.episodes is not None
    encode(engine, spec, max_document_tokens)  # refuses what is too long before it is cut up
    episodes = engine.compressor.episodes(document_of(spec), spec.episodes.count)
    set_id = _split_id(engine, store, spec, tenant)
    return [
        spec.model_copy(
            update={
                "episodes": None,
                "policy_params": {"prefill": "chunked"}
                | spec.policy_params
                | {"probe": episode.text, "centroid": episode.centroid},
                "labels": spec.labels | _labels(EPISODE_LABELS, number, len(episodes), set_id),
            }
        )
        for number, episode in enumerate(episodes, 1)
    ]


def _labels(names: tuple[str, str], number: int, count: int, set_id: str) -> dict[str, str]:
    return dict(zip(names, (f"{number}/{count}", set_id), strict=True))


def _split_id(engine: Engine, store: Store, spec: CreateCache, tenant: str) -> str:
    """What the parts of this document have in common, if they are made in this way by this model: equal for equal
    requests, and hashed as the store hashes requests, so that nobody can test a guess of the text."""
    fields = spec.model_dump(mode="json", exclude=_OF_ALL_PARTS, exclude_defaults=True)
    fields["model"] = engine.identity.fingerprint()
    request_id = store.requests.request_id(canonical_msgpack(fields), tenant=tenant)
    return request_id.removeprefix(REQUEST_ID)[:_ID_CHARACTERS]


@contextmanager
def naming(kind: str, number: str) -> Iterator[None]:
    """Adds to an error inside which part or episode of the document it is about."""
    try:
        yield
    except KvshelfError as error:
        message = f"{kind} {number} of the document: {error.message}"
        raise type(error)(message, param=error.param, **error.details) from error


def joined(parts: Sequence[Created]) -> Created:
    """The parts as one creation; the seconds of each phase are added up."""
    seconds: dict[str, float] = {}
    for phase in (phase for part in parts for phase in part.phases):
        seconds[phase.name] = seconds.get(phase.name, 0.0) + phase.seconds
    caches = tuple(cache for part in parts for cache in part.caches)
    return Created(caches, in_sequence(**seconds), prefilled_tokens=sum(part.prefilled_tokens for part in parts))
