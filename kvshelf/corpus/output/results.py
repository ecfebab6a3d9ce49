"""What became of the rows of a batch, and where that is kept until the batch ends."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvshelf.corpus.input.rows import Row, RowError


@dataclass(frozen=True)
class Result:
    """One row's end: a cache, or `error`.

    tokens: of the document; kept: of those, per layer and KV head. bytes_full: of the uncompressed KV. seconds: of a
    replica, for the attempt that ended it; 0 where nothing had to be done. reused: the cache was on the shelf already.
    worker: the replica that made it, "" where none did. policy: that of the cache.
    """

    source: str
    line: int
    custom_id: str | None = None
    cache_id: str | None = None
    document_id: str | None = None
    tokens: int = 0
    kept: int = 0
    bytes_full: int = 0
    bytes_stored: int = 0
    quality: Mapping[str, Any] | None = None
    attempts: int = 0
    seconds: float = 0.0
    reused: bool = False
    error: RowError | None = None
    worker: str = ""
    policy: str = ""
    nbytes: int = 0
    """Of the input, as `Row.nbytes`."""
    levels: tuple[Mapping[str, Any], ...] = ()
    """Of a row that asked for several: the caches, the first of them too. `bytes_stored` is that of all."""

    @property
    def key(self) -> tuple[str, int]:
        """What tells a row of a batch from all others."""
        return self.source, self.line

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values, for a journal."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Result:
        """The inverse of `to_dict`. Raises `TypeError` for values that are none."""
        error = values["error"]
        error = None if error is None else RowError(**error)
        return cls(**{**values, "error": error, "levels": tuple(values["levels"])})

    def output(self, *, file: bool) -> dict[str, Any]:
        """The line of the output. `file`: name the input, because there are several."""
        where: dict[str, Any] = {"file": self.source} if file else {}
        if self.error is not None:
            error = asdict(self.error)
            return {"custom_id": self.custom_id, **where, "line": self.line, "error": error, "attempts": self.attempts}
        if self.custom_id is None:
            where["line"] = self.line  # else nothing would tell which row this is
        return {
            "custom_id": self.custom_id,
            **where,
            "cache_id": self.cache_id,
            "document_id": self.document_id,
            "tokens": {"document": self.tokens, "kept": self.kept},
            "bytes": {"full": self.bytes_full, "stored": self.bytes_stored},
            "quality": None if self.quality is None else dict(self.quality),
            "attempts": self.attempts,
            "seconds": round(self.seconds, 4),
            "reused": self.reused,
            **({"levels": [dict(level) for level in self.levels]} if self.levels else {}),
        }


def failed(row: Row, error: RowError, *, attempts: int = 0, seconds: float = 0.0) -> Result:
    """The result of a row that has no cache."""
    return Result(
        row.source, row.line, row.custom_id, attempts=attempts, seconds=seconds, error=error, nbytes=row.nbytes
    )


class Journal(abc.ABC):
    """The results of one batch so far. A row that comes to another end later has that one: the last one counts.

    Every method may raise `StoreUnavailable` or `StorageFull`; what was appended is then told again.
    """

    @abc.abstractmethod
    def append(self, results: Sequence[Result]) -> None:
        """Keep these results; durable when it returns. One of the same `key` as an earlier one replaces it."""

    @abc.abstractmethod
    def finished(self) -> Iterator[Result]:
        """Each row's last result, in any order. Nothing else may be called until it is read."""
