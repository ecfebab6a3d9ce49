"""Selection: the smallest of several levels that is good enough, and the candidates of the policy "auto"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvshelf.api import Quality, Tried
from kvshelf.errors import InvalidRequest, KvshelfError, PolicyUnsupported, QualityBelowFloor
from kvshelf.store.artifact.identity import Layout
from kvshelf.workers.engine.decode.generation import Checkpoint
from kvshelf.workers.engine.inputs.encode import Document
from kvshelf.workers.engine.inputs.job import Level, shared
from kvshelf.workers.engine.quality import QUESTIONS, Reference
from kvshelf.workers.model.text import EncodedDocument

if TYPE_CHECKING:  # the engine knows nothing of what is built on it
    from kvshelf.workers.engine.engine import Compression, Engine

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
"""Policy, fraction removed and codec: the best of their sizes in docs/policies.md.

If every sentence is a fact, nothing can be evicted, and `full` under a codec remains. Among filler `keydiff` keeps what
stands out. Both need no probe pass, so they share one prefill. `kvzip` keeps its quality longest, but needs its own
prefill, which costs several plain ones; it runs only if it could still save bytes.
"""

UNMEASURABLE: Final = "no quality can be measured on this document in this way"
_NOT_MADE: Final = "not made: it would take no fewer bytes than what meets the floor"
_NOT_MEASURED: Final = "not measured: it takes no fewer bytes than what meets the floor"


@dataclass(frozen=True)
class Choice:
    """The chosen level, and all levels that were tried, in the order of the selection."""

    level: Level
    compression: Compression
    tried: tuple[Tried, ...]


@dataclass(frozen=True)
class Selection:
    """A choice among levels of one document: the fewest bytes with an agreement of at least `min_quality`.

    `refused`: levels that were dropped before any work. Built without the model, on any thread; `run` is work for the
    thread that owns it.
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

    @property
    def num_tokens(self) -> int:
        return self.levels[0].job.num_tokens

    def run(self, engine: Engine, *, checkpoint: Checkpoint | None = None) -> Choice:
        """Compress and measure, smallest first, until a level is good enough; prefills that could not give a smaller
        level are skipped.

        Raises `QualityBelowFloor` with the details `tried` if no level is good enough, and `PolicyUnsupported` if
        nothing can be measured (see `Engine.probe`) and no level keeps everything.
        """
        search = _Search(engine, self, checkpoint or (lambda: None))
        for group in shared(self.levels):
            search.try_group(group)
        tried = (*(search.tried[id(level)] for level in self.levels), *self.refused)
        if search.best is None:
            raise _not_good_enough(tried, self.min_quality)
        return Choice(*search.best, tried)

    def meets(self, level: Level, quality: Quality | None) -> bool:
        """Whether a level is good enough. The full cache always is: it agrees with itself."""
        return level.keeps_all or (quality is not None and quality.agreement >= self.min_quality)

    def known(self, told: Sequence[Tried | None]) -> Level | None:
        """What `run` would choose, or None if earlier outcomes do not determine it. The model does not run.

        told: the earlier outcome of each level, None if it is unknown. Raises as `run` does.
        """
        pairs = [(level, one or _untried(level)) for level, one in zip(self.levels, told, strict=True)]
        good = [pair for pair in pairs if pair[1].bytes is not None and self.meets(pair[0], pair[1].quality)]
        best = min(good, key=lambda pair: pair[1].bytes or 0, default=None)
        if not all(_settled(level, one, best) for level, one in pairs):
            return None
        if best is None:
            raise _not_good_enough((*(one for _, one in pairs), *self.refused), self.min_quality)
        return best[0]


def auto(
    engine: Engine,
    document: Document | EncodedDocument,
    *,
    layout: Layout | None = None,
    min_quality: float = MIN_QUALITY,
) -> Selection:
    """The selection behind `policy: "auto"`: every candidate that takes this document. Thread-safe.

    The full cache always qualifies. Raises what `Engine.prepare` raises for the document itself.
    """
    encoded = document if isinstance(document, EncodedDocument) else engine.encode_document(document, layout=layout)
    levels, refused = [], []
    for policy, ratio, codec in CANDIDATES:
        try:
            levels.append(engine.level(engine.prepare(encoded, policy=policy, compression_ratio=ratio), codec))
        except KvshelfError as error:  # what a policy refuses, others may take
            if policy == "full":
                raise
            refused.append(Tried(policy=policy, compression_ratio=ratio or 0.0, codec=codec, reason=error.message))
    return Selection(tuple(levels), min_quality, tuple(refused))


