"""Options, states and progress of a run."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Self

from kvshelf.api import ByteCounts
from kvshelf.api.batches import WorkerShare
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
    """How one batch is run.

    batch_id: part of the request ids of its rows, so that a resumed run finds its attempts. document_deadline_s: for
    one attempt, including the wait for a replica. in_flight: rows that are with the replicas at once; None: enough to
    keep all deployed replicas busy. max_gpu_hours: limit of the replicas' work in this run; beyond it the run is
    cancelled. retry_failed: rows that failed in an earlier run of this batch are tried again.
    """

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
