"""Errors of the operating system and of SQLite, translated into ours. The only place that does so."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvshelf.errors import StorageFull, StoreUnavailable

_FULL = {
    errno.ENOSPC: "no space is left",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file may not grow further",
}


@contextmanager
def translated(home: Path) -> Iterator[None]:
    """Inside the block, `OSError` and `sqlite3.Error` become `StorageFull` or `StoreUnavailable`."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull(
                f"cannot write to the shelf at {home}: {_FULL[error.errno]}. Delete caches or enlarge the disk."
            ) from error
        if error.errno == errno.EBADF:
            raise StoreUnavailable(f"the shelf at {home} was closed; open it again") from error
        raise StoreUnavailable(
            f"the shelf at {home} does not work: {error.strerror or error} ({error.filename or 'no file'})"
        ) from error
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise StorageFull(f"cannot write to the index of the shelf at {home}: no space is left.") from error
        raise StoreUnavailable(f"the index of the shelf at {home} does not work: {error}") from error
