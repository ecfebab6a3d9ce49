"""Rank 0 and the processes that it starts: whatever it runs of a shared model, the others run at the same time."""

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
from kvshelf.engine.parallel.operations import (
    Attach,
    Channel,
    Failed,
    Operation,
    Request,
    Signal,
)
from kvshelf.engine.progress import Checkpoint
from kvshelf.engine.ranks import SharedModel, join_group, sent
from kvshelf.errors import WorkerCrashed
from kvshelf.model.text import TextFormat

OnLost = Callable[[WorkerCrashed], None]
"""Is told, on a thread of its own, that a rank has ended, so that the engine can do nothing more."""

_START_S: Final = 120.0
"""Longest time from a rank's start until its imports are done."""

_ENDING_S: Final = 5.0
"""What waits for a dead process fails a little before the process can be seen to be dead."""


class _Rank:
    """One of the other processes, and the pipe to it. under_way: operations that it has not ended, one within the
    other. ending: whether it is to end."""

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

    def heard(self) -> Any:
        """The next message. Raises as `Channel.heard`."""
        message = self.channel.heard()
        if message is Signal.DONE or isinstance(message, Failed):
            self.under_way -= 1
        if isinstance(message, Failed):
            self.channel.tell(Signal.SETTLED)
        return message

    @property
    def fate(self) -> str:
        """How the process ended, waiting for its end a moment."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_ENDING_S)
        code = self.process.poll()
        told = "still runs" if code is None else f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"rank {self.number} (process {self.process.pid}) {told}"


class LeadingRank(SharedModel):
    """This process, with the model's first heads. One thread uses it, that of the engine."""

    def __init__(self, name: str, ranks: Sequence[_Rank], folder: tempfile.TemporaryDirectory[str]) -> None:
        super().__init__(0, 1 + len(ranks))
        self._name = name
        self._ranks = ranks
        self._left: deque[int] = deque()
        self._dropped: deque[int] = deque()
        self._known: set[int] = set()
        """The numbers of the documents that the other ranks have."""
        self.numbers = count()
        """Of answers, of all batches together."""
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
            rank.channel.tell(Start(name, device, dtype, rank.number, size, threads, meeting))
        torch.set_num_threads(threads)
        try:
            for rank in ranks:
                if not rank.channel.pipe.poll(_START_S):
                    raise WorkerCrashed(f"{name!r}: rank {rank.number} did not start within {_START_S:g} s")
                lead._heard(rank)
            for rank in ranks:
                rank.under_way += 1
                rank.channel.tell(Signal.GO_ON)
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
            self._heard(rank)
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
        left, dropped = ([held.popleft() for _ in range(len(held))] for held in (self._left, self._dropped))
        each = operations * len(self._ranks) if len(operations) == 1 else operations
        before = self._ranks[0].under_way
        for rank, operation in zip(self._ranks, each, strict=True):
            rank.under_way += 1
            self._tell(rank, Request(operation, left, dropped))
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
        """A checkpoint during which the other ranks pause, and may be asked for other operations."""

        def paused() -> None:
            try:
                checkpoint()
            except BaseException:
                self._tell_all(Signal.GIVE_UP)
                raise
            self._tell_all(Signal.GO_ON)

        return paused

    def joined(self, layers: Sequence[LayerRecord]) -> tuple[LayerRecord, ...]:
        return tuple(joined([sent(layer), *map(self._heard, self._ranks)]) for layer in layers)

    def share(self, document: Attachment, kv_heads: int, wait: Wait = block) -> None:
        """Have the other ranks take their heads of a document, of `kv_heads`, unless they have."""
        if document.number in self._known:
            return
        layers = document.layers(wait)
        heads = (self.heads_of(rank, kv_heads) for rank in range(1, self.size))
        parts = (tuple(cut(layer, *of_rank) for layer in layers) for of_rank in heads)
        told = (document.num_tokens, document.next_position, document.identity)
        with self.together(*(Attach(document.number, CompressedCache(part, *told)) for part in parts)):
            self._known.add(document.number)
        weakref.finalize(document, self._forget, document.number)

    def leave(self, answer: int) -> None:
        """Have the other ranks forget an answer, before the next operation."""
        self._left.append(answer)

    def drop(self, document: int) -> None:
        """Have the other ranks forget a document, before the next operation. Any thread may call it."""
        self._dropped.append(document)

    def _forget(self, document: int) -> None:
        self._known.discard(document)
        self.drop(document)

    # Messages

    def _tell_all(self, message: object) -> None:
        for rank in self._ranks:
            self._tell(rank, message)

    def _tell(self, rank: _Rank, message: object) -> None:
        try:
            rank.channel.tell(message)
        except OSError as error:
            raise self._lost(rank) from error

    def _next(self, rank: _Rank) -> Any:
        try:
            return rank.heard()
        except (EOFError, OSError) as error:
            raise self._lost(rank) from error

    def _heard(self, rank: _Rank) -> Any:
        """The next message of a rank. Raises the error that it tells."""
        message = self._next(rank)
        if isinstance(message, Failed):
            raise message.error
        return message

    def _settle(self, before: int, error: BaseException) -> None:
        """After an error of this process: wait until the other ranks have left the operation, too, with `before` still
        under way. A rank that does not waits inside it for this process, and is ended. Raises `WorkerCrashed` where one
        has ended."""
        for rank in self._ranks:
            while rank.under_way > before:
                try:
                    if rank.channel.pipe.poll(SETTLE_S / 2):
                        rank.heard()
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
    def _watch(lead: weakref.ref[LeadingRank], rank: _Rank) -> None:
        rank.process.wait()
        found = lead()
        if found is not None and found.on_lost is not None and not rank.ending:
            found.on_lost(found._lost(rank))


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
