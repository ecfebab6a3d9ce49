"""Rank 0 and the processes that it starts: each operation of a shared model is run by all of them at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.heads import cut, joined
from kvshelf.artifact.records import LayerRecord
from kvshelf.engine.attention.attachment import Attachment, Wait, block
from kvshelf.engine.parallel.follower import SETTLE_S, Start
from kvshelf.engine.parallel.operations import Attach, Channel, Failed, Operation, Request, Signal
from kvshelf.engine.progress import Checkpoint
from kvshelf.engine.ranks import SharedModel, join_group, sent
from kvshelf.errors import WorkerCrashed
from kvshelf.model.text import TextFormat

OnLost = Callable[[WorkerCrashed], None]
"""Called on a thread of its own when a rank has ended, so that the engine can do nothing more."""

_START_S: Final = 120.0
"""Longest time from a rank's start until its imports are done."""

_ENDING_S: Final = 5.0
"""Longest wait for a process to end: its pipe fails a little before the process is seen to be dead."""


class _Rank:
    """One of the other processes, and the pipe to it. under_way: operations that it has not ended, nested. ending:
    whether this process ends it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.under_way = 0
        self.ending = False
        mine, theirs = Pipe()
        self.channel = Channel(mine)
        package = str(Path(__file__).parents[3])  # the folder that has kvshelf
        paths = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvshelf.engine.parallel.follower", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()

    def receive(self) -> Any:
        """The next message. Raises as `Channel.receive`."""
        message = self.channel.receive()
        if message is Signal.DONE or isinstance(message, Failed):
            self.under_way -= 1
        if isinstance(message, Failed):
            self.channel.send(Signal.SETTLED)
        return message

    @property
    def fate(self) -> str:
        """How the process ended, once it has, or after a moment."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_ENDING_S)
        code = self.process.poll()
        end = "still runs" if code is None else f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"rank {self.number} (process {self.process.pid}) {end}"


