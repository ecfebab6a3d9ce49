"""The guard of a replica: asks a share of answered questions again of the full cache, while its model has no work."""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NoReturn

import structlog

from kvshelf.api import Quality
from kvshelf.api.answers import Guarded
from kvshelf.artifact.identity import Identity
from kvshelf.engine.certify.recheck import MOST_TOKENS, Recheck, Rechecked, joint_job, require_joint
from kvshelf.engine.quality import VERSION, bounds
from kvshelf.errors import Cancelled, KvshelfError
from kvshelf.store.manifest import BY_GUARD, Manifest
from kvshelf.workers.replica.calls import Caller, called_by
from kvshelf.workers.replica.create.creations import Creations
from kvshelf.workers.replica.inspect import source_job
from kvshelf.workers.replica.reading import whole

log = structlog.get_logger("kvshelf.workers")

JOINT: Final = "joint"
"""In place of a policy: of answers from several caches. They raise no alarm: what documents do not see of each other is
no fault of one cache."""

_WAITING: Final = 64
"""Answers that wait to be asked again; the oldest goes for a newer one. Their tokens are in memory alone."""
_CACHES: Final = 4096
"""Caches whose answers are counted; the one without a check for the longest time goes for a new one."""
_DRIFTS: Final = 256
_GROUPS: Final = 20
_STEP: Final = 0.1
"""gamma over alpha: ten answers that differ beyond their share raise an alarm."""


@dataclass(frozen=True)
class GuardRules:
    """share: of the answers that are asked again; 0: none. time_share: of the replica's life that this may take.
    floor: of the share of what a document decides that its cache answers as the full one. below: what happens to a
    cache that is below it. label: whose values, the first `_GROUPS` of them, are groups that are told apart; "": none.
    """

    share: float = 0.0
    time_share: float = 0.05
    floor: float = 0.9
    below: Literal["flag", "remake"] = "flag"
    label: str = ""


@dataclass(frozen=True)
class AnswerToCheck:
    """An answer that waits to be asked again: token ids of the question, as it was read behind the caches, and of the
    answer."""

    cache_ids: tuple[str, ...]
    tenant: str
    query: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass
class Drift:
    """The level of adaptive conformal inference (Gibbs and Candes, 2021, eq. 2) over the answers of one policy and
    group: it begins at alpha, the share of them that may differ, and each moves it by gamma * (alpha - differs), never
    above alpha. At zero an alarm is raised."""

    alpha: float
    level: float = field(init=False)

    def __post_init__(self) -> None:
        self.level = self.alpha

    def add(self, *, differs: bool) -> bool:
        """Whether this answer raises an alarm; the level then begins anew."""
        self.level = min(self.alpha, self.level + _STEP * self.alpha * (self.alpha - differs))
        if self.level > 0:
            return False
        self.level = self.alpha
        return True


