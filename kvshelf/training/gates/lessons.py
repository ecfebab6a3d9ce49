"""Lessons of gates: a document, and what a model attends to while it repeats it or answers from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kvshelf.engine.inputs.job import Job
from kvshelf.kernels.window_scores import window_attention
from kvshelf.methods.policies.kvzip import KVzip
from kvshelf.methods.policies.snapkv import SnapKV
from kvshelf.methods.policies.view import LayerView, ProbePass
from kvshelf.training.observing import observe

if TYPE_CHECKING:
    from kvshelf.engine.engine import Engine

_LEAST = 1e-6  # smaller weights have the logarithm of this one


OWN_TOKENS: Final = 128
"""Most tokens of an answer that the model writes for itself."""


@dataclass(frozen=True)
class Lesson:
    """A document, and questions about it with their answers; none where the document alone teaches."""

    document: str
    questions: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, eq=False)
class Observed:
    """A lesson as the model reads it. passes: behind the document. answering: how many of the last rows of each
    write the answer."""

    job: Job
    passes: tuple[ProbePass, ...]
    answering: tuple[int, ...]

    def observe(self, engine: Engine, visit: Callable[[LayerView], None]) -> None:
        """One forward pass; `visit` sees each layer."""
        observe(engine, self.job, visit, self.passes)

    def weights(self, layer: LayerView, head: int) -> Tensor:
        """The weights that each row which writes an answer gives the document's tokens, in a softmax over the document
        and the pass: `[group, rows, N]` fp32, of one GQA group."""
        parts = []
        for probed, rows in zip(layer.probes, self.answering, strict=True):
            queries = layer.grouped(probed.queries)[head, :, -rows:]
            parts.append(window_attention(queries, layer.keys[head], layer.scaling, probed.keys[head]))
        return torch.cat(parts, dim=1)

    def importance(self, layer: LayerView) -> Tensor:
        """The largest of these weights, of any row and head of the group (Locret): `[kv_heads, N]` fp32."""
        return torch.stack([self.weights(layer, head).amax(dim=(0, 1)) for head in range(layer.kv_heads)])


def repeated(engine: Engine, lesson: Lesson) -> Observed:
    """The document, and KVzip's passes behind it."""
    job = engine.prepare(lesson.document, policy=KVzip.name)
    return Observed(job, job.passes, (0,) * len(job.passes))


def answered(engine: Engine, lesson: Lesson) -> Observed:
    """The document, and each question behind it with its answer."""
    text = engine.encoder.require_text("model")
    return _with_answers(engine, lesson, [text.encode(answer) for _, answer in lesson.questions])


def self_answered(engine: Engine, lesson: Lesson) -> Observed:
    """The document, and each question behind it with the model's own greedy answer from the full cache and its end."""
    cache = engine.compress(lesson.document, policy="full")
    questions = [(cache, question) for question, _ in lesson.questions]
    answers = engine.answer_all(questions, max_new_tokens=OWN_TOKENS)
    return _with_answers(engine, lesson, [answer.token_ids for answer in answers])


def _with_answers(engine: Engine, lesson: Lesson, answers: Sequence[Sequence[int]]) -> Observed:
    """answers: one for each question."""
    job = engine.prepare(
        lesson.document, policy=SnapKV.name, expected_questions=[question for question, _ in lesson.questions]
    )
    passes = tuple(
        replace(probe, token_ids=(*probe.token_ids, *answer[:-1]))
        for probe, answer in zip(job.passes, answers, strict=True)
    )
    return Observed(job, passes, tuple(map(len, answers)))


def logarithm(weights: Tensor) -> Tensor:
    """Of weights between 0 and 1: a gate has to tell small ones apart, and they lie orders of magnitude apart."""
    return weights.clamp_min(_LEAST).log()