class _Search:
    """The best level so far, and the outcome of each."""

    def __init__(self, engine: Engine, selection: Selection, checkpoint: Checkpoint) -> None:
        self._engine = engine
        self._selection = selection
        self._checkpoint = checkpoint
        self.best: tuple[Level, Compression] | None = None
        self.tried: dict[int, Tried] = {}

    def try_group(self, group: Sequence[Level]) -> None:
        """Try the levels of one prefill."""
        questions = self._selection.questions
        if self._engine.probe(group[0].job, questions) is None:
            self._leave_out([level for level in group if not level.keeps_all], UNMEASURABLE)
            group = [level for level in group if level.keeps_all]
        if self.best is not None and not any(_could_be_smaller(level, self.best[0]) for level in group):
            self._leave_out(group, _NOT_MADE)
            return
        if not group:
            return
        prefill = self._engine.prefill(group, questions=questions, checkpoint=self._checkpoint)
        made = zip(group, prefill.compressions, strict=True)
        for level, compression in sorted(made, key=lambda pair: pair[1].cache.nbytes):
            self._try(level, compression, prefill.reference)
            self._checkpoint()

    def _try(self, level: Level, compression: Compression, reference: Reference | None) -> None:
        nbytes = compression.cache.nbytes
        if self.best is not None and nbytes >= self.best[1].cache.nbytes:
            self._note(level, nbytes, reason=_NOT_MEASURED)
            return
        if reference is not None:
            compression = compression.measured(self._engine.measure(compression.cache, reference))
        self._note(level, nbytes, compression.quality, None if reference is not None else UNMEASURABLE)
        if self._selection.meets(level, compression.quality):
            self.best = level, compression

    def _leave_out(self, levels: Sequence[Level], reason: str) -> None:
        for level in levels:
            self._note(level, reason=reason)

    def _note(
        self, level: Level, nbytes: int | None = None, quality: Quality | None = None, reason: str | None = None
    ) -> None:
        self.tried[id(level)] = _untried(level).model_copy(
            update={"bytes": nbytes, "quality": quality, "reason": reason}
        )


def _untried(level: Level) -> Tried:
    identity = level.job.identity
    return Tried(policy=identity.policy, compression_ratio=identity.compression_ratio, codec=level.codec)


def _could_be_smaller(level: Level, best: Level) -> bool:
    """Whether a level is worth compressing. Under one codec more entries take more bytes, except for the few that the
    codec leaves whole; different codecs do not compare."""
    return level.codec != best.codec or level.job.budget.tokens < best.job.budget.tokens


def _settled(level: Level, tried: Tried, best: tuple[Level, Tried] | None) -> bool:
    """Whether trying a level would change nothing: its quality is known or unmeasurable, or it takes no fewer bytes
    than the best."""
    if tried.quality is not None or tried.reason == UNMEASURABLE:
        return True
    if best is None:
        return False
    if tried.bytes is not None and best[1].bytes is not None:
        return tried.bytes >= best[1].bytes
    return not _could_be_smaller(level, best[0])


def _not_good_enough(tried: Sequence[Tried], min_quality: float) -> KvshelfError:
    measured = [(one.quality.agreement, one) for one in tried if one.quality is not None]
    told = [one.model_dump(mode="json", exclude={"cache_id"}) for one in tried]
    if not measured:
        return PolicyUnsupported(
            "no quality can be measured of these levels: the document is too short to make questions from, is read "
            "chunk by chunk, or leaves no room behind it; leave min_quality out",
            param="min_quality",
            tried=told,
        )
    agreement, closest = max(measured, key=lambda pair: pair[0])
    return QualityBelowFloor(
        f"no level agrees with the full cache to {min_quality:g}: the closest is policy {closest.policy!r} at "
        f"{closest.compression_ratio:g} removed under codec {closest.codec!r}, with {agreement:g}; lower min_quality, "
        "or remove less",
        param="min_quality",
        tried=told,
    )
