"""The open answers of one model, whose passes llama.cpp computes."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from kvshelf.api.answers import Piece
from kvshelf.engine.attachments import Attachments
from kvshelf.engine.attention.attachment import Attachment, Wait, block
from kvshelf.engine.decode.batch import MAX_NEW_TOKENS, DecodeBatch
from kvshelf.engine.decode.generation import Generation
from kvshelf.engine.decode.hooks import NOT_COMPLETE, NOTHING_SHOWN
from kvshelf.engine.decode.slots.choices import Choices
from kvshelf.engine.files import llamacpp
from kvshelf.engine.forward.passes import Passes
from kvshelf.engine.llama.sequences import SequenceRun, Sequences
from kvshelf.engine.progress import Checkpoint, nothing
from kvshelf.errors import InvalidRequest, KvshelfError, PolicyUnsupported


class _AnswerPlace(NamedTuple):
    """The sequence of an answer. document: the number of the attachment whose cells it shares."""

    sequence: int
    document: int


class LlamaBatch(DecodeBatch):
    """A batch whose passes llama.cpp computes: each answer is a sequence that shares the cells of its document.

    Documents stay in llama.cpp's memory until their room is wanted, or their cache is nobody's any more. An answer for
    which there is no room waits for that of the others.
    """

    def __init__(self, passes: Passes, attachments: Attachments, sequences: Sequences) -> None:
        super().__init__(passes)
        self._attachments = attachments
        self._sequences = sequences
        self._type: str = passes.facts.model.config.model_type
        self._documents: dict[int, int] = {}
        """Sequences by the number of the attachment, those used last at the end."""
        self._gone: deque[int] = deque()
        """Numbers of attachments that nobody has any more. Any thread adds to it."""
        self._answers: dict[Generation, _AnswerPlace] = {}
        weakref.finalize(self, _drop_all, sequences, self._documents, self._answers).atexit = False

    def step(
        self, generations: Sequence[Generation], checkpoint: Checkpoint | None = None, wait: Wait = block
    ) -> list[Piece | Exception]:
        """See `DecodeBatch.step`. The checkpoint is called before the pass alone: nobody can leave one of llama.cpp's.
        The tokens of a turn that is kept run as those of a document do: what is stored is kvshelf's own. Answers are
        placed in the order given: behind the first that waits for room, nobody is."""
        for generation in generations:
            if not generation.document.arrived:
                for part in generation.document.parts:
                    part.layers(wait)
        (checkpoint or nothing)()
        self._drop_gone()
        outcomes: dict[int, Piece | Exception] = {}
        placed: list[tuple[Generation, int]] = []
        full = False
        answering = [generation for generation in generations if not generation.closing]
        for generation in answering:
            try:
                if (place := self._place(generation, full=full)) is not None:
                    placed.append((generation, place.sequence))
                full = full or place is None
            except Exception as error:  # one answer's error is that answer's, whatever it is
                outcomes[id(generation)] = error
        outcomes |= self._run(_runs(placed))
        closing = [generation for generation in generations if generation.closing]
        for generation in closing:
            try:
                outcomes[id(generation)] = self._close(generation, checkpoint)
            except Exception as error:  # as above
                outcomes[id(generation)] = error
        return [outcomes.get(id(generation), Piece("")) for generation in generations]

    def keep(self, generation: Generation) -> None:
        try:
            while generation.row.slab is None or generation.pending:
                if isinstance(outcome := self._close(generation), Exception):
                    raise outcome
        except KvshelfError as error:
            generation.turn = error
        else:
            super().keep(generation)

    def leave(self, generation: Generation) -> None:
        self._forget(generation)
        self._drop_gone()
        super().leave(generation)

    def _run(self, runs: Sequence[tuple[Generation, SequenceRun]]) -> dict[int, Piece | Exception]:
        if not runs:
            return {}
        passed = self._sequences.run([run for _, run in runs])
        asking, logits = [], []
        for (generation, run), last in zip(runs, passed, strict=True):
            complete = len(run.token_ids) == len(generation.pending)
            generation.ran(len(run.token_ids), NOTHING_SHOWN if complete else NOT_COMPLETE)
            if complete:
                asking.append(generation)
                logits.append(last)
        if not asking:
            return {}
        choices, outcomes = Choices.of(torch.cat(logits), asking), dict[int, Piece | Exception]()
        for row, generation in enumerate(asking):
            try:
                outcomes[id(generation)] = choices.take(generation, row)
            except Exception as error:  # as in `step`
                outcomes[id(generation)] = error
            if generation.finished:
                self._forget(generation)  # its caller may leave late, and others wait for the room
        return outcomes

    def _close(self, generation: Generation, checkpoint: Checkpoint | None = None) -> Piece | Exception:
        """Run the tokens of a turn by kvshelf's own passes. Raises `ModelMismatch` behind a cache of a linked model: a
        cache is of one model from its first token to its last."""
        self._attachments.readable.require_own(generation.document.identity.model)
        self._forget(generation)
        if generation.row.slab is None:
            generation.row.logical = generation.row.stored = 0
            generation.pending = list(generation.turn_ids)
        return super().step([generation], checkpoint)[0]

    def _place(self, generation: Generation, *, full: bool) -> _AnswerPlace | None:
        """The sequence of an answer; None while others have its room. full: whether one before it waits. Raises
        `InvalidRequest` for one that there will never be room for."""
        place = self._answers.get(generation)
        if place is None:
            (document,) = generation.document.parts
            first = document.layers()[0]
            entries = first.entries // first.kv_heads  # as many as in any other head, or `_load` refuses the cache
            needed = len(generation.pending) + generation.room
            if entries + needed > self._sequences.cells:
                raise InvalidRequest(
                    f"the cache has {entries} entries, and question and answer up to {needed} more; llama.cpp has room "
                    f"for {self._sequences.cells} (half of --resident-bytes). Ask for fewer tokens",
                    param="max_tokens",
                )
            loaded = self._documents.get(document.number)
            if full or not self._make_room(document.number, needed + (entries if loaded is None else 0)):
                return None
            sequence = self._load(document) if loaded is None else loaded
            self._documents.pop(document.number, None)
            self._documents[document.number] = sequence  # at the end
            place = _AnswerPlace(self._sequences.fork(sequence, needed), document.number)
            self._answers[generation] = place
        return place

    def _make_room(self, number: int, cells: int) -> bool:
        """Whether there is room for so many cells, once documents that nobody asks have gone: the fewest, those first
        that were used longest ago, and none where all would not do. number: of the document that is asked."""
        in_use = {place.document for place in self._answers.values()} | {number}
        idle = [other for other in self._documents if other not in in_use]
        for count in range(len(idle) + 1):
            if self._sequences.has_room(cells, without=[self._documents[other] for other in idle[:count]]):
                for other in idle[:count]:
                    self._sequences.drop(self._documents.pop(other))
                return True
        return False

    def _drop_gone(self) -> None:
        while self._gone:
            if (sequence := self._documents.pop(self._gone.popleft(), None)) is not None:
                self._sequences.drop(sequence)

    def _load(self, document: Attachment) -> int:
        cache = document.decoded()
        try:
            layers = llamacpp.half_layers(self._attachments.exported(cache, "absolute"))
        except (PolicyUnsupported, InvalidRequest) as error:  # they name parameters of an export
            raise PolicyUnsupported(
                f"llama.cpp cannot answer from this cache: {error.message}; ask a service with kvshelf's own engine",
                param="cache_id",
            ) from error
        entries = layers[0][0].shape[1]
        state = llamacpp.state_of(layers, self._type, first=cache.next_position - entries)
        sequence = self._sequences.load(state, entries)
        weakref.finalize(document, self._gone.append, document.number).atexit = False
        return sequence

    def _forget(self, generation: Generation) -> None:
        if (place := self._answers.pop(generation, None)) is not None:
            self._sequences.drop(place.sequence)


def _runs(placed: Sequence[tuple[Generation, int]]) -> list[tuple[Generation, SequenceRun]]:
    """What each answer runs in one pass: the shortest questions first, each a token at least."""
    runs, room = [], MAX_NEW_TOKENS
    for generation, sequence in sorted(placed, key=lambda answer: len(answer[0].pending)):
        count = min(len(generation.pending), max(1, room))
        room -= count
        runs.append((generation, SequenceRun(sequence, generation.next_position, generation.pending[:count])))
    return runs


def _drop_all(sequences: Sequences, documents: Mapping[int, int], answers: Mapping[Generation, _AnswerPlace]) -> None:
    for number in (*documents.values(), *(place.sequence for place in answers.values())):
        sequences.drop(number)
