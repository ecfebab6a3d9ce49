"""The numbers of a run, counted as its rows end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from kvshelf.api.batches import WorkerShare
from kvshelf.corpus.row import Row, Shard

SUMMED: Final = ("tokens", "bytes_full", "bytes_full_16bit", "bytes_stored")
"""What is added up over the rows that are done."""


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
        had = self._workers.get(row.worker, WorkerShare())
        seconds = had.seconds + row.seconds
        self._workers[row.worker] = WorkerShare(done=had.done + 1, tokens=had.tokens + row.tokens, seconds=seconds)

    def counts(self) -> dict[str, Any]:
        """The numeric fields of `Progress`."""
        left, worked_off = max(0, self._input_bytes - self._input_done), self._input_done - self._input_reused
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
            "eta_s": left * self._active_s / worked_off if worked_off > 0 else None,
            "fraction": min(1.0, fraction),
            "gpu_hours": self.gpu_hours,
            "workers": dict(self._workers),
        }
