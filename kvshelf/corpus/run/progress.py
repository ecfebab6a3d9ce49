"""Options, states and progress of a run, counted as its rows end."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Self

from kvshelf.api import ByteCounts
from kvshelf.api.batches import WorkerShare
from kvshelf.corpus.row import Row, Shard
from kvshelf.errors import InvalidRequest

INTERRUPTED: Final = "interrupted"
"""The reason of a run that Ctrl-C cancelled."""


class RunState(StrEnum):
    """`waiting`: the run paused by itself, for `Progress.reason`. The last three states are final."""

    RUNNING = "running"
    WAITING = "waiting"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    COMPLETED = "completed"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self in (RunState.CANCELLED, RunState.COMPLETED, RunState.FAILED)


@dataclass(frozen=True)
class WorkHours:
    """The time of day in which a batch may work, by the clock of its machine. It may span midnight."""

    begin: datetime.time
    end: datetime.time

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `22:00-06:00`. Raises `InvalidRequest`."""
        try:
            begin, end = (datetime.datetime.strptime(part.strip(), "%H:%M").time() for part in text.split("-"))
        except ValueError as error:
            raise InvalidRequest(f"window {text!r:.80} is not of the form 22:00-06:00", param="window") from error
        if begin == end:
            raise InvalidRequest(f"window {text!r:.80} is empty; leave it out to work all day", param="window")
        return cls(begin, end)

    def __str__(self) -> str:
        return f"{self.begin:%H:%M}-{self.end:%H:%M}"

    def open_at(self, now: datetime.time) -> bool:
        if self.begin < self.end:
            return self.begin <= now < self.end
        return now >= self.begin or now < self.end


@dataclass(frozen=True)
class RunOptions:
    """Options of one batch. batch_id: part of the request ids of its rows, so that a resumed run finds its attempts.
    document_deadline_s: for one attempt, including the wait for a replica. in_flight: rows that are with the replicas
    at once; None: enough to keep all deployed replicas busy. max_gpu_hours: limit of the replicas' work in this run;
    beyond it the run is cancelled. retry_failed: try rows again that failed in an earlier run of this batch."""

    tenant: str
    batch_id: str
    max_attempts: int = 3
    document_deadline_s: float = 3600.0
    in_flight: int | None = None
    window: WorkHours | None = None
    max_gpu_hours: float | None = None
    retry_failed: bool = False


@dataclass(frozen=True)
class Progress:
    """A snapshot. `done` rows succeeded in this run or were `reused`; `failed` ones have an error row.

    total: rows of the input, None until known. reason: why it waits or has failed. tokens, bytes_*: of all done caches,
    reused ones included; tokens_per_s: of new ones only. elapsed_s: time at work, without waiting. eta_s: seconds of
    work left, None while unknown. fraction: of the input, 0 to 1. gpu_hours: of the replicas' GPUs at work
    in this run. workers: by the replica's name. times: Unix seconds at which each state was last entered.
    """

    state: RunState
    reason: str = ""
    total: int | None = None
    done: int = 0
    reused: int = 0
    failed: int = 0
    tokens: int = 0
    bytes_full: int = 0
    bytes_full_16bit: int = 0
    bytes_stored: int = 0
    tokens_per_s: float = 0.0
    elapsed_s: float = 0.0
    eta_s: float | None = None
    fraction: float = 0.0
    gpu_hours: float = 0.0
    workers: Mapping[str, WorkerShare] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)

    @property
    def bytes(self) -> ByteCounts:
        return ByteCounts(full=self.bytes_full, full_16bit=self.bytes_full_16bit, stored=self.bytes_stored)


@dataclass(frozen=True)
class Summary(Progress):
    """The last snapshot of a run that has ended; its rows are in the journal."""


SUMMED: Final = ("tokens", "bytes_full", "bytes_full_16bit", "bytes_stored")
"""Fields that are added up over the rows that are done."""


class Tally:
    """Adds up rows; its size does not grow with their number."""

    def __init__(self, gpus: int = 1) -> None:
        """gpus: of each replica."""
        self._gpus = gpus
        self._seconds = 0.0
        self._sums = Counter(dict.fromkeys(("done", "reused", "failed", *SUMMED), 0))
        self._new_tokens = 0
        self._total: int | None = None
        self._input_bytes = 0
        self._input_done = 0
        self._input_reused = 0
        self._active_s = 0.0
        self._workers: dict[str, WorkerShare] = {}

    @property
    def gpu_hours(self) -> float:
        """Hours that the replicas' GPUs worked; without GPUs, their processes."""
        return self._seconds * self._gpus / 3600

    @property
    def done(self) -> int:
        return self._sums["done"]

    @property
    def failed(self) -> int:
        return self._sums["failed"]

    def expect(self, shards: Sequence[Shard]) -> None:
        """Announce the input."""
        self._input_bytes = sum(shard.nbytes for shard in shards)
        rows = [shard.rows for shard in shards]
        self._total = None if None in rows else sum(row for row in rows if row is not None)

    def complete(self) -> None:
        """All rows have arrived, so their number is known."""
        self._total = self.done + self.failed
        self._input_bytes = self._input_done

    def tick(self, seconds: float) -> None:
        """Add time at work."""
        self._active_s += seconds

    def add(self, row: Row) -> None:
        self._seconds += row.seconds
        self._input_done += row.nbytes
        if row.error is not None:
            self._sums["failed"] += 1
            return
        self._sums.update({"done": 1} | {name: getattr(row, name) for name in SUMMED})
        if row.reused:
            self._sums["reused"] += 1
            self._input_reused += row.nbytes
            return
        self._new_tokens += row.tokens
        if not row.worker:
            return  # no one replica did it
        share = self._workers.get(row.worker, WorkerShare())
        seconds = share.seconds + row.seconds
        self._workers[row.worker] = WorkerShare(done=share.done + 1, tokens=share.tokens + row.tokens, seconds=seconds)

    def counts(self) -> dict[str, Any]:
        """The numeric fields of `Progress`."""
        todo, worked_off = max(0, self._input_bytes - self._input_done), self._input_done - self._input_reused
        if self._total:
            fraction = (self.done + self.failed) / self._total
        else:
            fraction = self._input_done / self._input_bytes if self._input_bytes else 0.0
        return {
            **self._sums,
            "total": self._total,
            "tokens_per_s": self._new_tokens / self._active_s if self._active_s else 0.0,
            "elapsed_s": self._active_s,
            # By the bytes of the input. Reused rows cost next to nothing, so they do not count.
            "eta_s": todo * self._active_s / worked_off if worked_off > 0 else None,
            "fraction": min(1.0, fraction),
            "gpu_hours": self.gpu_hours,
            "workers": dict(self._workers),
        }
