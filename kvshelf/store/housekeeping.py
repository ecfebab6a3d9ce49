"""What keeps a disk home in order: expiry, files that a crash left behind, and the search for inconsistencies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

from kvshelf.errors import StorageFull
from kvshelf.store import catalog
from kvshelf.store.catalog import Entry
from kvshelf.store.database import Database
from kvshelf.store.files import BlobFolder, is_name

ORPHAN_GRACE_S: Final = 3600.0
"""A file that no manifest names is left alone for this long: it may be a cache being written."""


def expire(database: Database, folders: Iterable[BlobFolder], now: float) -> int:
    """Turn expired caches into tombstones, then remove their files; returns how many."""
    with database.read() as connection:
        ended = catalog.expired(connection, now)
    bury(database, folders, ended, "expired", now)
    return len(ended)


def bury(
    database: Database,
    folders: Iterable[BlobFolder],
    entries: Sequence[Entry],
    state: Literal["deleted", "expired"],
    now: float,
) -> None:
    """Turn entries into tombstones, then remove their files. One that was put again meanwhile is left alone."""

    def tombstones() -> None:
        with database.write() as tx:
            for entry in entries:
                catalog.bury(tx, entry.seq, state, now)

    if not entries:
        return
    try:
        tombstones()
    except StorageFull:
        # A full disk has no room for the tombstones, and deleting is how room is made: so the files go first this once.
        # Should the process die in between, the next reader finds the file missing and says that the cache is corrupt.
        discard(folders, entries)
        tombstones()
    discard(folders, entries)


def discard(folders: Iterable[BlobFolder], entries: Iterable[Entry]) -> None:
    """Remove the files of entries that no longer count."""
    for entry in entries:
        if entry.file is not None:
            for folder in folders:
                folder.remove(entry.file)


def remove_orphans(database: Database, folders: Iterable[BlobFolder], now: float) -> int:
    """Remove files that no manifest names and that are too old to belong to a write in progress; returns how many."""
    removed = 0
    for folder in folders:
        for file in _orphans(database, folder, now):
            # Under the lock that publishing takes, so that no file is removed between its check and its publication.
            with database.write() as tx:
                removed += not catalog.names_file(tx, file) and folder.remove(file)
    return removed


def forget(database: Database, before: float) -> int:
    """Drop tombstones of caches that ended before a time; returns how many."""
    with database.write() as tx:
        return catalog.forget(tx, before)


def problems(database: Database, blobs: BlobFolder, quarantine: BlobFolder, now: float) -> list[str]:
    """Every inconsistency, one sentence each."""
    with database.read() as connection:
        found = [f"index: {row[0]}" for row in connection.execute("PRAGMA quick_check") if row[0] != "ok"]
        entries = catalog.stored(connection)
    for entry in entries:
        if entry.state == "corrupt":
            found.append(f"{entry.id} is corrupt and in quarantine: {entry.problem}")
        elif entry.file is None or blobs.size(entry.file) != entry.nbytes:
            found.append(f"{entry.id}: its file is missing or has another size than was written")
    for folder in (blobs, quarantine):
        found += [f"{folder.path / name} belongs to no cache" for name in _orphans(database, folder, now)]
        found += [f"{folder.path / name} is not a blob file" for name, _ in folder.entries() if not is_name(name)]
    return found


def _orphans(database: Database, folder: BlobFolder, now: float) -> list[str]:
    old = [name for name, changed in folder.entries() if is_name(name) and changed < now - ORPHAN_GRACE_S]
    with database.read() as connection:
        return [name for name in old if not catalog.names_file(connection, name)]
