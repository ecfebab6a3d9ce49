"""A large fleet on paper: which part that all share is full first, and what failures cost. Nothing is run.

Between two events (a node dies or comes back, a document kills its worker) everything goes on at one rate: that of the
GPUs that are up, or of the fullest part. So a run of days takes as many steps as it has events.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import Final

from kvshelf.corpus.plan import Plan
from kvshelf.corpus.rates import SharedRates

ATTEMPTS: Final = 3
"""Of a document that kills its worker each time."""

_IN_FLIGHT: Final = 2
"""Documents that a replica has begun: one is prefilled while another is written."""

_GBIT: Final = 1e9 / 8

FOLDERS: Final = "file system, were it a folder on each node"


@dataclass(frozen=True)
class Fleet:
    """What there is. A shelf is a Redis prefix, with an index of its own; servers share the blobs of all shelves.

    node_mtbf_h: hours from one failure of a node to its next; 6,300 is what 16,384 GPUs in nodes of 8 had in 54 days
    (419 interruptions, by the report on Llama 3). poison: share of documents that kill their worker. restart_s: until a
    replica is back; repair_s: until a node is. services: Ray clusters that share the corpus out.
    """

    gpus: int = 1000
    gpus_per_node: int = 8
    node_gbit: float = 100.0
    servers: int = 1
    server_gbit: float = 25.0
    server_memory_bytes: float = 512e9
    shelves: int = 1
    services: int = 1
    node_mtbf_h: float = 6300.0
    repair_s: float = 900.0
    poison: float = 1e-5
    restart_s: float = 60.0


@dataclass(frozen=True)
class Part:
    """Something all GPUs share. used: of its capacity while all GPUs work, 1 is full. move: what moves the limit.
    by_rate: it is a rate that fills it, and not an amount. per_node: only the GPUs of a node share it, each node has
    one."""

    name: str
    used: float
    move: str
    by_rate: bool = True
    per_node: bool = False

    def breaks_at(self, gpus: int) -> float:
        """GPUs at which it is full. What is full by amount and not by rate breaks at no number of them, nor does what
        comes with each node: more GPUs are more nodes."""
        return gpus / self.used if self.used and self.by_rate and not self.per_node else math.inf


@dataclass(frozen=True)
class Outcome:
    """How a run goes. lost_gpu_hours: work that was begun and done again, and GPUs that waited for a replica. slowed_h:
    hours in which a part and not the GPUs set the pace. stopped_by: the part that was full, so that nothing went on."""

    hours: float
    documents: int
    error_rows: int
    node_failures: int
    worker_deaths: int
    lost_gpu_hours: float
    innocent: float
    slowed_h: dict[str, float]
    stopped_by: str | None


def parts_of(plan: Plan, fleet: Fleet, rates: SharedRates) -> list[Part]:
    """The shared parts, the fullest first. The plan must be one of a home in Redis, for as many GPUs."""
    rate = plan.documents_per_s
    mb_per_s = plan.bytes_stored / plan.documents * rate / 1e6
    nodes = math.ceil(fleet.gpus / fleet.gpus_per_node)
    memory = (plan.bytes_stored + plan.home_bytes) / (fleet.servers * fleet.server_memory_bytes)
    wire = mb_per_s * 1e6 / _GBIT
    index_s = rate * rates.redis_document_s / fleet.shelves
    heads = fleet.gpus / fleet.services
    clusters = "several Ray clusters, each with a part of the corpus"
    found = [
        Part("memory of the Redis servers", memory, "more of it removed, --codec int4, more servers", by_rate=False),
        Part(
            "network of the Redis servers", wire / (fleet.servers * fleet.server_gbit), "more servers: redis-cluster://"
        ),
        Part("threads of the Redis servers, for bytes", mb_per_s * rates.redis_mb_s / fleet.servers, "more servers"),
        Part("thread of the Redis server with the index", index_s, "several shelves: ?prefix=a, ?prefix=b"),
        Part("network of a node", wire / (nodes * fleet.node_gbit), "fewer GPUs in a node", per_node=True),
        Part("Serve's controller", heads * rates.controller_replica_s, clusters),
        Part("GCS of the Ray head", heads * rates.gcs_replica_s, clusters),
        Part("process that runs the batch", rate * rates.driver_result_s / fleet.services, "several batches"),
        Part(FOLDERS, rate / nodes * rates.disk_document_s, "fewer GPUs in a node", per_node=True),
    ]
    return sorted(found, key=lambda part: -part.used)


def simulate(plan: Plan, fleet: Fleet, rates: SharedRates, *, seed: int = 0) -> Outcome:
    """Let the fleet work through the plan's documents. The same seed gives the same run."""
    return _Run(plan, fleet, rates, random.Random(seed)).outcome()


