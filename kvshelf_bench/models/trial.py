"""One model type tried: what a small model of it says behind a stored document, and what it says without kvshelf."""

from __future__ import annotations

import re
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from transformers.utils import logging

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.engine import Engine
from kvshelf.errors import PolicyUnsupported
from kvshelf.model.loading import of_text
from kvshelf_bench.models.small import NotBuilt, small_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXACT, WRONG, REFUSED, ERROR, NOT_BUILT = "exact", "wrong", "refused", "error", "not built"
WHAT: Final = (EXACT, REFUSED, WRONG, ERROR, NOT_BUILT)

_LIMIT: Final = 1e-4
"""Largest difference of logits, relative to the largest of them, that rounding explains."""

TELLING: Final = 10 * _LIMIT
"""Smallest such difference between two documents at which a comparison says something."""

_DOCUMENT, _QUESTION, _ANSWER = 100, 9, 40
"""Tokens: the document, what is read behind it in one call, and what is read then one token at a time."""

_MOST_CHARACTERS: Final = 120
"""Characters of an error's message that are shown."""


@dataclass(frozen=True)
class TrialOutcome:
    """What became of a model type. why: for `refused`, `error` and `not built`, in a few words. difference: of logits,
    relative to the largest; None where there were none to compare."""

    model_type: str
    what: str
    why: str = ""
    difference: float | None = None


def tried(model_type: str, limit_s: float) -> TrialOutcome:
    """The outcome of a type. Whatever is raised is an outcome; so is a model that takes longer than `limit_s`."""
    with _quiet():
        try:
            with time_limit(limit_s):
                model = small_model(model_type)
                plain = _PlainReading.of(model)
        except Exception as error:  # whatever a configuration or a model raises
            return TrialOutcome(model_type, NOT_BUILT, _few_words(error))
        try:
            with time_limit(limit_s):
                difference = _difference(Engine(of_text(model, model_type), name=model_type), plain)
        except PolicyUnsupported as error:
            return TrialOutcome(model_type, REFUSED, _reason(error, (type(model).__name__, model.config.model_type)))
        except Exception as error:  # what this bench is here to find, also other errors of kvshelf: the caller is right
            return TrialOutcome(model_type, ERROR, _few_words(error))
    return TrialOutcome(model_type, EXACT if difference < _LIMIT else WRONG, difference=difference)


def _ids(count: int, seed: int) -> list[int]:
    return torch.randint(5, 500, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass(frozen=True, eq=False)
class _PlainReading:
    """A document, what is asked behind it, and the logits of these tokens without kvshelf, `[tokens, vocabulary]`."""

    document: list[int]
    following: list[int]
    logits: Tensor

    @classmethod
    def of(cls, model: PreTrainedModel) -> _PlainReading:
        """Raises `NotBuilt` where the logits are the same behind another document: they would show nothing."""
        document, following = _ids(_DOCUMENT, 1), _ids(_QUESTION + _ANSWER, 2)
        logits, other_logits = (_read(model, ids, following) for ids in (document, _ids(_DOCUMENT, 3)))
        if not _relative(other_logits, logits) > TELLING:
            raise NotBuilt("its small model says the same behind every document")
        return cls(document, following, logits)


def _read(model: PreTrainedModel, document: list[int], following: list[int]) -> Tensor:
    """Logits of the tokens behind a document that is read with them."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([document + following]), use_cache=False).logits
    return logits[0, len(document) :]


def _relative(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).abs().max() / expected.abs().max())


def _difference(engine: Engine, plain: _PlainReading) -> float:
    """How far what the model says behind the stored document is from what it says itself: the larger of both ways."""
    stored = CompressedCache.from_bytes(engine.compress(plain.document, policy="full").to_bytes())
    return max(
        _relative(_logits(engine, stored, plain.following), plain.logits), _answers_differ(engine, stored, plain)
    )


def _logits(engine: Engine, cache: CompressedCache, following: list[int]) -> Tensor:
    """Logits of a question in one call where the model takes it so, and of further tokens one at a time."""
    parts = torch.split(torch.tensor([following]), [_QUESTION] + [1] * _ANSWER, dim=1)
    with torch.no_grad(), engine.attached(cache) as past:
        pieces = [piece for part in parts for piece in past.pieces(part)]
        return torch.cat([engine.model(input_ids=piece, **{CACHE_ARGUMENT: past}).logits[0] for piece in pieces])


def _answers_differ(engine: Engine, cache: CompressedCache, plain: _PlainReading) -> float:
    """By how much the tokens that two answers of one batch are made of miss the best ones, as `_relative`."""
    questions = [plain.following[:_QUESTION], plain.following[_QUESTION:]]
    answers = engine.answer_all([(cache, question) for question in questions], max_new_tokens=4)
    missed = [0.0]
    for question, answer in zip(questions, answers, strict=True):
        logits = _read(engine.model, plain.document, question + answer.token_ids)[len(question) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        missed += ((logits.max(dim=1).values - chosen) / logits.abs().max()).tolist()
    return max(missed)


def _reason(error: PolicyUnsupported, names: tuple[str, ...]) -> str:
    """The part of a refusal that says what the model has, without its name and without what kvshelf makes of it."""
    message = error.message
    for name in names:
        message = message.removeprefix(name).strip()
    return re.split(r"; |, (?:which|so|as|and kvshelf) ", message)[0]


def _few_words(error: Exception) -> str:
    """The line of its message that says what is wrong. Errors of validators begin with the validator's name."""
    lines = str(error).strip().splitlines() or [""]
    line = lines[-1].strip() if "validator" in lines[0] else lines[0]
    words = line if isinstance(error, NotBuilt) else f"{type(error).__name__}: {line}"
    return words if len(words) <= _MOST_CHARACTERS else words[: _MOST_CHARACTERS - 4] + " ..."


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside the block transformers warns of nothing: odd fields and slow paths of small models are no news."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in the block after this time. In the main thread only; another timer goes on afterwards."""

    def late(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"it takes longer than {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, late)
    remaining_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, remaining_s)
        signal.signal(signal.SIGALRM, handler)
