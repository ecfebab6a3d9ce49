"""A rank other than 0: runs the operations of rank 0 with its own heads. `LeadingRank.started` starts its process.

It ends when rank 0 ends, when it fails where the others do not, and when rank 0 closes the pipe.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar, Final

import torch

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.records import LayerRecord
from kvshelf.engine.attention.attachment import Attachment
from kvshelf.engine.coders import Coders
from kvshelf.engine.decode.generation import AnswerReads, AnswerTokens, Generation, Sampling
from kvshelf.engine.engine import Engine
from kvshelf.engine.inputs.job import Level
from kvshelf.engine.parallel import operations
from kvshelf.engine.quality import ask
from kvshelf.engine.ranks import SharedModel, join_group, sent
from kvshelf.errors import Cancelled, InternalError
from kvshelf.model import loading as models
from kvshelf.model.prepacking import prepack

SETTLE_S: Final = 8.0
"""How long a failed rank waits for `Signal.SETTLED`. Where none comes, rank 0 is inside the operation and waits for
this rank in vain: then this rank ends, which rank 0 notices."""

_UNBOUNDED: Final = 1 << 40


@dataclass(frozen=True)
class Start:
    """How to load the model. The arguments are those of `loading.load`."""

    name: str
    device: str
    dtype: str
    rank: int
    size: int
    threads: int
    meeting: Path


class FollowingRank(SharedModel):
    """This process, which sends its reduced layers to rank 0."""

    def __init__(self, start: Start, channel: operations.Channel) -> None:
        super().__init__(start.rank, start.size)
        self._channel = channel

    def joined(self, layers: Sequence[LayerRecord]) -> tuple[LayerRecord, ...]:
        for layer in layers:
            self._channel.send(sent(layer))
        return tuple(layers)


class _NoCoders(Coders):
    """The coders of a rank that encodes no cache, because it has only some heads of each."""

    def encoded(self, cache: CompressedCache, codec: str) -> CompressedCache:  # noqa: ARG002
        return cache


class _OwnHeads(Engine):
    _coders: ClassVar = _NoCoders


class Follower:
    """Runs operations of one engine until the pipe closes."""

    def __init__(self, engine: Engine, channel: operations.Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._batch = engine.batch()
        self._documents: dict[int, Attachment] = {}
        self._answers: dict[int, Generation] = {}

    def serve(self) -> None:
        """Returns when rank 0 has ended."""
        self._channel.text = self._engine.text
        self._channel.send(operations.Signal.DONE)
        while True:
            message = self._channel.receive()
            assert isinstance(message, operations.Request), message
            self._run(message)

    def _run(self, request: operations.Request) -> None:
        for number in request.left:
            if (answer := self._answers.pop(number, None)) is not None:
                self._batch.leave(answer)
        for number in request.dropped:
            self._documents.pop(number, None)
        try:
            self._do(request.operation)
        except Exception as error:
            self._channel.send(operations.Failed.of(error))
            if not self._channel.pipe.poll(SETTLE_S):
                raise  # the others wait for this rank inside the operation
            settled = self._channel.receive()
            assert settled is operations.Signal.SETTLED, settled
        else:
            self._channel.send(operations.Signal.DONE)

    def _do(self, operation: operations.Operation) -> None:
        match operation:
            case operations.Compress(jobs, cues):
                self._engine.compressor.prefill([Level(job) for job in jobs], cues=cues, checkpoint=self._pause)
            case operations.Score(job):
                self._engine.compressor.scores(job, checkpoint=self._pause)
            case operations.Attach(number, cache):
                engine = self._engine
                document = Attachment(cache, engine.passes.devices.layers, engine.facts.rotate, number=number)
                self._documents[number] = document
            case operations.AskCues(number, probe):
                with torch.no_grad(), self._engine.attachments.passing(self._documents[number]) as past:
                    for _ in ask(self._engine.model, probe, past):
                        pass  # the first rank reads the logits
            case operations.Step(answers):
                self._batch.step([self._continued(step) for step in answers])

    def _continued(self, step: operations.AnswerStep) -> Generation:
        """The answer with the tokens of rank 0: this rank chooses none."""
        answer = self._answers.get(step.number)
        if answer is None:
            answer = self._answers[step.number] = Generation(
                self._documents[step.document],
                (),
                Sampling(max_tokens=_UNBOUNDED),
                self._engine.equivalents,
                tokens=AnswerTokens(),
                reads=AnswerReads(),
            )
        answer.pending = list(step.pending)
        if answer.row.stored != step.length:
            raise InternalError(f"an answer has {answer.row.stored} tokens here, and {step.length} on rank 0")
        return answer

    def _pause(self) -> None:
        """A checkpoint: run the requests of rank 0 until it goes on."""
        while (message := self._channel.receive()) is not operations.Signal.GO_ON:
            if message is operations.Signal.GIVE_UP:
                raise Cancelled("rank 0 gave the document up")
            assert isinstance(message, operations.Request), message
            self._run(message)


def main(descriptor: int) -> None:
    """Run this process. descriptor: of the pipe to rank 0."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    channel = operations.Channel(Connection(descriptor))
    start: Start = channel.receive()
    torch.set_num_threads(start.threads)
    channel.send(operations.Signal.DONE)
    channel.receive()  # all have started: from here on each waits for the others
    join_group(start.rank, start.size, start.meeting)
    try:
        model, tokenizer = models.load(start.name, device=start.device, dtype=start.dtype, ranks=start.size)
        engine = _OwnHeads(model, tokenizer, name=start.name, ranks=FollowingRank(start, channel))
        engine.passes.layer_shapes  # noqa: B018 - measured here, where rank 0 measures its own
        prepack(model)
        follower = Follower(engine, channel)
    except Exception as error:
        channel.send(operations.Failed.of(error))
        raise
    try:
        follower.serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # rank 0 has ended; a thread in a collective operation would wait for it for ever


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
