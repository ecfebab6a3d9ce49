"""Which caches of a shelf are as trusted keys have signed them: those that a bundle names, byte for byte, with what it
says of them. The bundles may be signatures alone (`kvshelf push --signature-only`)."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvshelf.errors import InvalidRequest
from kvshelf.store.bundles import layout
from kvshelf.store.bundles.bundle import bundles_at
from kvshelf.store.bundles.layout import Said
from kvshelf.store.bundles.places import BundleFolder
from kvshelf.store.bundles.trust import Trust
from kvshelf.store.manifest import Manifest


class SignedCaches:
    """What all bundles in a folder say. Read again once they or the trusted keys have changed. Thread-safe."""

    def __init__(self, folder: Path, trust: Path) -> None:
        """Raises `InvalidRequest` as `opened`, for the first bundle that is not as it was signed."""
        self._folder, self._trust = folder, trust
        self._lock = threading.Lock()
        self._problem: str | None = None
        self._seen = self._state()  # before it is read: what changes meanwhile is read again
        self._said = self._read()

    def problem(self, manifest: Manifest) -> str | None:
        """Why a cache is not as it was signed; None: it is. The blob's root digest covers all its bytes, and readers
        compare it with the manifest's."""
        with self._lock:
            if (state := self._state()) != self._seen:
                self._said, self._problem = {}, None
                try:
                    self._said = self._read()
                except InvalidRequest as error:
                    self._problem = error.message
                self._seen = state
            said, problem = self._said.get(manifest.blob_digest), self._problem
        if problem is not None:
            return problem
        if said is None:
            return f"no bundle in {self._folder} that a trusted key has signed has these bytes"
        about, model = said
        ours = {name: getattr(manifest, name, None) for name in Said.model_fields} | {
            "root": manifest.blob_digest,
            "model": about.model,
        }
        changed = [name for name in Said.model_fields if ours[name] != getattr(about, name)]
        changed += ["model"] if manifest.identity["model"] != model else []
        return f"its {changed[0]} is not what was signed" if changed else None

    def _read(self) -> dict[str, tuple[Said, dict[str, Any]]]:
        """By the root digest of its blob, what is said of each cache, and its model."""
        said: dict[str, tuple[Said, dict[str, Any]]] = {}
        for bundle in bundles_at(BundleFolder(self._folder), Trust(self._trust)):
            models = [model.model_dump() for model in bundle.about.models]
            for about in bundle.about.caches:
                if about.model >= len(models):
                    raise layout.refused("malformed", f"{bundle.about.name!r} names a model that it does not have")
                said[about.root] = about, models[about.model]
            bundle.taken()
        return said

    def _state(self) -> object:
        states = []
        for file in (self._folder / layout.INDEX_FILE, self._trust):
            with suppress(OSError):  # reading it says why
                status = file.stat()
                states.append((file, status.st_ctime_ns, status.st_mtime_ns, status.st_ino, status.st_size))
        return states
