"""The surprisal of each token of a document, for policies that need it (`Needs.SURPRISALS`) from the first layer on. As
it is known only at the end of a pass, the model reads the document once more, before the prefill."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.attention.function import Attended, ForwardContext, kvshelf_attention
from kvshelf.engine.forward.passes import Passes
from kvshelf.engine.inputs.job import Job, Parent
from kvshelf.engine.progress import Checkpoint
from kvshelf.engine.quality import rows_at_once
from kvshelf.methods.method import Needs
from kvshelf.methods.policies.view import DocumentView


@dataclass(frozen=True, eq=False)
class Surprise:
    """values: surprisals of a document's tokens, `[N]` fp32, in nats; None where no policy needs them. seconds: of the
    reading, without the turns of other work."""

    values: Tensor | None = None
    seconds: float = 0.0

    @classmethod
    def of(cls, passes: Passes, job: Job, checkpoint: Checkpoint, between_layers: Checkpoint | None = None) -> Surprise:
        """Of the document of a job. checkpoint: called between parts of its logits, and between layers unless
        `between_layers` is set; a document that is appended to a cache is read part by part."""
        started, turns = time.perf_counter(), _Turns(checkpoint, between_layers or checkpoint)
        ids, parent = torch.tensor(job.document.token_ids, device=passes.devices.inputs), job.parent
        with torch.no_grad(), kvshelf_attention(passes.model):
            logits = _read(passes, job, turns) if parent is None else _appended(passes, parent, ids, turns)
            values = surprisals(logits, ids)
        return cls(values, time.perf_counter() - started - turns.paused_s)

    def added_to(self, document: DocumentView) -> DocumentView:
        return document if self.values is None else replace(document, surprisals=self.values)


def surprises(job: Job) -> bool:
    """Whether the policy of a job has work and needs surprisals."""
    return Needs.SURPRISALS in job.policy.needs and job.policy.has_work(job.budget, job.num_tokens)


def surprisals(logits: Iterable[Tensor], token_ids: Tensor) -> Tensor:
    """-log p of each token, `[N]` fp32, from the logits of each token but the last, in order and in parts `[n,
    vocabulary]`. Nothing predicts the first token, which has the largest value of the others."""
    values, first = torch.zeros(len(token_ids), device=token_ids.device), 1
    for part in logits:
        rows, end = part.float(), first + len(part)
        ids = token_ids[first:end, None].to(rows.device)  # a head may be on another device than the embedding
        values[first:end] = rows.logsumexp(dim=-1) - rows.gather(-1, ids)[:, 0]
        first = end
    values[0] = values.max()
    return values


class _Turns(ForwardContext):
    """Gives other work a turn after each layer, and after each part of the logits."""

    def __init__(self, checkpoint: Checkpoint, between_layers: Checkpoint) -> None:
        self.paused_s = 0.0
        self._checkpoint = checkpoint
        self._between_layers = between_layers

    def after_attention(self, layer: Attended) -> None:  # noqa: ARG002
        self._take(self._between_layers)

    def after_part(self) -> None:
        self._take(self._checkpoint)

    def _take(self, turn: Checkpoint) -> None:
        started = time.perf_counter()
        turn()
        self.paused_s += time.perf_counter() - started


def _read(passes: Passes, job: Job, turns: _Turns) -> Iterator[Tensor]:
    """Logits of a document from its beginning: of as many tokens at a time as quality has in memory."""
    device = passes.devices.inputs
    logits = passes.causal(replace(job, passes=()).inputs(device), turns, logits=True)
    assert logits is not None
    for rows in torch.split(torch.arange(job.num_tokens - 1, device=device), rows_at_once(passes.model)):
        if len(rows):
            yield logits(rows)[0]
            turns.after_part()


def _appended(passes: Passes, parent: Parent, token_ids: Tensor, turns: _Turns) -> Iterator[Tensor]:
    """Logits of tokens that continue a stored cache."""
    past = passes.attached(parent.document)
    with past.begun_by(passes.model.base_model):
        for rows in torch.split(token_ids[None, :-1], rows_at_once(passes.model), dim=1):
            for piece in past.pieces(rows) if rows.shape[1] else ():
                yield passes.model(piece, **{CACHE_ARGUMENT: past}).logits[0]
            turns.after_part()
