"""A corpus row, one type from the input file to the output; and the shards that rows are read from."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, TypeVar

from kvshelf.api import CreateCache
from kvshelf.api.openai import ChatCompletionRequest
from kvshelf.api.strict import parse_request
from kvshelf.errors import KvshelfError

ItemT = TypeVar("ItemT")

CHARS_PER_TOKEN: Final = 4
_BODY_TYPES: Final[Mapping[str, type[CreateCache | ChatCompletionRequest]]] = {
    "spec": CreateCache,
    "question": ChatCompletionRequest,
}
_BODIES: Final = (*_BODY_TYPES, "answer")


@dataclass(frozen=True)
class RowError:
    """Why a row has no cache. `code` is one of `kvshelf.errors`."""

    code: str
    message: str


@dataclass(frozen=True)
class Row:
    """One document of a corpus, or one question of a batch. Before its end it has `spec` or `question`, or `error` for
    bad input; afterwards a cache, `answer` or `error`.

    source: the input that holds it, by the name users know; a file's path. line: 1-based; 1 for a file that is one
    document. nbytes: of the input. spec: the creation; its `model` may be None, which means the first one served.
    tokens: of the document; kept: of those, per layer and KV head. bytes_full: of the uncompressed KV cache;
    bytes_full_16bit: of the same in 16-bit numbers. seconds: of the attempt that succeeded, or of this run's failed
    ones; 0 if nothing was done. reused: the cache or the answer was there before. worker: the replica that made the
    cache, "" if none did. levels: all caches of a row that asked for several, the first included; `bytes_stored` is the
    sum of their bytes. answer: the body of a chat completion; `tokens` are then those that went through the model.
    """

    source: str
    line: int
    custom_id: str | None = None
    cache_id: str | None = None
    document_id: str | None = None
    tokens: int = 0
    kept: int = 0
    bytes_full: int = 0
    bytes_full_16bit: int = 0
    bytes_stored: int = 0
    quality: Mapping[str, Any] | None = None
    attempts: int = 0
    seconds: float = 0.0
    reused: bool = False
    error: RowError | None = None
    worker: str = ""
    policy: str = ""
    nbytes: int = 0
    levels: tuple[Mapping[str, Any], ...] = ()
    spec: CreateCache | None = None
    question: ChatCompletionRequest | None = None
    answer: Mapping[str, Any] | None = None

    @property
    def key(self) -> tuple[str, int]:
        """Identifies a row within its batch."""
        return self.source, self.line

    @property
    def place(self) -> tuple[str, int]:
        """Sorts rows for the work: questions by their caches, so that one in memory answers all of its own; the longest
        document first."""
        cache_ids = [] if self.question is None else self.question.cache_ids or [str(self.question.cache_id)]
        return " ".join(cache_ids), -self.length

    @property
    def length(self) -> int:
        """The approximate characters of its document or question."""
        if self.question is not None:
            return sum(len(message.turn().content) for message in self.question.messages)
        if self.spec is None:
            return 0
        if self.spec.messages is not None:
            return sum(len(message.content) for message in self.spec.messages)
        return len(self.spec.document or "") + CHARS_PER_TOKEN * len(self.spec.token_ids or ())

    def failed(self, error: KvshelfError | RowError, *, attempts: int = 0, seconds: float = 0.0) -> Row:
        """This row as it ended with an error."""
        error = error if isinstance(error, RowError) else RowError(error.code, error.message)
        return replace(self, spec=None, question=None, error=error, attempts=attempts, seconds=seconds)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values, for a journal or another process; `_BODIES` only where they are given."""
        values = vars(self) | {"error": None if self.error is None else asdict(self.error)}
        for name in _BODIES:
            if values[name] is None:
                del values[name]
        for name in _BODY_TYPES.keys() & values.keys():
            values[name] = values[name].model_dump(mode="json", exclude_unset=True)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Row:
        """The inverse of `to_dict`. Raises `TypeError` or `KeyError` for other values."""
        error = None if values["error"] is None else RowError(**values["error"])
        bodies = {name: parse_request(kind, values[name]) for name, kind in _BODY_TYPES.items() if name in values}
        return cls(**{**values, "error": error, "levels": tuple(values["levels"]), **bodies})

    def output(self, *, file: bool) -> dict[str, Any]:
        """The line of the output. file: name the input, because there are several."""
        where: dict[str, Any] = {"file": self.source} if file else {}
        if self.error is not None:
            error = asdict(self.error)
            return {"custom_id": self.custom_id, **where, "line": self.line, "error": error, "attempts": self.attempts}
        if self.custom_id is None:
            where["line"] = self.line  # the line alone identifies this row
        return {
            "custom_id": self.custom_id,
            **where,
            "cache_id": self.cache_id,
            "document_id": self.document_id,
            "tokens": {"document": self.tokens, "kept": self.kept},
            "bytes": {"full": self.bytes_full, "full_16bit": self.bytes_full_16bit, "stored": self.bytes_stored},
            "quality": None if self.quality is None else dict(self.quality),
            "attempts": self.attempts,
            "seconds": round(self.seconds, 4),
            "reused": self.reused,
            **({"levels": [dict(level) for level in self.levels]} if self.levels else {}),
        }


class Shard(abc.ABC):
    """A part of the input that is read in one go. It travels to the process that reads it, so it must be picklable.
    nbytes: about how much there is to read. rows: how many rows it has, None if unknown. local: only the machine that
    made the shard can read it."""

    nbytes: int
    rows: int | None = None
    local: bool = False

    @abc.abstractmethod
    def read(self) -> Iterator[Row]:
        """Its rows, the same ones in the same order each time, in bounded memory. Bad input gives error rows, never an
        exception. Raises an error of kvshelf, such as `StoreUnavailable`, if the shard cannot be read now."""


def cut(items: Iterable[ItemT], size_of: Callable[[ItemT], int], *, most: int, size: int) -> Iterator[list[ItemT]]:
    """Consecutive groups of at most `most` items and `size` together; a single item may be larger."""
    group: list[ItemT] = []
    size_so_far = 0
    for item in items:
        if group and (len(group) >= most or size_so_far + size_of(item) > size):
            yield group
            group, size_so_far = [], 0
        group.append(item)
        size_so_far += size_of(item)
    if group:
        yield group
