"""The engine of rank 0: what an `Engine` does, done by several processes that share the heads of one model."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from kvshelf.api.answers import Piece
from kvshelf.engine.asker import Asker
from kvshelf.engine.attention.attachment import Attachment, Wait, block
from kvshelf.engine.compressor import Compressor
from kvshelf.engine.decode.batch import DecodeBatch
from kvshelf.engine.decode.generation import Generation
from kvshelf.engine.engine import Engine
from kvshelf.engine.forward.passes import Passes
from kvshelf.engine.inputs.job import Job, Level
from kvshelf.engine.parallel.leading import LeadingRank
from kvshelf.engine.parallel.operations import AnswerStep, AskCues, Compress, Score, Step
from kvshelf.engine.prefill.prefill import Prefill
from kvshelf.engine.progress import Checkpoint, Progress, nothing
from kvshelf.engine.quality import Probe
from kvshelf.errors import InvalidRequest
from kvshelf.model import loading as models
from kvshelf.model.prepacking import prepack

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _SharedBatch(DecodeBatch):
    def __init__(self, passes: Passes) -> None:
        super().__init__(passes)
        self._lead = _lead(passes)
        self._answers: WeakKeyDictionary[Generation, int] = WeakKeyDictionary()

    def step(
        self, generations: Sequence[Generation], checkpoint: Checkpoint | None = None, wait: Wait = block
    ) -> list[Piece | Exception]:
        """See `DecodeBatch.step`. The checkpoint is called only before the pass, and documents have arrived whole: no
        rank can leave a pass that the others are in."""
        if self._one_by_one and len(generations) > 1:
            return super().step(generations, checkpoint, wait)
        (checkpoint or nothing)()
        documents = {part.number: part for generation in generations for part in generation.document.parts}
        for document in documents.values():
            self._lead.share(document, self._passes.facts.kv_heads, wait)
        with self._lead.together(Step([self._answer_step(generation) for generation in generations])):
            return super().step(generations)

    def leave(self, generation: Generation) -> None:
        super().leave(generation)
        if (number := self._answers.get(generation)) is not None:
            self._lead.leave(number)

    def _answer_step(self, generation: Generation) -> AnswerStep:
        number = self._answers.get(generation)
        if number is None:
            number = self._answers[generation] = next(self._lead.numbers)
            weakref.finalize(generation, self._lead.leave, number)
        return AnswerStep(number, generation.document.number, list(generation.pending), generation.row.stored)


class _SharedAsker(Asker):
    def batch(self) -> DecodeBatch:
        return _SharedBatch(self._passes)


class _SharedCompressor(Compressor):
    def prefill(
        self,
        group: Sequence[Level],
        *,
        cues: int = 0,
        checkpoint: Checkpoint | None = None,
        progress: Progress | None = None,
    ) -> Prefill:
        jobs, lead = list({id(level.job): level.job for level in group}.values()), _lead(self._passes)
        with lead.together(Compress(jobs, cues)):
            pause = lead.shared(checkpoint or nothing)
            return super().prefill(group, cues=cues, checkpoint=pause, progress=progress)

    def scores(self, job: Job, *, checkpoint: Checkpoint | None = None) -> list[Tensor]:
        self._require_scores(job)
        lead = _lead(self._passes)
        with lead.together(Score(job)):
            return super().scores(job, checkpoint=lead.shared(checkpoint or nothing))

    @contextmanager
    def _answering(self, document: Attachment, probe: Probe) -> Iterator[Iterator[Tensor]]:
        lead = _lead(self._passes)
        lead.share(document, self._facts.kv_heads)
        with lead.together(AskCues(document.number, probe)), super()._answering(document, probe) as logits:
            yield logits


class ParallelEngine(Engine):
    """One model on several devices: each process of a group has some of its heads (tensor parallel).

    A cache is the same as that of one process, but for last bits of sums, and so is its identity. This process is rank
    0: it decides, encodes, and chooses tokens. `close` ends the others; so does the end of this process.
    """

    _compressor: ClassVar = _SharedCompressor
    _asker: ClassVar = _SharedAsker

    def __init__(self, model: PreTrainedModel, tokenizer: Any, *, name: str, lead: LeadingRank) -> None:
        """model: loaded by `loading.load` with as many ranks as `lead` has, at the same time as by the others."""
        super().__init__(model, tokenizer, name=name, ranks=lead)
        self.lead = lead
        self.passes.layer_shapes  # noqa: B018 - measured here, where the other ranks measure theirs
        prepack(model)
        lead.begin(self.text)

    @classmethod
    def load(
        cls,
        name: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        progress: bool = False,
        ranks: int = 2,
        shown: str | None = None,
        chat_template: str | None = None,
        weights: str = "plain",
    ) -> ParallelEngine:
        """As `Engine.load`, by this process and `ranks` - 1 others that it starts, each on a GPU of its own, or all on
        the CPU. shown: the engine's name, where it is another than the model's. A process can have one such engine at a
        time. Raises `InvalidRequest` and `PolicyUnsupported` before the others start where the model cannot be shared
        by so many, as with weights in int8."""
        models.require_shared(name, ranks, device, weights)
        if dist.is_initialized():
            raise InvalidRequest(
                "this process is in a group of torch.distributed already, as with another ParallelEngine; close that "
                "one",
                param="ranks",
            )
        lead = LeadingRank.started(name, device=device, dtype=dtype, size=ranks)
        try:
            model, tokenizer = models.load(
                name, device=device, dtype=dtype, progress=progress, ranks=ranks, chat_template=chat_template
            )
            return cls(model, tokenizer, name=shown or name, lead=lead)
        except BaseException:
            lead.close()
            raise

    def close(self) -> None:
        """End the other processes. The engine can do nothing more."""
        self.lead.close()


def _lead(passes: Passes) -> LeadingRank:
    assert isinstance(passes.ranks, LeadingRank)
    return passes.ranks
