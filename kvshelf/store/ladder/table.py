"""The ladder of a home: caches that have cooled, the replica that codes them, and the blob that replaces another.

The id of a cache stays: it is of the codec under which the cache was made (`Manifest.made_codec`). Its manifest has the
codec and the digest of the new blob, so that a copy of the former one in a tier or a replica's memory answers no more.
The new blob is written and read back before one step of the index puts it in the place of the former one, which is
removed after that; who has it open can finish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from kvshelf.api.caches import Quality, Recoded
from kvshelf.artifact.blob import PackedBlob
from kvshelf.artifact.identity import ModelIdentity, digest
from kvshelf.store.index import Entry, Index
from kvshelf.store.jobs.sources import Sources
from kvshelf.store.ladder.rule import Ladder
from kvshelf.store.manifest import Manifest, described_blob
from kvshelf.store.table import Item
from kvshelf.store.writer import Writer, blob_content

LEASE_S: Final = 900.0
"""How long one replica of a model has the ladder to itself without renewing."""

_LOOKS: Final = 1000
"""Entries that are looked at before the caller has a say."""


@dataclass(frozen=True)
class ColdCache:
    """A cache that has cooled, with its entry at that time. codecs: that it may have now, the smallest first."""

    entry: Entry
    manifest: Manifest
    codecs: tuple[str, ...]


class LadderTable:
    """The ladder of one home. Used by who has a model, because a home cannot encode. Any number of threads. model: the
    fingerprint of a `ModelIdentity`, because services may give one model several names."""

    def __init__(self, index: Index, writer: Writer, sources: Sources, now: Callable[[], float]) -> None:
        """now: Unix seconds that no jump of a clock has moved."""
        self._index = index
        self._writer = writer
        self._sources = sources
        self._now = now

    # One replica at a time

    def take(self, model: str) -> int | None:
        """The term of a lease on the caches of a model; None while another replica has one."""
        item_id = _item_id(model)
        if self._index.jobs.find(item_id, "") is None:
            self._index.jobs.add(Item("ladder", item_id, "", "{}", open=True))
        return self._index.jobs.take(item_id, lease_s=LEASE_S)

    def renew(self, model: str, term: int) -> None:
        """Raises `StateConflict` if another replica has it by now."""
        self._index.jobs.renew(_item_id(model), term, lease_s=LEASE_S)

    def release(self, model: str, term: int) -> None:
        self._index.jobs.release(_item_id(model), term)

    # Caches

    def cold(self, ladder: Ladder, model: str) -> Iterator[ColdCache | None]:
        """The caches of a model that have cooled, of all tenants; None now and then, where there is none. Left alone
        are promised caches (pinned or guaranteed), those that extend others or that others extend, because they share
        bytes, and those of whose codec something is said: a certificate, the guard's finding, or a choice among levels
        without a floor."""
        for number, entry in enumerate(self._index.stored()):
            if number % _LOOKS == 0:
                now = self._now()
                yield None
            if (cold := self._cooled(entry, ladder, model, now)) is not None:
                yield cold

    def _cooled(self, entry: Entry, ladder: Ladder, model: str, now: float) -> ColdCache | None:
        used_at = entry.last_used_at or 0.0
        if not entry.live(now) or entry.pinned or entry.parent_id or entry.bases:
            return None
        if now - used_at <= ladder.rungs[1].after_s:  # most: before their text is read
            return None
        manifest = entry.manifest()
        codecs = ladder.below(manifest.codec, now - max(manifest.created_at, used_at))
        if not codecs or manifest.identity.get("parent"):  # a parent that is not here, too
            return None
        if ModelIdentity(**manifest.identity["model"]).fingerprint() != model:
            return None
        # What is said of the cache would not be true of it under another codec, or nobody could tell.
        chosen = bool(manifest.tried) and manifest.min_quality is None
        if chosen or manifest.certificate is not None or manifest.found_by_guard or self._is_extended(entry):
            return None
        return ColdCache(entry, manifest, tuple(codecs))

    def replace(self, cold: ColdCache, packed: PackedBlob, quality: Quality | None) -> bool:
        """Put a smaller blob of the same cache in the place of its blob, with its quality. False, and the cache is as
        before, if it has ended, changed, been asked or been extended since. Raises as `Store.put`."""
        assert packed.header.identity.document == cold.manifest.identity["document"]
        recoded = Recoded(codec=cold.manifest.made_codec, at=self._now())
        changes = described_blob(packed) | {"quality": quality, "recoded": recoded}
        manifest, content = cold.manifest.model_copy(update=changes), blob_content(cold.manifest.id, packed)
        is_cold = partial(self.is_cold, cold)
        swapped = self._writer.swap(cold.entry, content, evict=False, manifest=manifest, still=is_cold)
        if swapped and manifest.has_source:
            self._sources.claim(manifest)
        return swapped

    def is_cold(self, cold: ColdCache) -> bool:
        """Whether a cache is as it was when `cold` gave it."""
        before = cold.entry
        entry = self._index.find(before.id, before.tenant)
        same = entry is not None and replace(entry, priority=before.priority) == before and entry.live(self._now())
        return same and not self._is_extended(before)

    def _is_extended(self, entry: Entry) -> bool:
        return any(child.stored for child in self._index.children(entry.id, entry.tenant))


def _item_id(model: str) -> str:
    return f"ladder_{digest('kvshelf.ladder', model)}"
