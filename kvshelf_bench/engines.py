"""How the benches load an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import transformers

from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest
from kvshelf.workers.replica.scheduler import Scheduler, SchedulerLimits
from kvshelf_bench.measure import use_threads


@dataclass(frozen=True)
class EngineOptions:
    """How to load an engine: the arguments of `Engine.load`, and the threads of torch (0: its own choice)."""

    model: str = "kvshelf-tiny"
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 1
    weights: str = "plain"

    def configure(self) -> None:
        """Sets the threads of this process, and hides the bars of transformers: the bench has its own."""
        use_threads(self.threads)
        transformers.utils.logging.disable_progress_bar()

    def load(self) -> Engine:
        """An engine in this process, after `configure`."""
        self.configure()
        return Engine.load(self.model, device=self.device, dtype=self.dtype, weights=self.weights)


@contextmanager
def endless_answers(engine: Engine) -> Iterator[None]:
    """Inside the block no token ends an answer, of the engine or of plain transformers, so all are equally long."""
    config, facts = engine.model.generation_config, engine.facts
    before = config.eos_token_id
    config.eos_token_id, facts.endless = [], True
    try:
        yield
    finally:
        config.eos_token_id, facts.endless = before, False


@contextmanager
def scheduled(engine: Engine, limits: SchedulerLimits) -> Iterator[Scheduler]:
    """A replica's scheduler that runs inside the block; no token ends an answer there."""
    scheduler = Scheduler(engine, limits)
    scheduler.start()
    try:
        with endless_answers(engine):
            yield scheduler
    finally:
        scheduler.stop()


def require_room(engine: Engine, document: int, question: int, answer: int) -> None:
    """Raises `InvalidRequest` where the model has no room for so many tokens: it would end an answer early."""
    longest = document + question + answer
    if longest > engine.max_tokens:
        raise InvalidRequest(
            f"{document} tokens with a question and an answer of {answer} are {longest}, and the model takes "
            f"{engine.max_tokens}; give shorter ones",
            param="answer_tokens",
        )
