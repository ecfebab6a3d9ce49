"""What an answer's first token costs from the shelf, beside prefilling the document again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvshelf.bench.measure import Cost, Spread, cost, interleaved, ratios
from kvshelf.bench.subject import QUESTION_TOKENS, Subject
from kvshelf.store import Store
from kvshelf.store.artifact import CompressedCache

LEVELS = (("full", 0.0), ("keydiff", 0.75), ("keydiff", 0.875))
"""Policies and the fraction each removes. Which entries stay does not matter here, only how many."""

_AGAIN, _AGAIN_TWICE, _MEMORY = "again", "again, a second time", "memory"


@dataclass(frozen=True)
class Tier:
    """From one place: seconds to the first token, wall seconds, and prefilling again over it, within each round."""

    first_s: Spread
    wall_s: Spread
    speedup: Spread


@dataclass(frozen=True)
class FirstToken:
    """A question of `question_tokens` behind a document of `tokens`, answered up to the first token of the answer.

    again_s: the model alone on document and question. tiers: "memory" has the cache in this process, every other one
    reads, verifies and attaches it for each question. prefill_tokens: what went through the model for the question.
    """

    policy: str
    removed: float
    tokens: int
    question_tokens: int
    prefill_tokens: int
    stored_bytes: int
    again_s: Spread
    tiers: dict[str, Tier]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class FirstTokens:
    """The rows of one length. `same`: prefilling again over itself, run twice a round."""

    tokens: int
    same: Spread
    rows: list[FirstToken]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def first_tokens(
    subject: Subject,
    stores: Mapping[str, Store],
    tokens: int,
    rounds: int,
    levels: Sequence[tuple[str, float]] = LEVELS,
) -> FirstTokens:
    """Every level from memory and from each of `stores`, interleaved with prefilling again.

    The question is always `QUESTION_TOKENS` long. The files of a disk store are in the page cache: it has just written
    them.
    """
    engine, document = subject.engine, subject.tokens(tokens, seed=2)
    question = subject.tokens(QUESTION_TOKENS, seed=3)
    variants: dict[tuple[str, float, str], Callable[[], _Asked]] = {}
    for name in (_AGAIN, _AGAIN_TWICE):
        variants[name, 0.0, ""] = lambda: _ask_again(subject, document + question)
    stored_bytes = {}
    for policy, removed in levels:
        cache = engine.compress(document, policy=policy, compression_ratio=removed or None)
        variants[policy, removed, _MEMORY] = lambda cache=cache: _ask(subject, lambda: cache, question)  # type: ignore[misc]
        for name, store in stores.items():
            manifest = store.put(cache)
            stored_bytes[policy, removed] = manifest.bytes_stored
            variants[policy, removed, name] = lambda store=store, id=manifest.id: _ask(  # type: ignore[misc]
                subject, lambda: store.get(id), question
            )
    measured = interleaved(variants, rounds)
    again = [asked.cost for asked in measured[_AGAIN, 0.0, ""]]
    rows = []
    for policy, removed in levels:
        tiers = {name: measured[policy, removed, name] for name in (_MEMORY, *stores)}
        rows.append(
            FirstToken(
                policy=policy,
                removed=removed,
                tokens=tokens,
                question_tokens=QUESTION_TOKENS,
                prefill_tokens=tiers[_MEMORY][0].prefill_tokens,
                stored_bytes=stored_bytes[policy, removed],
                again_s=Spread.of([one.seconds for one in again]),
                tiers={name: _tier([asked.cost for asked in runs], again) for name, runs in tiers.items()},
            )
        )
    second = [asked.cost.seconds for asked in measured[_AGAIN_TWICE, 0.0, ""]]
    return FirstTokens(tokens, ratios(second, [one.seconds for one in again]), rows)


@dataclass(frozen=True)
class _Asked:
    cost: Cost
    prefill_tokens: int


def _ask_again(subject: Subject, ids: list[int]) -> _Asked:
    """The model under its own attention, as anyone without a shelf runs it."""
    model = subject.engine.model
    given = torch.tensor([ids], device=model.device)
    with torch.no_grad():
        spent = cost(lambda: int(model(input_ids=given, logits_to_keep=1).logits[0, -1].argmax()), subject.device)
    return _Asked(spent, len(ids))


def _ask(subject: Subject, fetch: Callable[[], CompressedCache], question: Sequence[int]) -> _Asked:
    prefilled = 0

    def ask() -> None:
        nonlocal prefilled
        prefilled = subject.engine.answer(fetch(), question, max_new_tokens=1).usage.prefill_tokens

    return _Asked(cost(ask, subject.device), prefilled)


def _tier(runs: list[Cost], again: list[Cost]) -> Tier:
    seconds = [run.seconds for run in runs]
    return Tier(
        first_s=Spread.of(seconds),
        wall_s=Spread.of([run.wall_s for run in runs]),
        speedup=ratios([run.seconds for run in again], seconds),
    )
