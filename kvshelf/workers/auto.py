"""The fewest bytes that still answer: the smallest of several levels, and the candidates of the policy "auto"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvshelf.errors import InvalidRequest, KvshelfError, PolicyUnsupported, QualityBelowFloor
from kvshelf.store.identity import Layout
from kvshelf.workers.generation import Checkpoint
from kvshelf.workers.intake import Document
from kvshelf.workers.levels import Level, shared
from kvshelf.workers.quality import QUESTIONS, Quality, Reference

if TYPE_CHECKING:  # the engine knows nothing of what is built on it
    from kvshelf.workers.engine import Compression, Engine

MIN_QUALITY: Final = 0.98

CANDIDATES: Final[tuple[tuple[str, float | None, str], ...]] = (
    ("full", None, "none"),
    ("full", None, "int8"),
    ("full", None, "int4"),
    ("keydiff", 0.5, "int4"),
    ("keydiff", 0.75, "int4"),
    ("keydiff", 0.875, "int4"),
    ("keydiff", 0.9375, "int4"),
    ("kvzip", 0.5, "int4"),
    ("kvzip", 0.75, "int4"),
    ("kvzip", 0.875, "int4"),
)
"""Policy, fraction removed and codec: what docs/policies.md found best at its size.

Where every sentence is a fact nothing can go, and `full` under a codec is what is left. Among filler `keydiff` keeps
what stands out. Both look at nothing behind the document and share one prefill. `kvzip` holds longest of all, for a
prefill of its own that costs several plain ones; it runs only where it could still save bytes.
"""


@dataclass(frozen=True)
class Tried:
    """What came of one level: its bytes and quality, or the reason why there are none."""

    policy: str
    compression_ratio: float
    codec: str
    nbytes: int | None = None
    quality: Quality | None = None
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON types: what a request is told."""
        quality = None if self.quality is None else self.quality.to_dict()
        ways = {"policy": self.policy, "compression_ratio": self.compression_ratio, "codec": self.codec}
        return ways | {"bytes": self.nbytes, "quality": quality, "reason": self.reason}


@dataclass(frozen=True)
class Choice:
    """The level that was kept, and everything that was tried, in the order of the selection."""

    level: Level
    compression: Compression
    tried: tuple[Tried, ...]


@dataclass(frozen=True)
class Selection:
    """Levels of one document, of which the one with the fewest bytes is wanted whose agreement is `min_quality` at
    least. `refused` are ways that were dropped before any work.

    Made without the model, so that any thread may; `run` is work for the one that owns it.
    """

    levels: tuple[Level, ...]
    min_quality: float
    refused: tuple[Tried, ...] = ()
    questions: int = QUESTIONS

    def __post_init__(self) -> None:
        if isinstance(self.min_quality, bool) or not 0 <= self.min_quality <= 1:
            raise InvalidRequest(
                f"min_quality is {self.min_quality!r}; it is the least agreement with the full cache, from 0 to 1",
                param="min_quality",
            )

    def run(self, engine: Engine, *, checkpoint: Checkpoint | None = None) -> Choice:
        """Compress and measure, the smallest first, until one is good enough; a prefill that could not give a smaller
        one is left out.

        Raises `QualityBelowFloor` where none is good enough, whose details have `tried`; and `PolicyUnsupported` where
        nothing can be measured (`Engine.probe` says when) and no level keeps everything as it is.
        """
        search = _Search(engine, self.min_quality, checkpoint or (lambda: None))
        for group in shared(self.levels):
            search.try_group(group, self.questions)
        tried = (*(search.tried[id(level)] for level in self.levels), *self.refused)
        if search.best is None:
            raise _not_good_enough(tried, self.min_quality, search.measured)
        return Choice(*search.best, tried)


