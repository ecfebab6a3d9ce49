"""Whether llama.cpp answers from the caches of other weights as these do: what a link of two models says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.engine import Engine
from kvshelf.engine.files import llamacpp
from kvshelf.engine.inputs.encode import Prompt
from kvshelf.engine.llama.engine import LlamaEngine
from kvshelf.engine.llama.sequences import SequenceRun, Sequences
from kvshelf.engine.quality import ANSWER, LEAST, Probe, bounds
from kvshelf.errors import InvalidRequest, ModelMismatch

CUES_OF_A_DOCUMENT: Final = 48
"""Several documents say more than many cues of one."""

_QUESTION: Final = "What does it say?"

_QUESTIONS: Final[tuple[Prompt, ...]] = (
    _QUESTION,
    [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": "It says much."},
        {"role": "user", "content": "What else?"},
    ],
)


class Agreement(NamedTuple):
    """Over all documents. share: of the cues that count. low: its bound, as of `engine.quality`."""

    share: float
    low: float
    cues: int
    documents: int


@dataclass(frozen=True)
class CueAsker:
    """Asks the cues of documents of the engine that makes their full caches, `maker`, and of llama.cpp behind the same
    caches. Cues that the document does not decide count for neither."""

    maker: Engine
    asker: LlamaEngine

    def agreement(self, texts: Sequence[str]) -> Agreement:
        """Raises `ModelMismatch` where the two read a text as other tokens or have layers of other shapes, and
        `InvalidRequest` where the documents decide too few cues for a figure."""
        self._require_room(texts)
        agreed = [agrees for text in texts for agrees in self._of(text)]
        if len(agreed) < LEAST:
            raise InvalidRequest(
                f"the {len(texts)} documents decide {len(agreed)} cues, and a figure takes {LEAST}; give more, or "
                "longer ones",
                param="--document",
            )
        low, _ = bounds(sum(agreed), len(agreed))
        return Agreement(sum(agreed) / len(agreed), low, len(agreed), len(texts))

    def _require_room(self, texts: Sequence[str]) -> None:
        """Half of the asker's room is for a document, the other for a cue, which is a sentence or two."""
        most = self.asker.sequences.cells // 2
        for text in texts:
            if (tokens := len(self.maker.encode_document(text).token_ids)) > most:
                raise InvalidRequest(f"a document has {tokens} tokens, and {most} may be; cut it", param="--document")

    def _of(self, text: str) -> Iterator[bool]:
        job = self.maker.prepare(text, policy="full")
        cache = self.maker.run(job).cache
        self._require_alike(text, cache)
        reference = self.maker.compressor.reference(job, cache, cues=CUES_OF_A_DOCUMENT)
        if reference is None or not reference.probe.places:
            return
        logits = self._answers(cache, reference.probe)
        for answer in reference.answered(range(len(reference.probe.places)), logits):
            yield answer.agreed

    def _require_alike(self, text: str, cache: CompressedCache) -> None:
        engines = self.asker, self.maker
        documents = [engine.encode_document(text).token_ids for engine in engines]
        questions = [[engine.encode_query(cache, question) for question in _QUESTIONS] for engine in engines]
        if documents[0] != documents[1] or questions[0] != questions[1]:
            raise ModelMismatch(
                f"{self.asker.name!r} writes a document or a question as other tokens than {self.maker.name!r}: their "
                "tokenizers or chat templates differ",
                field="tokenizer" if documents[0] != documents[1] else "template",
            )
        for asking, making in zip_longest(self.asker.passes.layer_shapes, self.maker.passes.layer_shapes):
            if asking is None or making is None or asking._replace(dtype=making.dtype) != making:
                raise ModelMismatch(
                    f"{self.asker.name!r} has other layers than {self.maker.name!r}: {asking} against {making}",
                    field="attention",
                )

    def _answers(self, cache: CompressedCache, probe: Probe) -> Iterator[Tensor]:
        """Logits `[T, vocabulary]` of each cue, by llama.cpp."""
        sequences: Sequences = self.asker.sequences
        layers = llamacpp.half_layers(self.maker.export(cache, positions="absolute"))
        entries = layers[0][0].shape[1]
        state = llamacpp.state_of(layers, self.asker.model.config.model_type, first=cache.next_position - entries)
        document = sequences.load(state, entries)
        try:
            for cue in probe.passes:
                number = sequences.fork(document, len(cue.token_ids))
                (logits,) = sequences.run([SequenceRun(number, cache.next_position, cue.token_ids, ANSWER)])
                sequences.drop(number)
                yield logits.to(self.maker.model.device, torch.float32)
        finally:
            sequences.drop(document)
