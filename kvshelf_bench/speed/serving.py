"""A document prefilled and questions on it answered, by kvshelf and by others, in wall time and within a budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvshelf.kernels.rates import Cost
from kvshelf_bench.measure import Spread, ratios
from kvshelf_bench.speed.subject import ANSWER_TOKENS, QUESTION_TOKENS, Subject
from kvshelf_bench.speed.ways import MOST_ANSWERS, OfPeer, Way, open_llama, open_vllm, own_ways

LENGTHS: Final = (2048, 8000)
"""Tokens of the documents; questions are asked on one of the first length."""

REPLICA: Final = "replica"

_ABSENT: Final = {
    "vLLM": "no interpreter has it (--vllm-python names one), or it was not ready after half of the budget",
    "llama.cpp": "the model is no GGUF file, or no interpreter has llama-cpp-python; --llama-python names one",
}

_START: Final = 0.5
"""Of the budget, what a peer may take until it is ready."""

_WARM_TOKENS: Final = 256
_WARM_ANSWER: Final = 8
_GROWTH: Final = 1.6
"""A prefill takes this power of its tokens, or less: products take the first, attention the second."""

REST_S: Final = 0.5
"""Before each turn: threads of the way before it may still look for work, on the cores of whoever is next."""


@dataclass(frozen=True)
class Work:
    """A document of `document` tokens prefilled, or so many answers of `new_tokens` to questions on the last one."""

    name: str
    document: int = 0
    answers: int = 0
    new_tokens: int = 0


@dataclass(frozen=True)
class ServingRow:
    """seconds: wall time of each way that was measured, processor_s: of its process. beside: how many times as fast as
    each other way the replica was in wall time, within a round. rounds: how often it was measured."""

    work: str
    rounds: int
    seconds: dict[str, Spread]
    processor_s: dict[str, Spread]
    beside: dict[str, Spread]


@dataclass(frozen=True)
class Serving:
    """missing: what was not measured, and why. versions: of the packages of each peer."""

    ways: list[str]
    rows: list[ServingRow]
    missing: list[str]
    versions: dict[str, dict[str, str]]


@dataclass(frozen=True)
class ServingPace:
    """rounds: at most. budget_s: seconds of all of them. rest_s: see `REST_S`."""

    rounds: int
    budget_s: float
    rest_s: float = REST_S


def works(lengths: Sequence[int]) -> list[Work]:
    """In the order in which they run: a question needs its document."""
    prefills = [Work(f"{tokens:,} tokens prefilled", tokens) for tokens in lengths]
    answers = [
        Work(f"first token of a question of {QUESTION_TOKENS} on {lengths[0]:,}", answers=1, new_tokens=1),
        Work(f"one answer of {ANSWER_TOKENS}", answers=1, new_tokens=ANSWER_TOKENS),
        Work(f"{MOST_ANSWERS} answers of 24 on one document", answers=MOST_ANSWERS, new_tokens=24),
    ]
    return [prefills[0], *answers, *prefills[1:]]


def serving(
    subject: Subject,
    lengths: Sequence[int],
    pace: ServingPace,
    interpreters: Mapping[str, str | None],
    threads: int,
    tell: Callable[[ServingRow], None] = lambda _: None,
    turn: Callable[[str], None] = lambda _: None,
) -> Serving:
    """The rounds, as far as they end within the budget: all ways do each work in turn, and a work that would go beyond
    it, by what the way has taken before, is left out. interpreters: of vLLM and llama.cpp; None for this one. tell: is
    called with each row of the first round as soon as it is measured; turn: with what is measured next."""
    ends, started = time.monotonic() + pace.budget_s, time.monotonic() + _START * pace.budget_s
    longest = max(lengths) + QUESTION_TOKENS + ANSWER_TOKENS
    turn("starting peers")
    with (
        open_llama(interpreters["llama.cpp"], subject, threads, longest, MOST_ANSWERS) as llama,
        open_vllm(interpreters["vLLM"], subject, threads, longest, started) as vllm,
        own_ways(subject) as own_by_name,
    ):
        peers = {"vLLM": vllm, "llama.cpp": llama}
        ways = own_by_name | {name: OfPeer(peer) for name, peer in peers.items() if peer is not None}
        versions = {name: peer.versions for name, peer in peers.items() if peer is not None}
        run = ServingRun(subject, ways, works(lengths), ends, turn, pace.rest_s)
        run.warm()
        for work in run.works:
            if run.measure_first(work):
                tell(run.row(work))
        for number in range(1, pace.rounds):
            if not all(run.measure_again(work, number) or work is not run.works[0] for work in run.works):
                break  # without its document, questions would be on the one before
    missing = [f"{name}: {_ABSENT[name]}" for name, peer in peers.items() if peer is None]
    rows = [run.row(work) for work in run.works if run.costs[work.name]]
    return Serving([*ways], rows, [*missing, *run.missing(pace.rounds)], versions)


@dataclass
class ServingRun:
    subject: Subject
    ways: Mapping[str, Way]
    works: Sequence[Work]
    ends: float
    turn: Callable[[str], None]
    rest_s: float = REST_S
    costs: dict[str, dict[str, list[Cost]]] = field(default_factory=dict)
    _prefilled: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Of each way, the tokens and seconds of its last prefill."""

    _token_s: dict[str, float] = field(default_factory=dict)
    """Of each way, the seconds of a token of its last answers."""

    _left_out: dict[tuple[str, str], float] = field(default_factory=dict)
    """What each way would take for a work that it was not given."""

    _seed: int = 0

    def __post_init__(self) -> None:
        self.costs = {work.name: {} for work in self.works}

    def warm(self) -> None:
        """Nothing is made for the first time where it is measured; the second time tells what the first work takes."""
        tokens = min(_WARM_TOKENS, self.works[0].document)
        for name, way in self.ways.items():
            self.turn(f"{name}: warming up")
            for _ in range(2):
                self._prefilled[name] = tokens, way.prefilled(self._ids(tokens)).wall_s
                warm = way.answered([self._ids(QUESTION_TOKENS)], _WARM_ANSWER)
                self._token_s[name] = warm.wall_s / _WARM_ANSWER

    def measure_first(self, work: Work) -> bool:
        """Give a work to the ways that have time for it, and for questions their document. Whether any had."""
        document, questions = self._draw(work)
        for name in self.ways:
            expected = self._expected(name, work)
            asked_of_nothing = not work.document and name not in self.costs[self.works[0].name]
            if asked_of_nothing or time.monotonic() + expected > self.ends:
                self._left_out[work.name, name] = expected
            else:
                self._take_turn(name, work, document, questions, 0)
        return bool(self.costs[work.name])

    def measure_again(self, work: Work, number: int) -> bool:
        """Give a work to all ways that were measured before, or to none. Whether they had time for it."""
        ways = [*self.costs[work.name]]
        if not ways or time.monotonic() + sum(self._expected(name, work) for name in ways) > self.ends:
            return False
        document, questions = self._draw(work)
        for name in ways:
            self._take_turn(name, work, document, questions, number)
        return True

    def _draw(self, work: Work) -> tuple[list[int], list[list[int]]]:
        """A document and questions that nobody has seen."""
        return self._ids(work.document), [self._ids(QUESTION_TOKENS) for _ in range(work.answers)]

    def _take_turn(self, name: str, work: Work, document: list[int], questions: list[list[int]], number: int) -> None:
        self.turn(f"{work.name}: {name}, round {number + 1}")
        time.sleep(self.rest_s)
        way = self.ways[name]
        if work.document:
            cost = way.prefilled(document)
            self._prefilled[name] = work.document, cost.wall_s
        else:
            cost = way.answered(questions, work.new_tokens)
            if work.new_tokens >= _WARM_ANSWER:  # of fewer the question is most
                self._token_s[name] = cost.wall_s / (work.answers * work.new_tokens)
        self.costs[work.name].setdefault(name, []).append(cost)

    def _expected(self, name: str, work: Work) -> float:
        if known := self.costs[work.name].get(name):
            return known[-1].wall_s
        if not work.document:
            return self._token_s[name] * work.answers * max(work.new_tokens, _WARM_ANSWER)
        tokens, seconds = self._prefilled[name]
        return seconds * float((work.document / tokens) ** _GROWTH)

    def _ids(self, count: int) -> list[int]:
        self._seed += 1
        return self.subject.tokens(count, seed=self._seed)

    def row(self, work: Work) -> ServingRow:
        costs_by_way = self.costs[work.name]
        wall = {name: [cost.wall_s for cost in costs] for name, costs in costs_by_way.items()}
        processor = {name: Spread.of([cost.seconds for cost in costs]) for name, costs in costs_by_way.items()}
        beside = {
            name: ratios(walls, wall[REPLICA]) for name, walls in wall.items() if REPLICA in wall and name != REPLICA
        }
        seconds = {name: Spread.of(walls) for name, walls in wall.items()}
        return ServingRow(work.name, max(map(len, wall.values())), seconds, processor, beside)

    def missing(self, rounds: int) -> list[str]:
        """What the budget left out, one line each."""
        lines = [f"{work} by {name} (about {seconds:,.0f} s)" for (work, name), seconds in self._left_out.items()]
        for work in self.works:
            measured = max(map(len, self.costs[work.name].values()), default=rounds)
            if measured < rounds:
                lines.append(f"{work.name}: {measured} of {rounds} rounds")
        return lines
