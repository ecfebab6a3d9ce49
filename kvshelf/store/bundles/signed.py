"""Compares the caches of a shelf with bundles of signatures alone (`kvshelf push --signature-only`)."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

from kvshelf.errors import InvalidRequest
from kvshelf.store.bundles import layout
from kvshelf.store.bundles.bundle import bundles_at
from kvshelf.store.bundles.layout import CacheAbout
from kvshelf.store.bundles.places import BundleFolder
from kvshelf.store.bundles.trust import Trust
from kvshelf.store.manifest import Manifest


class SignedCaches:
    """The descriptions in all bundles of a folder, read again when these or the trusted keys change. Thread-safe."""

    def __init__(self, folder: Path, trust: Path) -> None:
        """Raises `InvalidRequest` as `opened`, for the first bundle that is not as it was signed."""
        self._folder, self._keys, self._trust = folder, trust, Trust(trust)
        self._lock = threading.Lock()
        self._problem: str | None = None
        self._state_read = self._state()  # before it is read: what changes meanwhile is read again
        self._statements = self._read()

    def problem(self, manifest: Manifest) -> str | None:
        """Why a cache is not as it was signed; None: it is. The blob's root digest covers all its bytes, and readers
        compare it with the manifest's. The caller checks that the id belongs to the tenant."""
        with self._lock:
            if (state := self._state()) != self._state_read:
                self._statements, self._problem = {}, None
                try:
                    self._statements = self._read()
                except InvalidRequest as error:
                    self._problem = error.message
                self._state_read = state
            statements, problem = self._statements.get(manifest.id, []), self._problem
        if problem is not None:
            return problem
        statements = [statement for statement in statements if statement.root == manifest.blob_digest]
        if not statements:
            return "no bundle that a trusted key has signed has these bytes"
        changed = [_changed(statement, manifest) for statement in statements]
        return None if None in changed else f"its {changed[0]} is not what was signed"

    def _read(self) -> dict[str, list[CacheAbout]]:
        """The descriptions by cache id. Bundles of different names may describe a cache differently: each holds."""
        statements: dict[str, list[CacheAbout]] = {}
        for bundle in bundles_at(BundleFolder(self._folder), self._trust):
            for statement in bundle.about.caches:
                if statement.id is not None:
                    statements.setdefault(statement.id, []).append(statement)
            bundle.taken()
        return statements

    def _state(self) -> object:
        states = []
        for file in (self._folder / layout.INDEX_FILE, self._keys):
            with suppress(OSError):  # reading it says why
                status = file.stat()
                states.append((file, status.st_ctime_ns, status.st_mtime_ns, status.st_ino, status.st_size))
        return states


def _changed(statement: CacheAbout, manifest: Manifest) -> str | None:
    """The first field that is not as it was signed. The model is of the content."""
    fields = {"root": manifest.blob_digest, "model": statement.model, "content": manifest.content_digest}
    for name in CacheAbout.model_fields:
        if (fields[name] if name in fields else getattr(manifest, name)) != getattr(statement, name):
            return name
    return None
