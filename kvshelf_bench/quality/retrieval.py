"""How often a model finds one fact in a long document when it answers from a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvshelf.engine.engine import Engine
from kvshelf.samples.tasks import Haystack, Task, make_document
from kvshelf_bench.measure import wilson

EVALUATION_SEED = 1_000_000
"""First seed of the documents. Training draws from another generator and never sees these documents."""


@dataclass(frozen=True)
class Retrieval:
    """The result for one task, haystack and length. `low` and `high` bound the share of exact answers (95 %)."""

    task: Task
    haystack: Haystack
    tokens: int
    documents: int
    exact: int
    low: float
    high: float

    @property
    def share(self) -> float:
        return self.exact / self.documents


def measure_cell(
    engine: Engine,
    task: Task,
    haystack: Haystack,
    tokens: int,
    documents: int,
    *,
    compress: dict[str, Any],
    seed: int = EVALUATION_SEED,
    progress: Callable[[], None] = lambda: None,
) -> Retrieval:
    """Ask one question about each of `documents` documents of at most `tokens` tokens, made from consecutive seeds.

    An answer is right if it is exactly the value. compress: the arguments of `Engine.compress`; policy `full` measures
    the model itself.
    """
    exact = 0
    for i in range(documents):
        document = make_document(task, haystack, tokens, seed + i, counter(engine))
        question = document.questions[0]
        cache = engine.compress(document.text, **compress)
        answer = engine.answer(cache, question.text, max_new_tokens=len(question.answer) + 8)
        exact += answer.text.strip() == question.answer
        progress()
    low, high = wilson(exact, documents)
    return Retrieval(task, haystack, tokens, documents, exact, low, high)


def counter(engine: Engine) -> Callable[[str], int]:
    """Counts the tokens of a text under the engine's tokenizer."""
    return engine.encoder.require_text("document").count_tokens