def auto(
    engine: Engine, document: Document, *, layout: Layout | None = None, min_quality: float = MIN_QUALITY
) -> Selection:
    """The selection behind `policy: "auto"`: every candidate that takes this document. Thread-safe.

    One always meets the floor, the full cache. Raises what `Engine.prepare` raises of the document itself.
    """
    encoded = engine.encode_document(document, layout=layout)
    levels, refused = [], []
    for policy, ratio, codec in CANDIDATES:
        try:
            levels.append(Level(engine.prepare(encoded, policy=policy, compression_ratio=ratio), codec))
        except KvshelfError as error:  # what a policy refuses, others may take
            if policy == "full":
                raise
            refused.append(Tried(policy, ratio or 0.0, codec, reason=error.message))
    return Selection(tuple(levels), min_quality, tuple(refused))


class _Search:
    """The best level so far, and what came of each."""

    def __init__(self, engine: Engine, min_quality: float, checkpoint: Checkpoint) -> None:
        self._engine = engine
        self._min_quality = min_quality
        self._checkpoint = checkpoint
        self.best: tuple[Level, Compression] | None = None
        self.tried: dict[int, Tried] = {}
        self.measured = False

    def try_group(self, group: Sequence[Level], questions: int) -> None:
        """Levels of one prefill."""
        if self.best is not None and not any(_could_be_smaller(level, self.best[0]) for level in group):
            for level in group:
                self._note(level, reason="not made: it would take no fewer bytes than what meets the floor")
            return
        prefill = self._engine.prefill(group, questions=questions, checkpoint=self._checkpoint)
        made = zip(group, prefill.compressions, strict=True)
        for level, compression in sorted(made, key=lambda pair: pair[1].cache.nbytes):
            self._try(level, compression, prefill.reference)
            self._checkpoint()

    def _try(self, level: Level, compression: Compression, reference: Reference | None) -> None:
        nbytes = compression.cache.nbytes
        if self.best is not None and nbytes >= self.best[1].cache.nbytes:
            self._note(level, nbytes, reason="not measured: it takes no fewer bytes than what meets the floor")
        elif reference is None:
            self._note(level, nbytes, reason="no quality can be measured on this document in this way")
            if level.codec == "none" and level.job.budget.tokens == level.job.num_tokens:
                self.best = level, compression  # the full cache itself
        else:
            self.measured = True
            measured = compression.measured(self._engine.measure(compression.cache, reference))
            assert measured.quality is not None
            self._note(level, nbytes, measured.quality)
            if measured.quality.agreement >= self._min_quality:
                self.best = level, measured

    def _note(
        self, level: Level, nbytes: int | None = None, quality: Quality | None = None, reason: str | None = None
    ) -> None:
        identity = level.job.identity
        self.tried[id(level)] = Tried(
            identity.policy, identity.compression_ratio, level.codec, nbytes, quality, reason
        )  # fmt: skip


def _could_be_smaller(level: Level, best: Level) -> bool:
    """Whether to make it at all. Under one codec what keeps more entries takes more bytes, but for the few that the
    codec leaves whole; of different codecs nothing is said."""
    return level.codec != best.codec or level.job.budget.tokens < best.job.budget.tokens


def _not_good_enough(tried: Sequence[Tried], min_quality: float, measured: bool) -> KvshelfError:
    if not measured:
        return PolicyUnsupported(
            "no quality can be measured of these levels: the document is too short to make questions from, is read "
            "chunk by chunk, or leaves no room behind it; leave min_quality out",
            param="min_quality",
            tried=[one.to_dict() for one in tried],
        )
    closest = max((one for one in tried if one.quality is not None), key=lambda one: one.quality.agreement)  # type: ignore[union-attr]
    assert closest.quality is not None
    return QualityBelowFloor(
        f"no level agrees with the full cache to {min_quality:g}: the closest is policy {closest.policy!r} at "
        f"{closest.compression_ratio:g} removed under codec {closest.codec!r}, with {closest.quality.agreement:g}; "
        "lower min_quality, or remove less",
        param="min_quality",
        tried=[one.to_dict() for one in tried],
    )
