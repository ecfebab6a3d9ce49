"""The measurement of one unit, and its outcome."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import torch

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.codecs import Codec
from kvshelf.artifact.identity import canonical_json, digest
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.engine import Engine
from kvshelf.engine.prefill.prefill import Compression
from kvshelf.errors import KvshelfError
from kvshelf.samples.suite import CaseAsk, make_case, score
from kvshelf_bench.quality.grid import MadeUnit, Reading, Row
from kvshelf_bench.quality.retrieval import EVALUATION_SEED, counter

REVISION = 1
"""Raised whenever the documents, the questions or the scores of a unit change."""

_SPARE_TOKENS = 24
"""Tokens of an answer beyond the characters of its references; chat models say a few words first."""


@dataclass(frozen=True)
class Outcome:
    """One document under one row. `key` is a digest of everything the result depends on.

    exact and partial: one entry per question. stored_bytes: length of the blob. read_share: entries that a token of an
    answer read, of those stored; the mean over questions. probe_tokens: tokens that the policy
    runs behind the document, within the prefill. refused: why there is no result; all other fields are then empty or 0.
    answers: texts, first_tokens: the first token of each (-1 where there is none), and quality: the cache's figure (an
    `api.Quality`), of documents from a dataset alone.
    """

    key: str
    refused: str | None = None
    exact: tuple[int, ...] = ()
    partial: tuple[float, ...] = ()
    document_tokens: int = 0
    stored_bytes: int = 0
    read_share: float = 1.0
    probe_tokens: int = 0
    prefill_s: float = 0.0
    compress_s: float = 0.0
    encode_s: float = 0.0
    answer_s: float = 0.0
    answers: tuple[str, ...] = ()
    first_tokens: tuple[int, ...] = ()
    quality: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Protocol:
    """The settings that all units of a run share."""

    model: str  # fingerprint of the model's identity
    device: str  # "cpu" or "cuda"
    questions: int
    seed: int
    transforms: str | None = None  # digest of those of codec klt

    @classmethod
    def of(cls, engine: Engine, questions: int, seed: int) -> Protocol:
        device = engine.model.device.type
        return cls(engine.identity.fingerprint(), device, questions, seed, transforms_of(engine))

    def key(self, unit: MadeUnit, row: Row) -> str:
        """A digest of all that the result depends on: model, document and the settings of the row."""
        settings = {"cell": asdict(unit.cell), "document": unit.document, **shared_settings(self, row)}
        return digest("kvshelf_bench.quality.quality", canonical_json({"revision": REVISION, **settings}))

    def measure(self, engine: Engine, unit: MadeUnit) -> list[Outcome]:
        """Compress the document once, without its questions, and ask them of the cache of every row."""
        cell, count = unit.cell, counter(engine)
        seed = EVALUATION_SEED + self.seed + unit.document
        case = make_case(cell.task, cell.haystack, cell.tokens, seed, count, questions=self.questions)
        try:
            job = engine.prepare(case.text, **unit.rows[0].sizes)
            compression = engine.run(job)
        except KvshelfError as error:
            return [Outcome(self.key(unit, row), refused=error.message) for row in unit.rows]
        probe_tokens = sum(len(probe.token_ids) for probe in job.passes)
        rows = [_measured_row(engine, compression, row, case.asks, self.key(unit, row)) for row in unit.rows]
        return [replace(measured, probe_tokens=probe_tokens) for measured in rows]


def transforms_of(engine: Engine) -> str | None:
    """The digest of the transforms that a run writes codec klt with; None where the model has none."""
    return engine.coders.own.transforms.digest if engine.coders.writes_klt else None


def shared_settings(protocol: Any, row: Row) -> dict[str, Any]:
    """What a key has of a run's protocol and of a row. Of transforms only where the row's codec takes them: a new
    calibration makes those results anew, and no others."""
    settings = asdict(protocol)
    transforms = settings.pop("transforms")
    of_codec = {"transforms": transforms} if Codec.parse(row.codec).name == "klt" and transforms else {}
    return {"protocol": settings, **of_codec, **row.settings}


def _measured_row(engine: Engine, compression: Compression, row: Row, asks: Sequence[CaseAsk], key: str) -> Outcome:
    try:
        started = time.perf_counter()
        cache = engine.encoded(compression.cache, row.codec)
        encode_s = time.perf_counter() - started
        answers = [_answer(engine, cache, ask, row) for ask in asks]
    except KvshelfError as error:
        return Outcome(key, refused=error.message)
    answer_s = time.perf_counter() - started - encode_s
    scores = [score(ask, answer) for ask, (answer, _) in zip(asks, answers, strict=True)]
    return Outcome(
        key=key,
        exact=tuple(int(one.exact) for one in scores),
        partial=tuple(round(one.partial, 6) for one in scores),
        document_tokens=cache.num_tokens,
        stored_bytes=len(cache.to_bytes()),
        read_share=fmean(share for _, share in answers),
        prefill_s=compression.prefill_s,
        compress_s=compression.compress_s,
        encode_s=encode_s,
        answer_s=answer_s,
    )


def _answer(engine: Engine, cache: CompressedCache, ask: CaseAsk, row: Row) -> tuple[str, float]:
    """The answer, and the share of the entries that its tokens read. Where the row is exported, plain transformers
    answer behind an ordinary prefix: the model's own attention, positions 0, 1 ..."""
    longest = _SPARE_TOKENS + sum(map(len, ask.references))
    if not row.exported:
        answer = engine.answer(cache, ask.text, max_new_tokens=longest, **selecting(cache, row.select))
        return answer.text, answer.usage.read_tokens / engine.attach(cache).read_tokens
    past = engine.export(cache, positions="contiguous")
    prefix = past.get_seq_length()
    # generate() takes the whole sequence and skips the ids that the cache covers, whatever they are.
    ids = torch.tensor([[0] * prefix + engine.encode_query(cache, ask.text)], device=engine.model.device)
    with torch.no_grad():
        mask = torch.ones_like(ids)
        output = engine.model.generate(
            ids, attention_mask=mask, max_new_tokens=longest, do_sample=False, **{CACHE_ARGUMENT: past}
        )
    text: str = engine.encoder.require_text("prompt").decoder().decode(output[0, ids.shape[1] :].tolist())
    return text, 1.0


def selecting(cache: CompressedCache, select: Reading | None) -> dict[str, Any]:
    """The arguments of `Engine.answer` for a reading."""
    if select is None:
        return {}
    tokens = max(1, round(select.share * cache.num_tokens))
    return {"select": select.method, "select_tokens": tokens, "select_params": dict(select.params)}