class _Run:
    """One simulated run. Times are hours."""

    def __init__(self, plan: Plan, fleet: Fleet, rates: SharedRates, chance: random.Random) -> None:
        self._plan, self._fleet, self._chance = plan, fleet, chance
        shared = [part for part in parts_of(plan, fleet, rates) if part.name != FOLDERS]
        by_rate = [part for part in shared if part.by_rate]
        self._slowest = max(by_rate, key=lambda part: part.used)
        self._room = min([part for part in shared if not part.by_rate], key=lambda part: -part.used)
        self._each_h = plan.gpu_hours / plan.documents  # of a GPU
        self._down: list[tuple[float, int]] = []  # (when they are back, GPUs)
        self._now = self._done = 0.0
        self._counts: Counter[str] = Counter()
        self._lost = 0.0
        self._slowed = 0.0

    def outcome(self) -> Outcome:
        plan, room = self._plan, self._room
        end = plan.documents / max(1.0, room.used)
        while self._done < end:
            self._step(end)
        hit = _IN_FLIGHT * self._each_h / self._fleet.node_mtbf_h  # that a document's node dies under it
        return Outcome(
            hours=self._now,
            documents=round(self._done),
            error_rows=self._counts["poison"],
            node_failures=self._counts["node"],
            worker_deaths=self._counts["poison"] * ATTEMPTS,
            lost_gpu_hours=self._lost,
            innocent=plan.documents * hit**ATTEMPTS,
            slowed_h={self._slowest.name: self._slowed} if self._slowed else {},
            stopped_by=room.name if room.used > 1 else None,
        )

    def _step(self, end: float) -> None:
        """Go on until the next event, or the end."""
        fleet = self._fleet
        up = max(0, fleet.gpus - sum(gpus for _, gpus in self._down))
        alone = up / self._each_h  # documents an hour, if nothing stood in the way
        rate = min(alone, self._plan.documents_per_hour / max(self._slowest.used, 1e-12))
        to_node = self._wait(up / fleet.gpus_per_node / fleet.node_mtbf_h)
        to_poison = self._wait(rate * fleet.poison)
        to_back = self._down[0][0] - self._now if self._down else math.inf
        to_end = (end - self._done) / rate if rate else math.inf
        passed = min(to_node, to_poison, to_back, to_end)
        self._now += passed
        self._done = end if passed == to_end else self._done + rate * passed
        self._slowed += passed if rate < alone else 0.0
        if passed == to_node:
            self._fail("node", fleet.gpus_per_node, fleet.repair_s / 3600, times=1)
        elif passed == to_poison:
            self._fail("poison", 1, fleet.restart_s / 3600, times=ATTEMPTS)
        elif passed == to_back:
            heapq.heappop(self._down)

    def _fail(self, kind: str, gpus: int, away_h: float, *, times: int) -> None:
        """GPUs are away, and what they had begun is done again. A poison document's attempts are put into one."""
        self._counts[kind] += 1
        self._lost += times * gpus * (away_h + _IN_FLIGHT * self._each_h / 2)
        heapq.heappush(self._down, (self._now + times * away_h, gpus))

    def _wait(self, per_hour: float) -> float:
        return self._chance.expovariate(per_hour) if per_hour > 0 else math.inf
