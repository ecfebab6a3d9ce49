"""The numbers of a run, counted as its results come in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvshelf.corpus.input.sources import Shard
from kvshelf.corpus.output.results import Result
from kvshelf.corpus.run.progress import WorkerProgress


class Tally:
    """Adds up results; its size does not grow with their number."""

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
        """What is to come."""
        for shard in shards:
            self._input_bytes += shard.nbytes
        rows = [shard.rows for shard in shards]
        self._total = None if None in rows else sum(row for row in rows if row is not None)

    def complete(self) -> None:
        """All rows have come: now it is known how many they were."""
        self._total = self.done + self.failed
        self._input_bytes = self._input_done

    def tick(self, seconds: float) -> None:
        """So long the run has been at work."""
        self._active_s += seconds

    def add(self, result: Result) -> None:
        self.seconds += result.seconds
        self._input_done += result.nbytes
        if result.error is not None:
            self.failed += 1
            return
        self.done += 1
        self._tokens += result.tokens
        self._bytes_full += result.bytes_full
        self._bytes_stored += result.bytes_stored
        if result.reused:
            self._reused += 1
            self._input_reused += result.nbytes
            return
        self._new_tokens += result.tokens
        had = self._workers.get(result.worker, WorkerProgress())
        self._workers[result.worker] = WorkerProgress(
            had.done + 1, had.tokens + result.tokens, had.seconds + result.seconds
        )

    def counts(self) -> dict[str, Any]:
        """The fields of `Progress` that are numbers."""
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
        """By the bytes of the input; the reused rows cost next to nothing and say nothing about the others."""
        worked_off = self._input_done - self._input_reused
        if worked_off <= 0:
            return None
        left = max(0, self._input_bytes - self._input_done)
        return left * self._active_s / worked_off
