"""What a query on the shelf costs beside prefilling the document again, and what compression adds to a prefill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvshelf.bench.measure import Spread, interleaved, ratios, seconds
from kvshelf.bench.retrieval import EVALUATION_SEED, counter
from kvshelf.bench.tasks import make_document
from kvshelf.store import Store
from kvshelf.workers.engine import Engine


@dataclass(frozen=True)
class FirstToken:
    """Seconds to an answer's first token: from the shelf (read, verify, attach, question) and by prefilling again."""

    policy: str
    compression_ratio: float
    stored_bytes: int
    prefill_tokens: int
    shelf_s: Spread
    again_s: Spread
    speedup: Spread

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class CompressionCost:
    """Seconds in the policy over seconds in the prefill of the same run."""

    policy: str
    compression_ratio: float
    prefill_s: Spread
    compress_s: Spread
    share: Spread

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def first_token(
    engine: Engine, store: Store, tokens: int, rounds: int, levels: list[tuple[str, float]]
) -> list[FirstToken]:
    """Time to first token at each (policy, ratio removed), every round beside the plain model on document and question.

    The store's files are in the page cache; each query reads and verifies its blob anew.
    """
    document, question = _document(engine, tokens)
    manifests = {level: store.put(engine.compress(document, **_options(*level))) for level in levels}
    query = engine.encode_query(store.get(manifests[levels[0]].id), question)
    job = engine.prepare(document, policy="full")
    variants: dict[str, Callable[[], float]] = {
        "again": lambda: _prefill_again(engine, list(job.source.token_ids) + query)
    }
    counted: dict[str, int] = {}
    for level, manifest in manifests.items():
        variants[_name(*level)] = lambda level=level, id=manifest.id: _from_shelf(  # type: ignore[misc]
            engine, store, id, query, counted, _name(*level)
        )
    measured = interleaved(variants, rounds)
    return [
        FirstToken(
            policy=policy,
            compression_ratio=ratio,
            stored_bytes=manifests[policy, ratio].bytes_stored,
            prefill_tokens=counted[_name(policy, ratio)],
            shelf_s=Spread.of(measured[_name(policy, ratio)]),
            again_s=Spread.of(measured["again"]),
            speedup=ratios(measured["again"], measured[_name(policy, ratio)]),
        )
        for policy, ratio in levels
    ]


def compression_cost(
    engine: Engine, tokens: int, rounds: int, levels: list[tuple[str, float]]
) -> list[CompressionCost]:
    """Time of each policy beside the prefill it runs in, layer by layer within one forward."""
    document, _ = _document(engine, tokens)
    prefills: dict[str, list[float]] = {_name(*level): [] for level in levels}

    def compress(level: tuple[str, float]) -> float:
        result = engine.run(engine.prepare(document, **_options(*level)))
        prefills[_name(*level)].append(result.prefill_s)
        return result.compress_s

    variants = {_name(*level): (lambda level=level: compress(level)) for level in levels}
    measured = interleaved(variants, rounds)
    costs = []
    for policy, ratio in levels:
        prefill = prefills[_name(policy, ratio)][-rounds:]  # without the round that was thrown away
        spent = measured[_name(policy, ratio)]
        costs.append(CompressionCost(policy, ratio, Spread.of(prefill), Spread.of(spent), share=ratios(spent, prefill)))
    return costs


def _document(engine: Engine, tokens: int) -> tuple[str, str]:
    made = make_document("multikey", "prose", tokens, EVALUATION_SEED, counter(engine))
    return made.text, made.questions[0].text


def _prefill_again(engine: Engine, ids: list[int]) -> float:
    """The model under its own attention, as anyone without a shelf runs it."""
    with torch.no_grad():
        return seconds(
            lambda: (
                engine.model(input_ids=torch.tensor([ids], device=engine.model.device), logits_to_keep=1)
                .logits[0, -1]
                .argmax()
                .item()
            )
        )


def _from_shelf(
    engine: Engine, store: Store, cache_id: str, query: list[int], counted: dict[str, int], name: str
) -> float:
    def ask() -> None:
        generation = engine.start(store.get(cache_id), query)
        generation.step()
        counted[name] = generation.usage().prefill_tokens

    return seconds(ask)


def _options(policy: str, ratio: float) -> dict[str, Any]:
    return {"policy": policy} if policy == "full" else {"policy": policy, "compression_ratio": ratio}


def _name(policy: str, ratio: float) -> str:
    return f"{policy}@{ratio}"