class LeadingRank(SharedModel):
    """This process, with the model's first heads. One thread uses it, that of the engine."""

    def __init__(self, name: str, ranks: Sequence[_Rank], folder: tempfile.TemporaryDirectory[str]) -> None:
        super().__init__(0, 1 + len(ranks))
        self._name = name
        self._ranks = ranks
        self._left: deque[int] = deque()
        self._dropped: deque[int] = deque()
        self._shared: set[int] = set()
        """The numbers of the documents that the other ranks have."""
        self.numbers = count()
        """The numbers of answers, of all batches together."""
        self.on_lost: OnLost | None = None
        self._threads = torch.get_num_threads()
        self._close = weakref.finalize(self, _end, ranks, folder)
        for rank in ranks:
            threading.Thread(target=self._watch, args=(weakref.ref(self), rank), daemon=True).start()

    @classmethod
    def started(cls, name: str, *, device: str, dtype: str, size: int) -> LeadingRank:
        """Start the other ranks, which load the model when this process does. Raises `WorkerCrashed`."""
        threads = torch.get_num_threads() if torch.cuda.is_available() else max(1, torch.get_num_threads() // size)
        folder = tempfile.TemporaryDirectory(prefix="kvshelf-ranks-")
        meeting = Path(folder.name) / "meeting"
        ranks = [_Rank(number) for number in range(1, size)]
        lead = cls(name, ranks, folder)
        for rank in ranks:
            rank.under_way += 1
            rank.channel.send(Start(name, device, dtype, rank.number, size, threads, meeting))
        torch.set_num_threads(threads)
        try:
            for rank in ranks:
                if not rank.channel.pipe.poll(_START_S):
                    raise WorkerCrashed(f"{name!r}: rank {rank.number} did not start within {_START_S:g} s")
                lead._receive(rank)
            for rank in ranks:
                rank.under_way += 1
                rank.channel.send(Signal.GO_ON)
            join_group(0, size, meeting)
        except BaseException:
            lead.close()
            raise
        return lead

    @property
    def pids(self) -> list[int]:
        """The process ids of the other ranks, in order."""
        return [rank.process.pid for rank in self._ranks]

    def begin(self, text: TextFormat | None) -> None:
        """Wait until the other ranks have loaded the model, too. Raises the error of one that could not. text: the
        model's tokenizer."""
        for rank in self._ranks:
            self._receive(rank)
            rank.channel.text = text

    def close(self) -> None:
        """End the other ranks, and the group. The engine can do nothing more."""
        if self._close.alive:
            self._close()
            torch.set_num_threads(self._threads)
            if dist.is_initialized():
                dist.destroy_process_group()

    # What all ranks do together

    @contextmanager
    def together(self, *operations: Operation) -> Iterator[None]:
        """Inside the block this process does its part of an operation, and the other ranks theirs. operations: one for
        all ranks, or one for each.

        Raises the error of another rank, and `WorkerCrashed` where one has ended.
        """
        left = [self._left.popleft() for _ in range(len(self._left))]
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        by_rank = operations * len(self._ranks) if len(operations) == 1 else operations
        before = self._ranks[0].under_way
        for rank, operation in zip(self._ranks, by_rank, strict=True):
            rank.under_way += 1
            self._send(rank, Request(operation, left, dropped))
        try:
            yield
        except BaseException as error:
            self._settle(before, error)
            raise
        ends = [self._next(rank) for rank in self._ranks]
        for end in ends:
            if isinstance(end, Failed):
                raise end.error

    def shared(self, checkpoint: Checkpoint) -> Checkpoint:
        """A checkpoint during which the other ranks pause and run other operations."""

        def paused() -> None:
            signal = Signal.GIVE_UP
            try:
                checkpoint()
                signal = Signal.GO_ON
            finally:
                for rank in self._ranks:
                    self._send(rank, signal)

        return paused

    def joined(self, layers: Sequence[LayerRecord]) -> tuple[LayerRecord, ...]:
        return tuple(joined([sent(layer), *map(self._receive, self._ranks)]) for layer in layers)

    def share(self, document: Attachment, kv_heads: int, wait: Wait = block) -> None:
        """Send the other ranks their heads of a document, of `kv_heads`, once."""
        if document.number in self._shared:
            return
        layers, caches = document.layers(wait), []
        for rank in range(1, self.size):
            part = tuple(cut(layer, *self.heads_of(rank, kv_heads)) for layer in layers)
            caches.append(CompressedCache(part, document.num_tokens, document.next_position, document.identity))
        with self.together(*(Attach(document.number, cache) for cache in caches)):
            self._shared.add(document.number)
        weakref.finalize(document, self._forget, document.number)

    def leave(self, answer: int) -> None:
        """Have the other ranks forget an answer, before the next operation. Any thread may call it."""
        self._left.append(answer)

    def drop(self, document: int) -> None:
        """Have the other ranks forget a document, before the next operation. Any thread may call it."""
        self._dropped.append(document)

    def _forget(self, document: int) -> None:
        self._shared.discard(document)
        self.drop(document)

    # Messages

    def _send(self, rank: _Rank, message: object) -> None:
        try:
            rank.channel.send(message)
        except OSError as error:
            raise self._lost(rank) from error

    def _next(self, rank: _Rank) -> Any:
        try:
            return rank.receive()
        except (EOFError, OSError) as error:
            raise self._lost(rank) from error

    def _receive(self, rank: _Rank) -> Any:
        """The next message of a rank. Raises its error where it has failed."""
        message = self._next(rank)
        if isinstance(message, Failed):
            raise message.error
        return message

    def _settle(self, before: int, error: BaseException) -> None:
        """After an error of this process: wait until the other ranks have left the operation, too, with `before` still
        under way. A rank that does not leave waits inside it for this process, and is ended. Raises `WorkerCrashed`
        where a rank has ended."""
        for rank in self._ranks:
            while rank.under_way > before:
                try:
                    if rank.channel.pipe.poll(SETTLE_S / 2):
                        rank.receive()
                        continue
                    rank.process.kill()
                except (EOFError, OSError):
                    pass
                raise self._lost(rank) from error

    def _lost(self, rank: _Rank) -> WorkerCrashed:
        return WorkerCrashed(
            f"{rank.fate}; {self._name!r} runs in {self.size} processes, and none of them can go on without the others"
        )

    @staticmethod
    def _watch(reference: weakref.ref[LeadingRank], rank: _Rank) -> None:
        rank.process.wait()
        lead = reference()
        if lead is not None and lead.on_lost is not None and not rank.ending:
            lead.on_lost(lead._lost(rank))


def _end(ranks: Sequence[_Rank], folder: tempfile.TemporaryDirectory[str]) -> None:
    for rank in ranks:
        rank.ending = True
        rank.channel.pipe.close()
    for rank in ranks:
        try:
            rank.process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()
    folder.cleanup()
