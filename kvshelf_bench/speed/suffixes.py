"""Long answers under suffix policies, beside the same answer with all of its suffix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.attention.function import kvshelf_attention
from kvshelf.engine.decode.batch import DecodeBatch
from kvshelf.engine.decode.generation import Generation, Sampling
from kvshelf.kernels.rates import cost
from kvshelf.methods.suffixes.registry import untrained
from kvshelf_bench.engines import endless_answers
from kvshelf_bench.speed.subject import QUESTION_TOKENS, Subject

ANSWER_TOKENS = 4000
BUDGET = 512

_DOCUMENT_TOKENS = 1024
_MEASURED = 512
"""Last tokens of an answer whose time is measured: the suffix is longest there."""


@dataclass(frozen=True)
class BoundedAnswer:
    """One greedy answer of `tokens` tokens; `policy` None has all of its suffix.

    stored: entries of a KV head at its end. bytes: most that the suffix took, those of free places included. token_s:
    seconds of a token, the mean over the last 512. behind: the share of tokens that it would have chosen as the answer
    with all of its suffix did, had it written that answer. equal: the share of tokens of its own answer that are that
    answer's at the same place; it falls with the first other one.
    """

    policy: str | None
    tokens: int
    stored: int
    bytes: int
    token_s: float
    behind: float
    equal: float


def bounded_answers(
    subject: Subject,
    tokens: int = ANSWER_TOKENS,
    budget: int = BUDGET,
    policies: Sequence[str] = tuple(untrained()),
) -> Iterator[BoundedAnswer]:
    """The answer with all of its suffix, and that of each policy."""
    engine = subject.engine
    cache = engine.compress(subject.tokens(_DOCUMENT_TOKENS, seed=10), policy="full")
    with endless_answers(engine), kvshelf_attention(engine.model):
        whole = _SuffixRun.of(subject, cache, None, tokens, budget)
        yield whole.row(whole.chosen, whole.chosen)
        for policy in policies:
            free = _SuffixRun.of(subject, cache, policy, tokens, budget)
            forced = _SuffixRun.of(subject, cache, policy, tokens, budget, whole.chosen)
            yield free.row(whole.chosen, forced.chosen)


@dataclass(frozen=True)
class _SuffixRun:
    """chosen: the tokens that the model chose, whichever were run next."""

    policy: str | None
    chosen: list[int]
    stored: int
    bytes: int
    token_s: float

    @classmethod
    def of(
        cls,
        subject: Subject,
        cache: CompressedCache,
        policy: str | None,
        tokens: int,
        budget: int,
        forced: Sequence[int] = (),
    ) -> _SuffixRun:
        """forced: an answer whose tokens are run in place of those chosen."""
        engine, question = subject.engine, subject.tokens(QUESTION_TOKENS, seed=1000)
        reducer = None if policy is None else engine.bound(policy, question_tokens=len(question), budget=budget)
        answer, batch = engine.start(cache, question, Sampling(tokens), reducer=reducer), engine.batch()
        most = 0

        def steps(count: int) -> None:
            nonlocal most
            for _ in range(count):
                _step(batch, answer, forced)
                most = max(most, batch.nbytes)

        measured = min(_MEASURED, tokens // 2)
        steps(tokens - measured)
        spent = cost(lambda: steps(measured), subject.device)
        return cls(policy, list(answer.token_ids), answer.row.stored, most, spent.seconds / measured)

    def row(self, whole: Sequence[int], behind: Sequence[int]) -> BoundedAnswer:
        return BoundedAnswer(
            self.policy, len(self.chosen), self.stored, self.bytes, self.token_s,
            behind=_equal(whole, behind), equal=_equal(whole, self.chosen),
        )  # fmt: skip


def _step(batch: DecodeBatch, answer: Generation, forced: Sequence[int]) -> None:
    (output,) = batch.step([answer])
    if isinstance(output, Exception):
        raise output
    if forced:
        answer.pending = [forced[len(answer.token_ids) - 1]]


def _equal(one: Sequence[int], other: Sequence[int]) -> float:
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)
