"""The ways in which one document is prefilled and questions on it are answered, all from the same token ids."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvshelf.api.answers import Answer
from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.engine import Engine
from kvshelf.engine.inputs.job import Job
from kvshelf.engine.progress import Checkpoint
from kvshelf.kernels.rates import Cost, cost
from kvshelf.model import loading as models
from kvshelf.workers.replica.scheduler import Scheduler, SchedulerLimits
from kvshelf_bench.engines import scheduled
from kvshelf_bench.measure import timed
from kvshelf_bench.peers.peer import Peer, ready_by, running
from kvshelf_bench.speed.subject import Subject, load_random_model

Ids = Sequence[int]

MOST_ANSWERS: Final = 16
"""Answers that a way gives together."""

_POLICY: Final = "full"
"""All entries stay, as with those that kvshelf is measured beside."""


class Way(Protocol):
    """What each kind of work costs. No token ends an answer."""

    def prefilled(self, document: Ids) -> Cost:
        """A document that was never seen before; questions are about the one that was prefilled last."""

    def answered(self, questions: Sequence[Ids], new_tokens: int) -> Cost:
        """Answers of so many tokens to questions that are all asked at once."""


@contextmanager
def own_ways(subject: Subject) -> Iterator[dict[str, Way]]:
    """Those that need no other program, by name, the replica last."""
    limits = SchedulerLimits(max_open=MOST_ANSWERS, max_waiting=MOST_ANSWERS)
    with scheduled(subject.engine, limits) as scheduler:
        yield {
            "transformers": PlainTransformers(subject),
            "Engine.load": OneEngine(subject),
            "replica": Replicas(subject, scheduler),
        }


class PlainTransformers:
    """The model as transformers loads it, with its own attention and cache."""

    def __init__(self, subject: Subject) -> None:
        self._device = subject.device
        self._model: PreTrainedModel
        if subject.engine.text is None:
            self._model = load_random_model(Path(subject.source), subject.device, subject.dtype)
        else:
            self._model, _ = models.load(subject.source, device=str(subject.device), dtype=subject.dtype)
        self._cache = DynamicCache(config=self._model.config)

    def prefilled(self, document: Ids) -> Cost:
        self._cache = cache = DynamicCache(config=self._model.config)
        return self._timed(lambda: self._pass(torch.tensor([document]), cache))

    def answered(self, questions: Sequence[Ids], new_tokens: int) -> Cost:
        cache = copy.deepcopy(self._cache)  # an answer writes to the cache that it is given
        return self._timed(lambda: self._answer(cache, torch.tensor(questions), new_tokens))

    def _timed(self, run: Callable[[], object]) -> Cost:
        with torch.no_grad():
            return cost(run, self._device)

    def _answer(self, cache: DynamicCache, questions: Tensor, new_tokens: int) -> None:
        if len(questions) > 1:
            cache.batch_repeat_interleave(len(questions))
        chosen = self._pass(questions, cache)
        for _ in range(new_tokens - 1):
            chosen = self._pass(chosen, cache)

    def _pass(self, ids: Tensor, cache: DynamicCache) -> Tensor:
        out = self._model(ids.to(self._device), use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
        chosen: Tensor = out.logits[:, -1:].argmax(-1)
        return chosen


class OneEngine:
    """`Engine.load`, as a program uses it."""

    def __init__(self, subject: Subject) -> None:
        self._engine, self._device = subject.engine, subject.device
        self._cache: CompressedCache | None = None

    def prefilled(self, document: Ids) -> Cost:
        self._cache, spent = timed(partial(self._compress, document), self._device)
        return spent

    def answered(self, questions: Sequence[Ids], new_tokens: int) -> Cost:
        assert self._cache is not None, "a document was prefilled"
        answers, spent = timed(partial(self._answers, self._cache, questions, new_tokens), self._device)
        _require_whole(sum(len(answer.token_ids) for answer in answers), questions, new_tokens)
        return spent

    def _compress(self, document: Ids) -> CompressedCache:
        return self._engine.compress(document, policy=_POLICY)

    def _answers(self, cache: CompressedCache, questions: Sequence[Ids], new_tokens: int) -> Sequence[Answer]:
        return self._engine.answer_all([(cache, question) for question in questions], max_new_tokens=new_tokens)


@dataclass(frozen=True)
class _Compression:
    job: Job

    @property
    def num_tokens(self) -> int:
        return self.job.num_tokens

    def run(self, engine: Engine, *, checkpoint: Checkpoint) -> CompressedCache:
        return engine.run(self.job, checkpoint=checkpoint).cache


class Replicas(OneEngine):
    """The engine behind the scheduler of a replica, which interleaves documents and questions."""

    def __init__(self, subject: Subject, scheduler: Scheduler) -> None:
        super().__init__(subject)
        self._scheduler = scheduler

    def _compress(self, document: Ids) -> CompressedCache:
        job = self._engine.prepare(document, policy=_POLICY)
        return self._scheduler.compress(_Compression(job)).future.result()

    def _answers(self, cache: CompressedCache, questions: Sequence[Ids], new_tokens: int) -> Sequence[Answer]:
        sampling = Sampling(max_tokens=new_tokens)
        tickets = [self._scheduler.generate(cache, question, sampling) for question in questions]
        return [ticket.future.result() for ticket in tickets]


class OfPeer:
    """A program that is given prompts whole, and takes what they have in common with earlier ones from its cache."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._document: list[int] = []

    def prefilled(self, document: Ids) -> Cost:
        self._document = [*document]
        return self._answer_whole([self._document], 1)

    def answered(self, questions: Sequence[Ids], new_tokens: int) -> Cost:
        return self._answer_whole([[*self._document, *question] for question in questions], new_tokens)

    def _answer_whole(self, prompts: Sequence[Ids], new_tokens: int) -> Cost:
        answer = self._peer.ask(prompts=prompts, new_tokens=new_tokens)
        _require_whole(answer["tokens"], prompts, new_tokens)
        return Cost(answer["seconds"], answer["wall_s"])


