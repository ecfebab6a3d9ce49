"""Documents that do harm, and the replicas and corpora they do it in.

A document of token ids that begins with MARK and one of the numbers below does it each time it is on the model.
"""

from __future__ import annotations

import io
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvshelf.corpus.input.rows import parse_jsonl
from kvshelf.corpus.row import Row, Shard
from kvshelf.corpus.run.journal import Journal
from kvshelf.engine.engine import Engine
from kvshelf.engine.inputs.job import Level
from kvshelf.workers.replica import replica

MARK = 6
KILLS, HANGS, SWELLS, SLOW = 7, 8, 9, 10
KINDS = {KILLS: "worker_crashed", HANGS: "deadline_exceeded", SWELLS: "out_of_memory"}
"""The error code of each kind."""

SLOW_S = 1.5


def vulnerable() -> None:
    """For `ReplicaConfig.begin`: in this replica they do harm, and one that hangs is replaced soon. Not before it has
    said in the job table that the document was late, even where the machine is busy."""
    replica.STUCK_S = 3.0
    honest = Engine.run_levels

    def run_levels(engine: Engine, levels: Sequence[Level], **options: Any) -> Any:
        mark, kind = levels[0].job.document.token_ids[:2]
        if (mark, kind) == (MARK, KILLS):
            os.kill(os.getpid(), signal.SIGKILL)
        if (mark, kind) == (MARK, HANGS):
            time.sleep(3600)
        if (mark, kind) == (MARK, SWELLS):
            raise torch.OutOfMemoryError("tried to allocate 9 TiB")
        if (mark, kind) == (MARK, SLOW):
            end = time.monotonic() + SLOW_S
            while time.monotonic() < end:
                time.sleep(0.02)
                (options["checkpoint"] or (lambda: None))()
        return honest(engine, levels, **options)

    Engine.run_levels = run_levels  # type: ignore[method-assign]  # this process is a test's


def document(number: int, *, kind: int | None = None, tokens: tuple[int, int] = (30, 120)) -> dict[str, Any]:
    """A line of a corpus; the same number gives the same document."""
    chance = random.Random(number)
    ids = [chance.randrange(20, 500) for _ in range(chance.randint(*tokens))]
    return {"custom_id": f"d{number}", "token_ids": ids if kind is None else [MARK, kind, *ids]}


def corpus(count: int, **options: Any) -> list[dict[str, Any]]:
    return [document(number, **options) for number in range(count)]


@dataclass(frozen=True)
class Lines(Shard):
    """JSONL in memory."""

    data: bytes
    name: str

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return len(self.data)

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.data.count(b"\n")

    def read(self) -> Any:
        return parse_jsonl(io.BytesIO(self.data), self.name, {})


def shards(lines: Sequence[dict[str, Any] | bytes], size: int = 1000) -> list[Shard]:
    """Lines, cut into shards of `size`."""
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    cut = [b"".join(text + b"\n" for text in texts[at : at + size]) for at in range(0, len(texts), size)]
    return [Lines(data, f"part-{number}.jsonl") for number, data in enumerate(cut)]


class Remembered(Journal):
    """Results in memory. `refuse` raises what a place that does not work raises."""

    def __init__(self) -> None:
        self.results: dict[tuple[str, int], Row] = {}
        self.refuse: Exception | None = None
        self.appended = 0

    def append(self, results: Sequence[Row]) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.appended += len(results)
        self.results |= {result.key: result for result in results}

    def finished(self) -> Any:
        return iter(self.results.values())

    def by_id(self) -> dict[str | None, Row]:
        return {result.custom_id: result for result in self.results.values()}
