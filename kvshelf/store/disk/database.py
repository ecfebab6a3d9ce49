"""The SQLite file of a disk home: manifests and jobs in one place, so that publishing a cache is one transaction."""

from __future__ import annotations

import fcntl
import math
import os
import queue
import secrets
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Final

from kvshelf.errors import StoreUnavailable
from kvshelf.store.disk.faults import translated

FILE_NAME = "shelf.sqlite3"

HOME_FORMAT: Final = 6
"""Incremented when the tables change in a way that older versions cannot work with."""

_PURGE_S: Final = 10.0
"""Least seconds between two purges after deletions; sweeps purge in any case."""

_WAIT_MS: Final = 500
"""How long a purge may hold up writers. If the database is busy, the next purge does the rest."""

_TABLES: Final = files(__package__).joinpath("schema.sql").read_text("utf-8")


def known_key(home: Path) -> bytes | None:
    """The key of the home in a folder, None if there is no home yet. Changes nothing."""
    path = home / FILE_NAME
    with translated(home):
        if not path.exists():
            return None
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
            if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'meta'").fetchone():
                return None  # its creation is not finished
            row = connection.execute("SELECT value FROM meta WHERE name = 'key'").fetchone()
    return None if row is None else bytes(row[0])


class Database:
    """Connections to the index of one home. A connection is never used by two threads at once. Connections are lent
    from a pool rather than bound to threads: a server's worker threads come and go, and nobody would find a connection
    that outlives its thread."""

    def __init__(self, home: Path, busy_s: float) -> None:
        self._home = home
        self._busy_s = busy_s
        self._path = home / FILE_NAME
        self._inode = 0
        self._purged_at = -math.inf
        self._idle: queue.LifoQueue[sqlite3.Connection] = queue.LifoQueue()

    def create(self, key: bytes | None, blobs: str = "beside") -> tuple[bytes, str]:
        """Make the tables if they are missing; returns the home's secret key and where its blobs lie. Both are kept in
        a new home; its key is random if None. Two processes may start at once: the folder itself is locked meanwhile,
        and the kernel releases the lock when a process dies."""
        with translated(self._home):
            folder = os.open(self._home, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)
                self._require_private_file()
                return self._initialise(key or secrets.token_bytes(32), blobs)
            finally:
                os.close(folder)

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A connection for single SELECT statements."""
        with translated(self._home):
            connection = self._borrow()
            try:
                yield connection
            finally:
                self._idle.put(connection)

    @contextmanager
    def write(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """A transaction that holds the write lock from its start. On the disk on return, rolled back on any exception.
        durable False saves the wait for the disk; a power cut may then lose the transaction, but never tear it."""
        with self.read() as connection:
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def purge(self, *, at_once: bool) -> None:
        """Empty the WAL: it has, until it is written over, what deletions have overwritten in the database. at_once:
        even if that was done less than `_PURGE_S` ago."""
        if not at_once and time.monotonic() - self._purged_at < _PURGE_S:
            return
        self._purged_at = time.monotonic()
        with translated(self._home), closing(self._connect()) as connection:
            connection.execute(f"PRAGMA busy_timeout = {_WAIT_MS}")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        while True:
            try:
                self._idle.get_nowait().close()
            except queue.Empty:
                return

    def _borrow(self) -> sqlite3.Connection:
        # An open connection keeps working on a deleted file, and what it acknowledges is lost.
        if os.stat(self._path).st_ino != self._inode:
            raise StoreUnavailable(f"{self._path} was replaced while it was in use; open the shelf again")
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        # mode=rw: a home that was deleted under a running server is an error, never an empty new shelf.
        connection = sqlite3.connect(
            f"{self._path.as_uri()}?mode=rw",
            uri=True,
            timeout=self._busy_s,
            isolation_level=None,
            check_same_thread=False,
        )
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")  # FAST would leave what was deleted in free pages
        return connection

    def _require_private_file(self) -> None:
        """The index holds the key: a regular file that only its owner may read. SQLite gives its WAL the same mode."""
        # An existing file is only inspected: opening and closing it would drop the locks that other connections of this
        # process hold on it, because POSIX locks belong to the process, not to the descriptor.
        with suppress(FileExistsError):
            os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        status = os.lstat(self._path)
        if not stat.S_ISREG(status.st_mode):
            raise StoreUnavailable(f"{self._path} is not a regular file")
        if not os.access(self._path, os.R_OK | os.W_OK):
            raise StoreUnavailable(f"{self._path} cannot be written: the disk is read-only, or it is another user's")
        self._inode = status.st_ino

    def _initialise(self, key: bytes, blobs: str) -> tuple[bytes, str]:
        with closing(self._connect()) as connection:
            if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'meta'").fetchone():
                connection.execute("PRAGMA journal_mode = WAL")
                connection.executescript(f"BEGIN IMMEDIATE;{_TABLES}")
                connection.execute("INSERT INTO meta VALUES ('format', ?)", (str(HOME_FORMAT).encode(),))
                connection.execute("INSERT INTO meta VALUES ('key', ?)", (key,))
                connection.execute("INSERT INTO meta VALUES ('blobs', ?)", (blobs.encode(),))
                connection.execute("COMMIT")
            meta = {name: bytes(value) for name, value in connection.execute("SELECT name, value FROM meta")}
            home_format = meta.get("format", b"?").decode(errors="replace")
            if home_format != str(HOME_FORMAT):
                raise StoreUnavailable(
                    f"the shelf at {self._home} has home format {home_format}, this version of kvshelf works with "
                    f"{HOME_FORMAT}: use the version that made it, or another folder"
                )
            return meta["key"], meta["blobs"].decode()