def _require_whole(tokens: int, questions: Sequence[Ids], new_tokens: int) -> None:
    assert tokens == new_tokens * len(questions), "no token ends an answer"


def open_kvpress(interpreter: str | None, subject: Subject, threads: int) -> AbstractContextManager[Peer | None]:
    """kvpress with the model, dtype, device and threads of `subject`, under `interpreter`. See `kvpress_worker.py`.

    None means this interpreter if it has kvpress, whose pin of transformers seldom allows this, and otherwise no peer.
    Raises as `running`.
    """
    arguments = (subject.source, subject.dtype, str(subject.device), str(threads))
    return _opened(interpreter, "kvpress", "kvpress", arguments, "kvpress")


def open_vllm(
    interpreter: str | None, subject: Subject, threads: int, longest: int, ends: float
) -> AbstractContextManager[Peer | None]:
    """As `open_kvpress`, vLLM on a CPU, for up to `longest` tokens; no peer either where it is not ready when the
    monotonic clock says `ends`, because it compiles the model first. See `vllm_worker.py`."""
    arguments = (subject.source, subject.dtype, str(threads), str(longest))
    return _opened(interpreter, "vllm", "vllm", arguments, "vLLM", ends)


def open_llama(
    interpreter: str | None, subject: Subject, threads: int, longest: int, answers: int
) -> AbstractContextManager[Peer | None]:
    """As `open_kvpress`, llama.cpp on the CPU, for up to `longest` tokens and `answers` at once; no peer for a model
    that is no GGUF file. See `llama_worker.py`."""
    if subject.gguf is None:
        return nullcontext()
    arguments = (subject.gguf, str(threads), str(longest), str(answers))
    return _opened(interpreter, "llama_cpp", "llama", arguments, "llama.cpp")


def _opened(
    interpreter: str | None, package: str, worker: str, arguments: Sequence[str], name: str, ends: float | None = None
) -> AbstractContextManager[Peer | None]:
    if interpreter is None and find_spec(package) is not None:
        interpreter = sys.executable
    if interpreter is None:
        return nullcontext()
    if ends is None:
        return running(interpreter, worker, arguments, name)
    return ready_by(ends, interpreter, worker, arguments, name)
