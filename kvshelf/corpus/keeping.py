"""Compares the cost of keeping a corpus on the shelf with that of a search for passages at each question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvshelf.api.usage.prices import DAY_S, Prices, Worth
from kvshelf.corpus.plan import Lengths, PlannedWork, Speed
from kvshelf.errors import InvalidRequest
from kvshelf.workers.replica.create.sizes import Dimensions

ASSUMPTIONS: Final = (
    "Of a question only what is read of its document is counted: from a kept one nothing, of passages their prefill.",
    "Passages are prefilled at the speed of a prefill alone: with --tokens-per-s, without what the policy adds on "
    "kvshelf-tiny where that is known.",
    "A search may miss the passage that answers; `kvshelf bench search` measures that. Here it is counted as no cost.",
)


@dataclass(frozen=True)
class Demand:
    """Questions to a document. passages: tokens that each question would prefill of a document that is not kept."""

    questions: int
    days: float
    passages: int


@dataclass(frozen=True)
class LengthCost:
    """Costs of each document of one length. made: of its prefill and compression. stored: of the days on the shelf.
    passages: of what one question prefills of a document that is not kept. pays_from: from so many questions on
    keeping costs no more; None: never."""

    tokens: int
    documents: int
    made: float
    stored: float
    passages: float
    pays_from: int | None


@dataclass(frozen=True)
class KeepingAdvice:
    """lengths: the shortest first. all_kept, all_retrieved: the cost of the corpus one way. cheaper: the cost where
    each length has its cheaper way; kept: the documents that are kept then."""

    demand: Demand
    currency: str
    lengths: tuple[LengthCost, ...]
    all_kept: float
    all_retrieved: float
    cheaper: float
    kept: int


def advise_keeping(
    lengths: Lengths, shape: Dimensions, work: PlannedWork, speed: Speed, demand: Demand, prices: Prices, model: str
) -> KeepingAdvice:
    """The advice for a corpus. model: whose prices count. Raises `InvalidRequest` where nothing costs anything."""
    documents: dict[int, int] = {}
    for tokens, count in lengths:
        documents[tokens] = documents.get(tokens, 0) + count
    costs = tuple(
        _cost(tokens, count, work.stored_bytes(shape, tokens), speed, demand, prices, model)
        for tokens, count in sorted(documents.items())
    )
    if not any(cost.made or cost.stored or cost.passages for cost in costs):
        raise InvalidRequest(
            f"by these prices (worker_hour, gb_month and input_mtok of {model!r}) neither a kept document nor passages "
            "cost anything, so that nothing speaks for or against keeping one",
            param="--prices",
        )
    prices_kept = [cost.documents * (cost.made + cost.stored) for cost in costs]
    prices_retrieved = [cost.documents * cost.passages * demand.questions for cost in costs]
    keeps = [cost.pays_from is not None and demand.questions >= cost.pays_from for cost in costs]
    pairs = zip(keeps, prices_kept, prices_retrieved, strict=True)
    return KeepingAdvice(
        demand=demand,
        currency=prices.currency,
        lengths=costs,
        all_kept=sum(prices_kept),
        all_retrieved=sum(prices_retrieved),
        cheaper=sum(kept if keep else retrieved for keep, kept, retrieved in pairs),
        kept=sum(cost.documents for keep, cost in zip(keeps, costs, strict=True) if keep),
    )


def _cost(
    tokens: int, documents: int, nbytes: int, speed: Speed, demand: Demand, prices: Prices, model: str
) -> LengthCost:
    creation = tokens / speed.tokens_per_s * prices.second(model)
    read = min(demand.passages, tokens)
    passages = prices.saved(model, read, read / speed.prefill_per_s)
    pays_from = Worth(creation, prices.stored(nbytes, DAY_S), passages).answers(demand.days)
    return LengthCost(tokens, documents, creation, prices.stored(nbytes, demand.days * DAY_S), passages, pays_from)
