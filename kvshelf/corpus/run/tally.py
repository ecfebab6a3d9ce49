"""The numbers of a run, counted as its rows end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvshelf.corpus.row import Row, Shard
from kvshelf.corpus.run.progress import WorkerProgress


class Tally:
    """Adds up rows; its size does not grow with their number."""

    def __init__(self) -> None:
        self.done = 0
        self.failed = 0
        self.seconds = 0.0
        self._reused = 0
        self._tokens = 0
        self._new_tokens = 0
        self._bytes_full = 0
        self._bytes_stored = 0
        self._total: int | None = None
        self._input_bytes = 0
        self._input_done = 0
        self._input_reused = 0
        self._active_s = 0.0
        self._workers: dict[str, WorkerProgress] = {}

    def expect(self, shards: Iterable[Shard]) -> None:
        """Announce the input."""
        for shard in shards:
            self._input_bytes += shard.nbytes
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
        self.seconds += row.seconds
        self._input_done += row.nbytes
        if row.error is not None:
            self.failed += 1
            return
        self.done += 1
        self._tokens += row.tokens
        self._bytes_full += row.bytes_full
        self._bytes_stored += row.bytes_stored
        if row.reused:
            self._reused += 1
            self._input_reused += row.nbytes
            return
        self._new_tokens += row.tokens
        had = self._workers.get(row.worker, WorkerProgress())
        self._workers[row.worker] = WorkerProgress(had.done + 1, had.tokens + row.tokens, had.seconds + row.seconds)

    def counts(self) -> dict[str, Any]:
        """The numeric fields of `Progress`."""
        return {
            "total": self._total,
            "done": self.done,
            "reused": self._reused,
            "failed": self.failed,
            "tokens": self._tokens,
            "bytes_full": self._bytes_full,
            "bytes_stored": self._bytes_stored,
            "tokens_per_s": self._new_tokens / self._active_s if self._active_s else 0.0,
            "elapsed_s": self._active_s,
            "eta_s": self._eta_s(),
            "fraction": self._fraction(),
            "gpu_hours": self.seconds / 3600,
            "workers": dict(self._workers),
        }

    def _fraction(self) -> float:
        if self._total:
            return min(1.0, (self.done + self.failed) / self._total)
        return min(1.0, self._input_done / self._input_bytes) if self._input_bytes else 0.0

    def _eta_s(self) -> float | None:
        """By the bytes of the input. Reused rows cost next to nothing, so they do not count."""
        worked_off = self._input_done - self._input_reused
        if worked_off <= 0:
            return None
        left = max(0, self._input_bytes - self._input_done)
        return left * self._active_s / worked_off
