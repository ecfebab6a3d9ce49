"""Selection: the smallest of several levels that is good enough, and the candidates of the policy "auto"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from kvshelf.api import Certificate, Quality, Tried
from kvshelf.artifact.codecs import Codec
from kvshelf.engine.certify.certificate import Certified, certified
from kvshelf.engine.certify.grading import levels_of
from kvshelf.engine.inputs.encode import Document
from kvshelf.engine.inputs.job import Job, Level, shared
from kvshelf.engine.progress import Checkpoint, Progress
from kvshelf.engine.quality import CUES, LEAST, Reference, highest_low
from kvshelf.errors import InvalidRequest, KvshelfError, PolicyUnsupported, QualityBelowFloor
from kvshelf.model.text import EncodedDocument

if TYPE_CHECKING:  # the engine knows nothing of what is built on it
    from kvshelf.engine.engine import Engine
    from kvshelf.engine.prefill.prefill import Compression

MIN_QUALITY: Final = 0.95

_CHEAP: Final[tuple[tuple[str, float | None, str], ...]] = (
    ("full", None, "none"),
    ("full", None, "int8"),
    ("full", None, "int4"),
)
_WHOLE: Final = ("klt:step=1", "klt:step=1.2,steps=kl", "klt", "klt:step=1.9,steps=kl")
"""Forms of the codec klt for all entries."""
_FEWER: Final[tuple[tuple[str, float, str], ...]] = (
    ("keydiff", 0.5, "klt"),
    ("keydiff", 0.75, "klt"),
    ("keydiff", 0.875, "klt"),
    ("keydiff", 0.9375, "klt"),
    ("kvzip", 0.5, "klt"),
    ("kvzip", 0.75, "klt"),
    ("kvcues", 0.5, "klt"),
    ("kvcues", 0.5, "klt:steps=kl,classes=1.5/4,shares=25/25"),
    ("kvcues", 0.75, "klt"),
    ("kvcues", 0.875, "klt"),
)

UNMEASURABLE: Final = "no quality can be measured on this document in this way"
_NOT_MADE: Final = "not made: it would be no better than what is kept"
_NOT_MEASURED: Final = "not measured: it takes no fewer bytes than what meets the floor"
_TOO_LARGE: Final = "not measured: it takes more bytes than asked for"


def candidates(transforms: bool) -> tuple[tuple[str, float | None, str], ...]:
    """Policy, fraction removed and codec of each candidate: the best of their sizes in docs/internals/policies.md.

    The first ones need no probe pass and share one prefill. `kvzip` and then `kvcues` keep their quality longest, but
    each needs a prefill of its own, which costs several plain ones. A model without `transforms` has `int4` in place
    of `klt`.
    """
    if not transforms:
        return (*_CHEAP, *dict.fromkeys((policy, ratio, "int4") for policy, ratio, _ in _FEWER))
    return (*_CHEAP, *(("full", None, codec) for codec in _WHOLE), *_FEWER)


@dataclass(frozen=True)
class SizeTarget:
    """What a choice has to reach. min_quality: for `quality.low`. max_bytes: for the blob. certified: in their place,
    what a certificate allows.

    With `min_quality` or `certified` the choice is the smallest level that reaches it, with `max_bytes` alone the best
    of those that fit. Raises `InvalidRequest` for a floor that is no share, and for no bytes.
    """

    min_quality: float | None = None
    max_bytes: int | None = None
    certified: Certified | None = None

    def __post_init__(self) -> None:
        floor = self.min_quality
        if floor is not None and (isinstance(floor, bool) or not 0 <= floor <= 1):
            raise InvalidRequest(
                f"min_quality is {floor!r}; it is the lowest bound of the agreement with the full cache, from 0 to 1",
                param="min_quality",
            )
        if self.max_bytes is not None and self.max_bytes < 1:
            raise InvalidRequest(f"max_bytes is {self.max_bytes}; a cache takes at least 1", param="max_bytes")

    @property
    def smallest(self) -> bool:
        """Whether the smallest of the levels is chosen that are good enough."""
        return self.min_quality is not None or self.certified is not None

    def fits(self, nbytes: int) -> bool:
        return self.max_bytes is None or nbytes <= self.max_bytes

    def met(self, level: Level, tried: Tried) -> bool:
        """Whether a level reaches the target. The full cache reaches every floor: it agrees with itself."""
        if tried.bytes is None or not self.fits(tried.bytes):
            return False
        if level.keeps_all or self.certified is None:
            return level.keeps_all or (tried.quality is not None and self.good(tried.quality))
        return self.certified.allows(level, tried.quality)

    def good(self, quality: Quality) -> bool:
        """Whether a quality reaches the floor: one of all cues."""
        return self.min_quality is None or (
            quality.full and quality.low is not None and quality.low >= self.min_quality
        )

    def beyond(self, quality: Quality) -> bool:
        """Whether the floor is out of reach, of however few cues a quality is."""
        return self.min_quality is not None and quality.high is not None and quality.high < self.min_quality

    def preferred(self, level: Level, tried: Tried) -> tuple[float, ...]:
        """Of two levels that meet the target the one with the larger value is chosen."""
        size = -float(tried.bytes or 0)
        if self.smallest:
            return (size,)
        if tried.quality is None:  # the full cache of a document on which nothing can be measured
            return (float(level.keeps_all), 0.0, size)
        return (tried.quality.agreement or 0.0, -tried.quality.kl, size)


@dataclass(frozen=True)
class AutoChoice:
    """A level that is made. tried: where it was chosen, all levels that were tried, in the order of the selection."""

    level: Level
    compression: Compression
    tried: tuple[Tried, ...] = ()


@dataclass(frozen=True)
class PolicyChoice:
    """A choice among levels of one document.

    `refused`: levels that were dropped before any work. `progress` is told of each layer and each measured level. Built
    without the model, on any thread; `run` is work for the thread that owns it.
    """

    levels: tuple[Level, ...]
    target: SizeTarget
    refused: tuple[Tried, ...] = ()
    cues: int = CUES
    progress: Progress = field(default=lambda *_: None, compare=False, repr=False)

    @property
    def num_tokens(self) -> int:
        return self.levels[0].job.num_tokens

    def without(self, reasons: Mapping[int, str]) -> PolicyChoice:
        """The same choice among the other levels. reasons: why some are dropped, by their place in `levels`."""
        levels = tuple(level for number, level in enumerate(self.levels) if number not in reasons)
        dropped = [
            _untried(self.levels[number]).model_copy(update={"reason": reason}) for number, reason in reasons.items()
        ]
        return replace(self, levels=levels, refused=(*self.refused, *dropped))

    def run(self, engine: Engine, *, checkpoint: Checkpoint | None = None) -> AutoChoice:
        """Compress and measure until no level that is left could be better; prefills that could not give one are
        skipped.

        Raises `QualityBelowFloor` with the details `tried` if no level meets the target, and `PolicyUnsupported` if
        nothing can be measured (see `Engine.probe`) and no level keeps everything.
        """
        search = _Search(engine, self, checkpoint or (lambda: None))
        for group in shared(self.levels):
            search.try_group(group)
        tried = (*(search.tried[id(level)] for level in self.levels), *self.refused)
        if search.best is None or search.compression is None:
            raise _none_met(tried, self.target)
        return AutoChoice(search.best[0], search.compression, tried)

    def known(self, outcomes: Sequence[Tried | None]) -> Level | None:
        """What `run` would choose, or None if earlier outcomes do not determine it. The model does not run.

        outcomes: of each level, None if it is unknown. Raises as `run` does.
        """
        pairs = [(level, tried or _untried(level)) for level, tried in zip(self.levels, outcomes, strict=True)]
        met = [pair for pair in pairs if self.target.met(*pair)]
        best = max(met, key=lambda pair: self.target.preferred(*pair), default=None)
        if not all(self._settled(*pair, best) for pair in pairs):
            return None
        if best is None:
            raise _none_met((*(tried for _, tried in pairs), *self.refused), self.target)
        return best[0]

    def worth_making(self, level: Level, best: tuple[Level, Tried]) -> bool:
        """Whether a level could be better than the best one so far. Under codecs of one name more entries take more
        bytes, except for the few that the codec leaves whole; others do not compare."""
        if not self.target.smallest:
            return best[1].quality is not None and best[1].quality.agreement != 1
        other = Codec.parse(level.codec).name != Codec.parse(best[0].codec).name
        return other or level.job.budget.tokens < best[0].job.budget.tokens

    def worth_measuring(self, tried: Tried, best: tuple[Level, Tried] | None) -> bool:
        """Whether the quality of a level that fits could matter."""
        if best is None or not self.target.smallest:
            return True
        return (tried.bytes or 0) < (best[1].bytes or 0)

    def _settled(self, level: Level, tried: Tried, best: tuple[Level, Tried] | None) -> bool:
        """Whether trying a level would change nothing."""
        if tried.reason == UNMEASURABLE:
            return True
        if tried.quality is not None:
            return tried.quality.full or self.target.beyond(tried.quality)
        if tried.bytes is not None:
            return not self.target.fits(tried.bytes) or not self.worth_measuring(tried, best)
        return best is not None and not self.worth_making(level, best)


def auto(engine: Engine, document: Document | EncodedDocument, *, target: SizeTarget | None = None) -> PolicyChoice:
    """The selection behind `policy: "auto"`: every candidate that takes this document. Thread-safe.

    target: by default a floor of `MIN_QUALITY`. Raises what `Engine.prepare` raises for the document itself.
    """
    encoded = document if isinstance(document, EncodedDocument) else engine.encode_document(document)
    levels, refused = [], []
    jobs: dict[tuple[str, float | None], Job] = {}  # codecs of one job are made of the same entries
    for policy, ratio, codec in candidates(engine.coders.writes_klt):
        try:
            if (policy, ratio) not in jobs:
                jobs[policy, ratio] = engine.prepare(encoded, policy=policy, compression_ratio=ratio)
            levels.append(engine.compressor.level(jobs[policy, ratio], codec))
        except KvshelfError as error:  # what a policy refuses, others may take
            if policy == "full":
                raise
            refused.append(Tried(policy=policy, compression_ratio=ratio or 0.0, codec=codec, reason=error.message))
    return PolicyChoice(tuple(levels), target or SizeTarget(MIN_QUALITY), tuple(refused))


def under(
    engine: Engine, document: Document | EncodedDocument, certificate: Certificate, labels: Mapping[str, str]
) -> PolicyChoice:
    """The selection under a certificate: the smallest of its ways that it allows for this document, or the full cache.
    labels: of the cache. Thread-safe. Raises as `certified`, and what `Engine.prepare` raises for the document."""
    encoded = document if isinstance(document, EncodedDocument) else engine.encode_document(document)
    bound = certified(engine, certificate, labels, len(encoded.token_ids))
    levels = levels_of(engine, encoded, certificate.ways)
    whole = engine.compressor.level(engine.prepare(encoded, policy="full"))
    return PolicyChoice((whole, *(level for level in levels if level is not None)), SizeTarget(certified=bound))


@dataclass(eq=False)
class _Search:
    """The best level so far with its compression, and the outcome of each level."""

    engine: Engine
    selection: PolicyChoice
    checkpoint: Checkpoint
    best: tuple[Level, Tried] | None = None
    compression: Compression | None = None
    tried: dict[int, Tried] = field(default_factory=dict)

    def try_group(self, group: Sequence[Level]) -> None:
        cues = self.selection.cues
        if self.engine.probe(group[0].job, cues) is None:
            self._leave_out([level for level in group if not level.keeps_all], UNMEASURABLE)
            group = [level for level in group if level.keeps_all]
        best = self.best
        if best is not None and not any(self.selection.worth_making(level, best) for level in group):
            self._leave_out(group, _NOT_MADE)
            return
        if not group:
            return
        progress = self.selection.progress
        prefill = self.engine.compressor.prefill(group, cues=cues, checkpoint=self.checkpoint, progress=progress)
        pairs = zip(group, prefill.compressions, strict=True)
        sized = [(compression.cache.pack().nbytes, level, compression) for level, compression in pairs]
        for nbytes, level, compression in sorted(sized, key=lambda size: size[0]):
            self._try(level, nbytes, compression, prefill.reference)
            self.checkpoint()

    def _try(self, level: Level, nbytes: int, compression: Compression, reference: Reference | None) -> None:
        target = self.selection.target
        tried = _untried(level).model_copy(update={"bytes": nbytes})
        if not target.fits(nbytes):
            self._note(level, tried, _TOO_LARGE)
            return
        if not self.selection.worth_measuring(tried, self.best):
            self._note(level, tried, _NOT_MEASURED)
            return
        if reference is None:
            tried = self._note(level, tried, UNMEASURABLE)
        else:
            self.selection.progress("quality", 0, 1)
            quality = self.engine.compressor.measure(compression.cache, reference, target.min_quality)
            compression = replace(compression, quality=quality)
            self.selection.progress("quality", 1, 1)
            tried = self._note(level, tried.model_copy(update={"quality": compression.quality}))
        best = self.best
        if target.met(level, tried) and (best is None or target.preferred(level, tried) > target.preferred(*best)):
            self.best, self.compression = (level, tried), compression

    def _leave_out(self, levels: Sequence[Level], reason: str) -> None:
        for level in levels:
            self._note(level, _untried(level), reason)

    def _note(self, level: Level, tried: Tried, reason: str | None = None) -> Tried:
        noted = tried.model_copy(update={"reason": reason})
        self.tried[id(level)] = noted
        return noted


def _untried(level: Level) -> Tried:
    identity = level.job.identity
    return Tried(policy=identity.policy, compression_ratio=identity.compression_ratio, codec=level.codec)


def _none_met(tried: Sequence[Tried], target: SizeTarget) -> KvshelfError:
    outcomes = [outcome.model_dump(mode="json", exclude={"cache_id"}) for outcome in tried]
    sizes = [outcome.bytes for outcome in tried if outcome.bytes is not None]
    if target.max_bytes is not None and not any(map(target.fits, sizes)):
        return QualityBelowFloor(
            f"no level fits into {target.max_bytes} bytes: the smallest takes {min(sizes, default=0)}; allow more, or "
            "remove more",
            param="max_bytes",
            tried=outcomes,
        )
    measured = [(outcome, outcome.quality) for outcome in tried if outcome.quality is not None]
    bounded = [(quality.low, outcome) for outcome, quality in measured if quality.low is not None]
    if not bounded:
        reason = next((quality.reason for _, quality in measured), None)
        why = reason or (
            f"the document is too short for {LEAST} cues, is read chunk by chunk, or leaves no room behind it"
        )
        return PolicyUnsupported(
            f"no quality can be measured of these levels: {why}; leave min_quality out",
            param="min_quality",
            tried=outcomes,
        )
    low, closest = max(bounded, key=lambda pair: pair[0])
    most = highest_low(max(quality.asked for _, quality in measured))
    never = "" if (target.min_quality or 0) <= most else f" (no cues of this document show more than {most:.3f})"
    within = "" if target.max_bytes is None else f" within {target.max_bytes} bytes"
    return QualityBelowFloor(
        f"no level agrees with the full cache to {target.min_quality:g}{within} (lower bound at 95 %): the closest is "
        f"policy {closest.policy!r} at {closest.compression_ratio:g} removed under codec {closest.codec!r}, with "
        f"{low:.3f}; lower min_quality{never}, or remove less",
        param="min_quality",
        tried=outcomes,
    )
