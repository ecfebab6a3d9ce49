"""The cost of an answer's first token from the shelf, compared with prefilling the document again."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.records import State
from kvshelf.artifact.shape import StateRole
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.attention.states import fill
from kvshelf.errors import CacheError, CacheNotFound
from kvshelf.kernels.rates import Cost, cost
from kvshelf.store.base import Store
from kvshelf_bench.measure import Spread, interleaved, ratios
from kvshelf_bench.speed.subject import QUESTION_TOKENS, Subject

LEVELS = (("full", 0.0), ("keydiff", 0.75), ("keydiff", 0.875))
"""Policies and the fraction each removes. Only the number of kept entries matters here."""

_QUESTIONS = 5
"""Questions that each way asks in its turn, after one that does not count."""

_AGAIN, _AGAIN_TWICE, _ALONE = "again", "again, a second time", "alone"


@dataclass(frozen=True)
class Tier:
    """One place. first_s, wall_s: seconds to the first token. speedup: prefilling again over first_s, by round."""

    first_s: Spread
    wall_s: Spread
    speedup: Spread


@dataclass(frozen=True)
class FirstToken:
    """A question of `question_tokens` behind a document of `tokens`, answered up to the first token of the answer.

    tiers: "memory" has the cache in this process; each store reads, verifies and attaches it for the question;
    "safetensors" reads the same entries from a plain file into a `DynamicCache` for the model's own attention, as a
    user of transformers or kvpress would. prefill_tokens: tokens that went through the model for the question.
    entry_bytes: the size of that plain file.
    """

    policy: str
    removed: float
    tokens: int
    question_tokens: int
    prefill_tokens: int
    entry_bytes: int
    tiers: dict[str, Tier]


@dataclass(frozen=True)
class FirstTokens:
    """The rows of one length. again_s: the model alone on document and question; `same`: the ratio of two such runs in
    one round. alone: the model on the question without a document, the limit of all ways."""

    tokens: int
    again_s: Spread
    same: Spread
    alone: Tier
    rows: list[FirstToken]


def first_tokens(
    subject: Subject,
    stores: Mapping[str, Store],
    tokens: int,
    rounds: int,
    levels: Sequence[tuple[str, float]] = LEVELS,
) -> FirstTokens:
    """Every level from every place, interleaved with prefilling again.

    The question is always `QUESTION_TOKENS` long. Files have just been written and are in the page cache. Each way asks
    six times in its turn, and the median of the last five counts: a replica that answers questions has its weights in
    the processor's cache, which the prefills of the same round fill with other data; and a few dozen milliseconds vary
    by half while a prefill's many seconds do not. The stores may be in use: only caches that the bench added are
    deleted.
    """
    document, question = subject.tokens(tokens, seed=2), subject.tokens(QUESTION_TOKENS, seed=3)
    again, alone = partial(_ask_model, subject, document + question), partial(_ask_model, subject, question)
    ways: dict[tuple[str, float, str], Callable[[], Cost]] = {
        (_AGAIN, 0.0, ""): again,
        (_AGAIN_TWICE, 0.0, ""): again,
        (_ALONE, 0.0, ""): partial(settled, alone),
    }
    known: dict[tuple[str, float], tuple[int, int]] = {}
    with tempfile.TemporaryDirectory(prefix="kvshelf-bench-") as folder, ExitStack() as cleanup:
        for policy, removed in levels:
            cache = subject.engine.compress(document, policy=policy, compression_ratio=removed or None)
            file = Path(folder) / f"{policy}-{removed}.safetensors"
            for place, ask in ways_to_ask(subject, cache, stores, file, question, cleanup):
                ways[policy, removed, place] = partial(settled, ask)
            prefilled = subject.engine.answer(cache, question, max_new_tokens=1).usage.prefill_tokens
            known[policy, removed] = prefilled, file.stat().st_size
        costs_by_way = interleaved(ways, rounds)
    again_costs, second = costs_by_way[_AGAIN, 0.0, ""], costs_by_way[_AGAIN_TWICE, 0.0, ""]
    again_s = [spent.seconds for spent in again_costs]
    rows = []
    for level, facts in known.items():
        tiers = {place: _tier(costs, again_s) for (*of, place), costs in costs_by_way.items() if tuple(of) == level}
        rows.append(FirstToken(*level, tokens, QUESTION_TOKENS, *facts, tiers))
    return FirstTokens(
        tokens=tokens,
        again_s=Spread.of(again_s),
        same=ratios([spent.seconds for spent in second], again_s),
        alone=_tier(costs_by_way[_ALONE, 0.0, ""], again_s),
        rows=rows,
    )


def _tier(costs: list[Cost], again_s: list[float]) -> Tier:
    seconds = [spent.seconds for spent in costs]
    return Tier(Spread.of(seconds), Spread.of([spent.wall_s for spent in costs]), ratios(again_s, seconds))


def settled(ask: Callable[[], Cost]) -> Cost:
    """The median of five calls in a row, after one that does not count."""
    ask()
    return sorted((ask() for _ in range(_QUESTIONS)), key=lambda spent: spent.seconds)[_QUESTIONS // 2]


def ways_to_ask(
    subject: Subject,
    cache: CompressedCache,
    stores: Mapping[str, Store],
    file: Path,
    question: list[int],
    cleanup: ExitStack,
) -> Iterator[tuple[str, Callable[[], Cost]]]:
    """Puts `cache` in every place that it can come from, and yields a function that asks from there."""
    yield "memory", lambda: first_token(subject, lambda: cache, question)
    for name, store in stores.items():
        cache_id = put(store, cache, cleanup)
        yield name, partial(first_token, subject, partial(store.get, cache_id), question)
    exported = subject.engine.export(cache, "absolute")
    save_file({name: tensor.contiguous() for name, tensor in _named(exported)}, file)
    positions = torch.arange(cache.next_position, cache.next_position + len(question), device=subject.device)[None]
    yield "safetensors", lambda: _ask_model(subject, question, lambda: _loaded(file, subject), positions)


def put(store: Store, cache: CompressedCache, cleanup: ExitStack) -> str:
    """Returns the id. Unless the cache was there before, `cleanup` deletes it, also after an interrupted put."""
    cache_id = store.cache_id(cache.identity, codec=cache.codec)
    try:
        store.stat(cache_id)
    except (CacheNotFound, CacheError):
        cleanup.callback(_delete, store, cache_id)
    store.put(cache)
    return cache_id


def _delete(store: Store, cache_id: str) -> None:
    with suppress(CacheNotFound):
        store.delete(cache_id)


def first_token(subject: Subject, fetch: Callable[[], CompressedCache], question: list[int]) -> Cost:
    """Fetch a cache, attach it and answer with one token."""
    return cost(lambda: subject.engine.answer(fetch(), question, max_new_tokens=1), subject.device)


def _ask_model(
    subject: Subject,
    ids: list[int],
    fetch: Callable[[], DynamicCache | None] = lambda: None,
    positions: Tensor | None = None,
) -> Cost:
    """The model under its own attention, as without a shelf."""
    input_ids = torch.tensor([ids], device=subject.device)

    def ask() -> None:
        with torch.no_grad():
            out = subject.engine.model(
                input_ids=input_ids, position_ids=positions, logits_to_keep=1, **{CACHE_ARGUMENT: fetch()}
            )
        int(out.logits[0, -1].argmax())

    return cost(ask, subject.device)


def _named(cache: DynamicCache) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a cache by layer, role and number."""
    for index, layer in enumerate(cache.layers):
        for role in ("keys", "values"):
            if getattr(layer, role, None) is not None:
                yield f"{index}.{role}", getattr(layer, role)
        for role in get_args(StateRole):
            for number, state in getattr(layer, f"{role}_states", {}).items():
                if state is not None:
                    yield f"{index}.{role}.{number}", state


def _loaded(file: Path, subject: Subject) -> DynamicCache:
    tensors, cache = load_file(file, device=str(subject.device)), DynamicCache(config=subject.engine.model.config)
    for name, tensor in tensors.items():
        index, role, *number = name.split(".")
        if number:
            fill(cache.layers[int(index)], [State(role, int(number[0]), tensor)])  # type: ignore[arg-type]
        elif role == "keys":
            cache.update(tensor, tensors[f"{index}.values"], int(index))
    return cache