class Guard:
    """Each check prefills the document from its kept source. One answer that differs is no proof: the quality of its
    cache is measured anew, by all cues of the document. The cache is below the floor where the upper bound of that
    figure is, or, where no cue tells, that of the share of its own answers that agreed; it is then recorded with the
    new quality. All methods run on the replica's event loop.

    now: of `time.monotonic`. draw: a number in [0, 1) for each answer. pause_s: between two looks whether the model has
    other work.
    """

    def __init__(
        self,
        creations: Creations,
        rules: GuardRules,
        *,
        now: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
        pause_s: float = 0.05,
    ) -> None:
        self._engine, self._store, self._scheduler = creations.engine, creations.store, creations.scheduler
        self._threads, self._meter = creations.threads, creations.meter
        self.rules, self._creations = rules, creations
        self._now, self._draw, self._pause_s = now, draw, pause_s
        self._began, self._worked_s = now(), 0.0
        self._waiting: deque[AnswerToCheck] = deque(maxlen=_WAITING)
        self._results: OrderedDict[tuple[str, str, str], tuple[int, int]] = OrderedDict()  # of one blob each
        self._drifts: dict[tuple[str, str], Drift] = {}
        self._groups: set[str] = set()
        self._remade: set[tuple[str, str]] = set()  # as many as caches were found below the floor
        self._new_results: list[Guarded] = []
        self._checking = 0

    @property
    def wants(self) -> bool:
        """Whether the answer that has just ended is to be asked again."""
        return self.rules.share > 0 and self._draw() < self.rules.share

    def add(self, answered: AnswerToCheck) -> None:
        if answered.query and answered.answer:
            self._waiting.append(answered)

    @property
    def open(self) -> int:
        """Answers that wait to be asked again, with the one that is being asked."""
        return len(self._waiting) + self._checking

    def take_results(self) -> tuple[Guarded, ...]:
        """The results since the last call."""
        results, self._new_results = tuple(self._new_results), []
        return results

    async def run_forever(self) -> NoReturn:
        """Ask what waits, one answer after another, for as long as this task lives."""
        while True:
            if self._waiting and self._scheduler.idle and self._may_work:
                self._checking = 1
                try:
                    await self.check(self._waiting.popleft())
                finally:
                    self._checking = 0
            else:
                await asyncio.sleep(self._pause_s)

    @property
    def _may_work(self) -> bool:
        return self._worked_s <= self.rules.time_share * (self._now() - self._began)

    async def check(self, answered: AnswerToCheck) -> None:
        """Ask one answer again, and record what that says of its caches. Those that have gone meanwhile, whose source
        is not kept, or that were appended to another are left out."""
        try:
            with called_by(Caller(answered.tenant)):
                began = self._now()
                try:
                    manifests, work = await self._threads.compute(self._prepared, answered)
                finally:
                    self._worked_s += self._now() - began
                if work is None or (result := await self._checked(answered, work)) is None:
                    return
                for manifest in manifests:  # one that was erased meanwhile leaves no value of its label behind
                    await self._threads.run(self._store.stat, manifest.id, tenant=answered.tenant)
                if len(manifests) == 1:
                    await self._record(manifests[0], result)
                else:
                    self._record_joint(manifests, result)
        except KvshelfError as error:
            log.info("an answer could not be asked again", cache_ids=answered.cache_ids, reason=error.message)

    def _prepared(self, answered: AnswerToCheck) -> tuple[list[Manifest], Recheck | None]:
        manifests = [self._store.stat(cache_id, tenant=answered.tenant) for cache_id in answered.cache_ids]
        identities = [Identity.from_dict(manifest.identity) for manifest in manifests]
        pairs = list(zip(manifests, identities, strict=True))
        if any(not manifest.has_source or identity.parent for manifest, identity in pairs):
            return manifests, None
        behind = len(answered.query) + min(len(answered.answer), MOST_TOKENS)
        if len(manifests) > 1:  # before a source is read
            require_joint(self._engine, sum(manifest.num_tokens for manifest in manifests), behind)
        jobs = [source_job(self._engine, self._store, *pair) for pair in pairs]
        job = jobs[0] if len(jobs) == 1 else joint_job(self._engine, jobs, behind)
        self._creations.require_room(job)
        caches = tuple(whole(self._engine, self._store, manifest.id, answered.tenant) for manifest in manifests)
        floor = None if len(caches) > 1 or manifests[0].found_by_guard else self.rules.floor
        return manifests, Recheck(job, caches, answered.query, answered.answer, floor)

    async def _checked(self, answered: AnswerToCheck, work: Recheck) -> Rechecked | None:
        """None where another document came first: the answer waits for the next pause."""
        ticket = self._scheduler.compress(work, tenant=answered.tenant)
        future = asyncio.wrap_future(ticket.future)
        try:
            while not (await asyncio.wait([future], timeout=self._pause_s))[0]:
                if ticket.begun and self._scheduler.has_documents:  # before, it is one of them
                    ticket.cancel()
            return await future
        except Cancelled:
            self._waiting.append(answered)
            return None
        finally:
            ticket.cancel()
            self._worked_s += ticket.worked_s
            self._meter.add(answered.tenant, guard_s=ticket.worked_s)

    def _record_joint(self, manifests: Sequence[Manifest], result: Rechecked) -> None:
        """Record a result of several caches. Its group is theirs, if they are of one."""
        values = {self._value(manifest) for manifest in manifests}
        value = values.pop() if len(values) == 1 else ""
        self._meter.add(
            manifests[0].tenant, guard_group=value or None, guarded_joint=1, guard_joint_differed=int(result.differs)
        )
        self._new_results.append(
            Guarded(JOINT, self.group(value), result.differs, result.kl, below=False, drifts=False)
        )

    async def _record(self, manifest: Manifest, result: Rechecked) -> None:
        key = manifest.id, manifest.tenant, manifest.blob_digest
        checked, agreed = self._results.pop(key, (0, 0))
        self._results[key] = checked, agreed = checked + 1, agreed + (not result.differs)
        if len(self._results) > _CACHES:
            self._results.popitem(last=False)
        value = self._value(manifest)
        group = self.group(value)
        self._meter.add(manifest.tenant, guard_group=value or None, guarded=1, guard_differed=int(result.differs))
        drifts = self._drift(manifest.policy, group, differs=result.differs)
        recorded = manifest.found_by_guard
        quality = measured(result.quality, checked, agreed, result.kl)
        looks = quality.cues > 0 or checked.bit_count() == 1  # a bound that is looked at each time is none
        below = recorded or (looks and quality.high is not None and quality.high < self.rules.floor)
        new = result.differs and below and not recorded
        self._new_results.append(Guarded(manifest.policy, group, result.differs, result.kl, new, drifts))
        if result.differs and below:
            await self._repair(manifest, None if recorded else quality)

    def _value(self, manifest: Manifest) -> str:
        return manifest.labels.get(self.rules.label, "") if self.rules.label else ""

    def group(self, value: str) -> str:
        """Of a value of the label, in metrics and alarms: they have a series for each, so there are few for all
        tenants."""
        if value not in self._groups and len(self._groups) >= _GROUPS:
            return "other"
        self._groups.add(value)
        return value

    def _drift(self, policy: str, group: str, *, differs: bool) -> bool:
        if (key := (policy, group)) not in self._drifts and len(self._drifts) >= _DRIFTS:
            return False
        drift = self._drifts.setdefault(key, Drift(1 - self.rules.floor))
        if alarm := drift.add(differs=differs):
            about = {"policy": policy, "group": group}
            log.warning("answers differ from the full caches' more often than the guard's floor allows", **about)
        return alarm

    async def _repair(self, manifest: Manifest, quality: Quality | None) -> None:
        """Record what a cache below the floor is worth, if that is new, and have a finer one made by the rule. What
        fails is tried again with the next answer that differs."""
        if quality is not None:
            # The figure is of the blob that was asked.
            condition = {"tenant": manifest.tenant, "if_revision": [manifest.revision]}
            await self._threads.run(self._store.update, manifest.id, quality=quality, **condition)
            about = {"cache_id": manifest.id, "policy": manifest.policy, "high": quality.high}
            log.warning("the guard found a cache below its floor", floor=self.rules.floor, **about)
        if self.rules.below != "remake" or (key := (manifest.id, manifest.tenant)) in self._remade:
            return
        began = self._now()
        try:
            await self._creations.remake(manifest, self.rules.floor, Caller(manifest.tenant))
            self._remade.add(key)
        except KvshelfError as error:
            log.warning("no finer cache could be made", cache_id=manifest.id, reason=error.message)
        finally:
            self._worked_s += self._now() - began


def measured(quality: Quality | None, checked: int, agreed: int, kl: float) -> Quality:
    """The quality of a cache after a check: by cues where they tell, otherwise by its own answers."""
    if quality is not None and quality.low is not None:
        return quality.model_copy(update={"reason": BY_GUARD})
    low, high = bounds(agreed, checked)
    return Quality(
        agreement=agreed / checked,
        low=low,
        high=high,
        worst=None,
        cues=0,
        full=False,
        reason=f"{BY_GUARD}: {checked - agreed} of {checked} answers differ from the full cache's",
        kl=kl,
        probe_s=0.0,
        version=VERSION,
    )
