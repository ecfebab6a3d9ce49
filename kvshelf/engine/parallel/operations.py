"""The messages between rank 0 and the other ranks. An operation is run by all of them at the same time."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from multiprocessing.connection import Connection
from typing import Any

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.inputs.job import Job
from kvshelf.engine.quality import Probe
from kvshelf.errors import InternalError, KvshelfError
from kvshelf.model.text import TextFormat


@dataclass(frozen=True)
class Compress:
    """Prefill one document and reduce it by each job."""

    jobs: Sequence[Job]
    cues: int


@dataclass(frozen=True)
class Score:
    """Score the entries of one document."""

    job: Job


@dataclass(frozen=True)
class Attach:
    """Take the heads of this rank of a document's cache."""

    number: int
    cache: CompressedCache


@dataclass(frozen=True)
class AskCues:
    """Answer the cues of a probe behind a document."""

    number: int
    probe: Probe


@dataclass(frozen=True)
class AnswerStep:
    """The tokens of an answer in its next step. length: tokens of its suffix before."""

    number: int
    document: int
    pending: Sequence[int]
    length: int


@dataclass(frozen=True)
class Step:
    """One step of a `DecodeBatch`."""

    answers: Sequence[AnswerStep]


Operation = Compress | Score | Attach | AskCues | Step


@dataclass(frozen=True)
class Request:
    """An operation, to be run once these answers and documents are forgotten."""

    operation: Operation
    left: Sequence[int] = ()
    dropped: Sequence[int] = ()


class Signal(Enum):
    """A message without fields."""

    GO_ON = auto()
    """Ends the pause at a checkpoint."""
    GIVE_UP = auto()
    """Ends the operation that pauses at a checkpoint."""
    SETTLED = auto()
    """Rank 0 knows of the failure."""
    DONE = auto()
    """The operation has ended."""


@dataclass(frozen=True)
class Failed:
    """The operation has ended with an error. The rank waits for `Signal.SETTLED`."""

    error: KvshelfError

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """From any error, also from one that cannot be pickled."""
        return cls(error if isinstance(error, KvshelfError) else InternalError(f"{type(error).__name__}: {error}"))


class Channel:
    """A pipe between rank 0 and another rank, which trust each other. text: the tokenizer, which is not sent: each rank
    has its own.

    Connections of `multiprocessing` would send tensors as file descriptors, which needs a server in each process.
    """

    text: TextFormat | None = None

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def send(self, message: Any) -> None:
        """Raises `OSError` where the other process has ended."""
        file = io.BytesIO()
        _Pickler(file, self.text).dump(message)
        self.pipe.send_bytes(file.getbuffer())

    def receive(self) -> Any:
        """The next message. Raises `EOFError` or `OSError` where the other process has ended."""
        return _Unpickler(io.BytesIO(self.pipe.recv_bytes()), self.text).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, text: TextFormat | None) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._text = text

    def persistent_id(self, obj: Any) -> str | None:
        return "text" if obj is self._text and obj is not None else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, text: TextFormat | None) -> None:
        super().__init__(file)
        self._text = text

    def persistent_load(self, _: Any) -> TextFormat | None:
        return self._text
