"""What a creation asks of the engine: its document, and the levels to keep it at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, cast

from kvshelf.api import AppendCache, Certificate, CreateCache, Estimate
from kvshelf.api.inspect import KeptOf
from kvshelf.api.options import with_images
from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.identity import Layout, canonical_json
from kvshelf.engine.engine import Engine
from kvshelf.engine.exclusions import Combination, require_possible
from kvshelf.engine.inputs.encode import SPLIT_IT, Document
from kvshelf.engine.inputs.images import fewest_tokens, files_of
from kvshelf.engine.inputs.job import Level
from kvshelf.engine.prefill.prefill import Compression
from kvshelf.engine.progress import Checkpoint, Progress
from kvshelf.engine.quality import How, cue_count
from kvshelf.errors import DocumentTooLong, InvalidRequest
from kvshelf.methods.policies import build
from kvshelf.methods.policies.view import DocumentView
from kvshelf.model.text import EncodedDocument
from kvshelf.store.base import Store
from kvshelf.store.types import Source, TokenIds
from kvshelf.workers.replica.create.auto import MIN_QUALITY, PolicyChoice, SizeTarget, auto, under
from kvshelf.workers.replica.create.recreation import Recreation

_MOST_OF_DOCUMENT: Final = 100

AUTO: Final = "auto"
"""The policy of a creation that leaves policy, ratio and codec to the service."""


@dataclass(frozen=True)
class Levels:
    """Levels of one document, all of them to be made by the thread that owns the model.

    quality: how that of each is measured. `progress` is told, see `Engine.run_levels`.
    """

    levels: tuple[Level, ...]
    quality: How = "fast"
    progress: Progress = field(default=lambda *_: None, compare=False, repr=False)

    @property
    def num_tokens(self) -> int:
        return self.levels[0].job.num_tokens

    @property
    def cues(self) -> int:
        """Cues of the probe that measures their quality; one shows that a cache that loses nothing can answer."""
        cues = cue_count(self.quality, self.num_tokens)
        return min(cues, 1) if all(level.loses_nothing for level in self.levels) else cues

    def run(self, engine: Engine, *, checkpoint: Checkpoint | None = None) -> list[Compression]:
        """A compression for each, in their order."""
        return engine.run_levels(self.levels, cues=self.cues, checkpoint=checkpoint, progress=self.progress)


def requested_levels(
    engine: Engine,
    spec: CreateCache,
    quality: How,
    max_document_tokens: int | None,
    date: str = "",
    certificate: Certificate | None = None,
) -> Levels | PolicyChoice:
    """The levels to keep the document at: all of them, or those to choose one from. The model does not run.

    date: as of `Engine.encode_document`. quality: how that of each level is measured, unless the creation says, or a
    `PolicyChoice` does it. certificate: that the creation names. Raises as `Engine.prepare` does, and as `under`.
    """
    require_policy(spec)
    document = encode(engine, spec, max_document_tokens, date)
    if certificate is not None:
        return under(engine, document, certificate, spec.labels)
    if spec.policy == AUTO:
        return auto(engine, document, target=_target(spec, len(document.token_ids)))
    ways = spec.ways
    jobs = {
        ratio: engine.prepare(
            document,
            policy=spec.policy,
            compression_ratio=ratio,
            budget_tokens=spec.budget_tokens,
            policy_params=spec.policy_params,
            expected_questions=spec.expected_questions,
        )
        for ratio, _ in ways
    }
    levels = tuple(engine.compressor.level(jobs[ratio], codec) for ratio, codec in ways)
    if spec.chooses:
        return PolicyChoice(levels, _target(spec, len(document.token_ids)))
    return Levels(levels, quality if spec.quality is None else spec.quality)


def _target(spec: CreateCache, num_tokens: int) -> SizeTarget:
    """The target of a choice: of the policy "auto" by default a floor."""
    size = spec.max_bytes if spec.bytes_per_token is None else max(1, int(spec.bytes_per_token * num_tokens))
    floor = spec.min_quality
    return SizeTarget(MIN_QUALITY if floor is None and size is None else floor, size)


def require_policy(spec: CreateCache) -> None:
    """Raises `InvalidRequest` for an unknown policy or parameter, and for a size or questions that a policy does not
    take."""
    if spec.policy == AUTO:
        return
    policy = build(spec.policy, spec.policy_params)
    sizes = {name for name in ("compression_ratio", "budget_tokens", "levels") if getattr(spec, name) not in (None, [])}
    require_possible(Combination(policy=policy, sizes=sizes, questions=spec.expected_questions))


def first_date(engine: Engine, store: Store, spec: CreateCache, tenant: str) -> str:
    """The date of a document whose chat template writes one: of the creation, or of the first of its caches on the
    shelf, so that the same document has the same caches on another day; "" where there is none, and where nothing is
    written. Raises as `Engine.prepare`."""
    if spec.date is not None or isinstance(spec, Recreation):
        return spec.date or ""
    if spec.token_ids is not None or engine.text is None or not engine.text.writes_date or spec.layout == "plain":
        return ""
    identity = engine.prepare(
        document_of(spec), layout=spec.layout, policy="full", chat_template_kwargs=spec.chat_template_kwargs
    ).identity
    document_id = store.document_id(identity, tenant=tenant)
    manifests = store.list(tenant=tenant, document_id=document_id, limit=_MOST_OF_DOCUMENT).data
    by_age = sorted(manifests, key=lambda manifest: manifest.created_at)
    return next(filter(None, (manifest.identity.get("date", "") for manifest in by_age)), "")


def encode(
    engine: Engine, spec: CreateCache | Estimate, max_document_tokens: int | None, date: str = ""
) -> EncodedDocument:
    """The document's token ids. Raises as `Engine.encode_document`, and `DocumentTooLong` above `max_document_tokens`,
    the service's own limit, below the model's."""
    document: Document | EncodedDocument = document_of(spec)
    variables = spec.chat_template_kwargs
    if isinstance(spec, Recreation):
        if spec.token_ids is not None:
            ids, layout, kwargs = list(spec.token_ids), cast(Layout, spec.layout), dict(variables or {})
            document = EncodedDocument(ids, spec.protected_prefix, layout, spec.boundary, variables=kwargs)
            if spec.date:
                document = engine.encoder.require_text("token_ids").dated(document, spec.date)
    elif spec.date is not None:
        dated = engine.text is not None and engine.text.writes_date
        if not dated or spec.layout == "plain" or spec.token_ids is not None:
            raise InvalidRequest("nothing writes a date before this document; leave date out", param="date")
        date = spec.date
    reader = engine.facts.images
    if isinstance(spec, CreateCache) and spec.images and reader is not None:  # before any pixel is read
        _require_taken(fewest_tokens(reader, files_of(spec.images)), max_document_tokens, "at least ")
    encoded = engine.encode_document(
        document, layout=spec.layout, date=date, chat_template_kwargs=variables, protect=spec.protect
    )
    _require_taken(len(encoded.token_ids), max_document_tokens)
    return encoded


def _require_taken(num_tokens: int, max_document_tokens: int | None, bound: str = "") -> None:
    if max_document_tokens is not None and num_tokens > max_document_tokens:
        raise DocumentTooLong(
            f"the document has {bound}{num_tokens} tokens, and this service takes {max_document_tokens} "
            f"(max_document_tokens); {SPLIT_IT}",
            param="document",
        )


def appended_level(engine: Engine, parent: CompressedCache, spec: AppendCache) -> Level:
    """What is to be appended to a cache. The model does not run. Raises as `Engine.prepare_append` does."""
    job = engine.prepare_append(
        parent,
        document_of(spec),
        policy=spec.policy,
        compression_ratio=spec.compression_ratio,
        budget_tokens=spec.budget_tokens,
        policy_params=spec.policy_params,
        expected_questions=spec.expected_questions,
        protect=spec.protect,
    )
    return engine.compressor.level(job)


def document_of(spec: CreateCache | AppendCache | KeptOf) -> Document:
    """The one document of a request: text, messages or token ids."""
    if spec.messages is not None:
        return [message.model_dump() for message in spec.messages]
    if isinstance(spec, CreateCache) and spec.images and spec.document is not None:
        return with_images(spec.document, spec.images)  # type: ignore[no-any-return]
    document = spec.document if spec.document is not None else spec.token_ids
    assert document is not None  # the types ask for exactly one of the three
    return document


def source_of(spec: CreateCache | AppendCache, document: DocumentView) -> Source | None:
    """The source to keep: the text, the messages as JSON, or the token ids that were read. None without
    `keep_source`."""
    if isinstance(spec, AppendCache) or not spec.keep_source:
        return None
    if spec.keep_source == "tokens":
        return TokenIds(tuple(document.token_ids), document.protected_prefix)
    return spec.document if spec.document is not None else canonical_json(document_of(spec))
