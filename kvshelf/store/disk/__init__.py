"""A shelf in one folder: blob files, and an SQLite index that says which of them count.

    <home>/shelf.sqlite3          manifests, jobs, the home's key; WAL, readable by its owner only
    <home>/blobs/<digest>-<random>.kvb
    <home>/quarantine/            files found corrupt, kept for inspection until their cache is deleted or put again

With `blobs`, the blobs lie elsewhere, and the folder has the index alone.

Several processes may use one home; it must lie on a local file system, as SQLite's WAL demands.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

from kvshelf.store.blobs import WRITE_LEASE_S, Health, Step
from kvshelf.store.disk.database import Database
from kvshelf.store.disk.faults import translated
from kvshelf.store.disk.folder import Folder, shortage
from kvshelf.store.disk.index import SqliteIndex
from kvshelf.store.disk.leases import SqliteLeases
from kvshelf.store.index import MakeBlobs, blobs_place, require_blobs_place
from kvshelf.store.jobs.clock import uptime_s
from kvshelf.store.rules import Rules
from kvshelf.store.shelf import Shelf


class DiskStore(Shelf):
    """See `Store` for the contract. Made by `open`."""

    home: Path

    @classmethod
    def open(
        cls,
        home: Path,
        *,
        rules: Rules | None = None,
        key: bytes | None = None,
        busy_s: float = 10.0,
        write_lease_s: float = WRITE_LEASE_S,
        now: Callable[[], float] | None = None,
        elapsed: Callable[[], float] | None = None,
        on_step: Step = lambda _: None,
        blobs: MakeBlobs | None = None,
    ) -> Self:
        """Open the shelf in a folder; both are created if missing. Raises `StoreUnavailable`, `StorageFull`.

        key: the key of content addresses for a new folder (32 bytes; random if None). busy_s: how long a writer waits
        for the lock. write_lease_s: how long a writer may be silent. now, elapsed: of a test; None: those of this
        machine. blobs: opens the place of the blobs, if it is not this folder; `InvalidRequest` if the home was made
        otherwise. Open the store after forking: connections do not survive a fork.
        """
        elapsed = elapsed or now or uptime_s
        now = now or time.time
        with translated(home):
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            database = Database(home, busy_s)
            recorded_key, place = database.create(key, blobs_place(blobs))
            require_blobs_place(f"the shelf at {home}", place, blobs)
            index = SqliteIndex(database, recorded_key, now, write_lease_s)
            opened = Folder.open_in(home) if blobs is None else blobs(index, SqliteLeases(database, now))
        shelf = cls(index, opened, rules=rules, now=now, elapsed=elapsed, on_step=on_step)
        shelf.home = home
        return shelf

    def health(self) -> Health:
        """As `Store.health`, with the room on the disk of the folder."""
        health = super().health()
        with translated(self.home):
            short = shortage(self.home)
        return health if short is None else replace(health, full=(*health.full, short))
