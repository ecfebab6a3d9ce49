"""Several ways to keep one document, from one prefill."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshelf.workers.engine.attention.function import Attended
from kvshelf.workers.engine.inputs.job import Job
from kvshelf.workers.engine.prefill.reducing import LayerReducer
from kvshelf.workers.engine.quality import QUESTIONS

if TYPE_CHECKING:  # the engine is built on this
    from kvshelf.workers.engine.engine import Compression, Engine


@dataclass(frozen=True)
class Level:
    """One way to keep a document: what a job leaves of it, under a codec (see `kvshelf.store.artifact.codecs`)."""

    job: Job
    codec: str = "none"

    @property
    def keeps_all(self) -> bool:
        """Whether it is the full cache itself, to the last bit."""
        return self.codec == "none" and self.job.budget.tokens == self.job.num_tokens


@dataclass(frozen=True)
class Levels:
    """Levels of one document, all of which are wanted: work for the thread that owns the model.

    `questions`: by how many the cost of each is measured, see `Engine.run_levels`.
    """

    levels: tuple[Level, ...]
    questions: int = QUESTIONS

    @property
    def num_tokens(self) -> int:
        return self.levels[0].job.num_tokens

    def run(self, engine: Engine, *, checkpoint: Callable[[], None] | None = None) -> list[Compression]:
        """A compression for each, in their order."""
        return engine.run_levels(self.levels, questions=self.questions, checkpoint=checkpoint)


def shared(levels: Sequence[Level]) -> list[list[Level]]:
    """The levels by prefill: those of one document whose policies look at the same passes behind it share one.

    In their order. Policies that read the document chunk by chunk change what later chunks see, so each has its own.
    Nor are different passes run behind each other: a policy's scores would not change by it but for last bits, and
    equal requests are to give equal bytes.
    """
    groups: list[list[Level]] = []
    for level in levels:
        for group in groups:
            if group[0].job is level.job or _alike(group[0].job, level.job):
                group.append(level)
                break
        else:
            groups.append([level])
    return groups


def distinct_jobs(levels: Sequence[Level]) -> list[Job]:
    """Each job once: levels that differ in nothing but the codec are reduced together."""
    return list({id(level.job): level.job for level in levels}.values())


def _alike(one: Job, other: Job) -> bool:
    whole = one.absorber is None and other.absorber is None
    return whole and one.identity.document == other.identity.document and one.passes == other.passes


class SharedReducer:
    """The `ForwardContext` of a prefill that several levels share: each reduces the layer, then it is freed.

    `measured` are lengths of passes behind those of the policies, which no policy looks at.
    """

    def __init__(
        self, reducers: Sequence[LayerReducer], *, measured: Sequence[int], checkpoint: Callable[[], None]
    ) -> None:
        self.reducers = reducers
        self.probe_lengths = (*reducers[0].probe_lengths, *measured)
        self._checkpoint = checkpoint
        self.paused_s = 0.0

    @property
    def compress_s(self) -> float:
        """Seconds that all levels took together."""
        return sum(reducer.compress_s for reducer in self.reducers)

    def after_attention(self, layer: Attended) -> None:
        for reducer in self.reducers:
            reducer.after_attention(layer)
        started = time.perf_counter()
        self._checkpoint()
        self.paused_s += time.perf_counter() - started
