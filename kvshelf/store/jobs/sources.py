"""Sources: what caches were made from, kept to make a cache again that was evicted, has expired, or is corrupt.

A source has a place and a time of its own. It is written before its cache becomes visible and `claimed` after that,
so that a crash leaves no visible cache without its source; one that nobody claims goes with a later sweep. A claimed
one is owned by its cache (`Item.owner`): it goes when the cache is deleted, and outlives a cache that ends otherwise

    until its own time is over, where it has one
    for `LEFT_S`, where it has none
    not at all, where its cache extends another one: a part of a document does not make the cache again

The home drops it before, if it has no cache left to evict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, Literal

import numpy as np
import zstandard
from blake3 import blake3

from kvshelf.errors import BlobError, InvalidRequest, SourceNotKept
from kvshelf.store.index import KEEP_ENDED_S
from kvshelf.store.jobs.bodies import Bodies
from kvshelf.store.manifest import Manifest, SourceInfo, SourceRecord, StoredBody
from kvshelf.store.table import Item, JobTable, read, require_after
from kvshelf.store.types import Source, TokenIds

SOURCE_PREFIX: Final = "source:"
"""Tells a sealed source from the sealed blob of the same cache."""

UNCLAIMED_S: Final = 3600.0
"""How long a source waits for its cache: longer than a cache may take to write."""

LEFT_S: Final = KEEP_ENDED_S
"""How long a source without a time of its own outlives its cache: as long as its tombstone."""

_BATCH: Final = 200
_WIDTHS: Final = (2, 3, 4)
_LEVEL: Final = 9  # of zstandard: 0.1 s for a million token ids; 19 takes 2 s for 7 % fewer bytes


class Sources:
    """The sources of one home, by the ids of their caches. Raises as `JobTable` and `Blobs` do."""

    def __init__(
        self,
        table: JobTable,
        bodies: Bodies,
        now: Callable[[], float],
        disown: Callable[[SourceRecord], object] = lambda _: None,
    ) -> None:
        """disown: takes a source out of its cache's manifest, before the source is removed."""
        self._disown = disown
        self._table = table
        self._bodies = bodies
        self._now = now

    def hold(self, manifest: Manifest, source: Source, expires_at: float | None) -> SourceInfo:
        """Keep the source of a cache that is about to be published; `claim` it then. Durable when it returns. One that
        is kept stays, except that a text takes the place of token ids; its time is only ever extended. Raises
        `QuotaExceeded`, `StorageFull`, and `InvalidRequest` for what is no source of this cache."""
        while True:
            item = self._item(manifest.id, manifest.tenant)
            record = None if item is None or self._over(item) else read(item, SourceRecord)
            info = None if record is None else _info(record)
            until = info.expires_at if info and not _later(expires_at, info.expires_at) else expires_at
            if item is None or record is None or info is None:
                stored = self._write_new(item, manifest, source, until)
            elif info.form == "tokens" and isinstance(source, str):
                stored = self._write_new(item, manifest, source, until, claimed=record.claimed)
            elif until != info.expires_at:
                prolonged = info.model_copy(update={"expires_at": until})
                stored = self._change(item, record, {"manifest": _with(record.manifest, prolonged)})
            else:
                return info
            if stored is not None:  # else another caller was faster
                return _info(read(stored, SourceRecord))

    def claim(self, manifest: Manifest) -> bool:
        """Note that a visible cache has this source, and what its manifest is now. False: the source is gone."""
        while (item := self._item(manifest.id, manifest.tenant)) is not None:
            record = read(item, SourceRecord)
            if record.manifest.source != manifest.source:
                return False
            if record.claimed and record.manifest.revision == manifest.revision:
                return True
            if self._change(item, record, {"claimed": True, "manifest": manifest}) is not None:
                return True
        return False

    def find(self, cache_id: str, tenant: str) -> SourceRecord | None:
        """The claimed source of a cache, which need not exist any more."""
        item = self._item(cache_id, tenant)
        record = None if item is None or self._over(item) else read(item, SourceRecord)
        return record if record is not None and record.claimed else None

    def read(self, record: SourceRecord) -> Source:
        """The source itself, verified. A damaged one is removed, and is `SourceNotKept`."""
        manifest = record.manifest
        try:
            return _unpacked(self._bodies.read(record.body, manifest.tenant, SOURCE_PREFIX + manifest.id), record)
        except BlobError as error:
            if self.find(manifest.id, manifest.tenant) == record:  # else it was replaced meanwhile
                self._disown(record)
                self.remove(manifest.id, manifest.tenant)
            raise SourceNotKept(
                f"the source of cache {manifest.id} is damaged or gone ({error.message}); send the document again",
                param="cache_id",
                reason=error.reason,
            ) from error

    def remove(self, cache_id: str, tenant: str, *, unclaimed: bool = False) -> int:
        """Forget the source of a cache; returns the bytes freed. unclaimed: only if nobody has claimed it."""
        item = self._item(cache_id, tenant)
        if item is None:
            return 0
        record = read(item, SourceRecord)
        # The item first: from then on nobody finds the bytes, and a sweep removes them if this process dies here.
        if (unclaimed and record.claimed) or not self._table.remove(item.id):
            return 0
        self._bodies.remove(record.body)
        return record.body.stored_bytes

    def manifests(self, tenant: str, after: str | None) -> Iterator[Manifest]:
        """The manifests of a tenant's claimed sources, the newest source first, with the time until which each stays.
        after: the last cache id of the page before. Raises `InvalidRequest` for an unknown one."""
        place = None if after is None else source_id(after)
        require_after(self._table, tenant, place)
        while items := self._table.listing("source", tenant, place, _BATCH):
            for item in items:
                record = read(item, SourceRecord)
                if record.claimed and not self._over(item):
                    yield _with(record.manifest, _info(record).model_copy(update={"expires_at": item.due}))
            place = items[-1].id

    def all(self) -> Iterator[SourceRecord]:
        """Every source of every tenant, the oldest first."""
        return (read(item, SourceRecord) for item in self._table.open_items("source"))

    def seal_anew(self, record: SourceRecord) -> None:
        """Write a source with the current sealing key. Nothing happens if it was changed meanwhile."""
        manifest = record.manifest
        item = self._item(manifest.id, manifest.tenant)
        if item is not None and read(item, SourceRecord) == record:
            data = self._bodies.read(record.body, manifest.tenant, SOURCE_PREFIX + manifest.id)
            self._write(item, manifest, data, record.model_dump(exclude={"manifest", "body"}))

    def _write_new(
        self, item: Item | None, manifest: Manifest, source: Source, until: float | None, *, claimed: bool = False
    ) -> Item | None:
        data, how = packed_source(source, manifest.num_tokens)
        form: Literal["text", "tokens"] = "text" if isinstance(source, str) else "tokens"
        info = SourceInfo(form=form, nbytes=len(data), digest=blake3(data).hexdigest(), expires_at=until)
        return self._write(item, _with(manifest, info), data, {**how, "claimed": claimed})

    def _write(self, item: Item | None, manifest: Manifest, data: bytes, how: Mapping[str, Any]) -> Item | None:
        """A new source, in the place of `item`. how: the fields of `SourceRecord` besides manifest and body."""

        def store(body: StoredBody | None) -> Item | None:
            assert body is not None, "a source is not empty"
            new = SourceRecord(manifest=manifest, body=body, **how)
            return self._table.add(self._stored(new)) if item is None else self._table.change(self._stored(new, item))

        stored = self._bodies.write(manifest.tenant, SOURCE_PREFIX + manifest.id, memoryview(data), store)
        if stored is not None and item is not None:
            self._bodies.remove(read(item, SourceRecord).body)
        return stored

    def _change(self, item: Item, record: SourceRecord, changes: Mapping[str, Any]) -> Item | None:
        return self._table.change(self._stored(record.model_copy(update=changes), item))

    def _stored(self, record: SourceRecord, before: Item | None = None) -> Item:
        manifest, version, until = record.manifest, before.version if before else 0, _info(record).expires_at
        place = (source_id(manifest.id), manifest.tenant, record.model_dump_json(), version)
        item = Item("source", *place, open=True, due=self._now() + UNCLAIMED_S, held=record.body.name)
        if not record.claimed:
            return item
        is_part = manifest.parent_id is not None or bool(manifest.identity.get("parent"))  # only what was appended
        after_s = 0.0 if is_part else LEFT_S if until is None else None
        return replace(item, due=until, owner=manifest.id, after_s=after_s)

    def _item(self, cache_id: str, tenant: str) -> Item | None:
        return self._table.find(source_id(cache_id), tenant)

    def _over(self, item: Item) -> bool:
        return item.due is not None and item.due <= self._now()


def source_id(cache_id: str) -> str:
    return cache_id.replace("kvs_", "src_", 1)


def _info(record: SourceRecord) -> SourceInfo:
    assert record.manifest.source is not None, "the manifest of a source names it"
    return record.manifest.source


def _with(manifest: Manifest, info: SourceInfo) -> Manifest:
    return manifest.model_copy(update={"source": info})


def _later(one: float | None, other: float | None) -> bool:
    """Whether an end is after another; None: never."""
    return other is not None and (one is None or one > other)


def packed_source(source: Source, num_tokens: int) -> tuple[bytes, dict[str, Any]]:
    """The bytes to keep, and the fields of `SourceRecord` that say how to read them. A text stays as it is."""
    if isinstance(source, str):
        return source.encode(), {}
    if len(source.ids) != num_tokens or not all(0 <= token < 1 << 32 for token in source.ids):
        raise InvalidRequest(
            f"source has {len(source.ids)} token ids and the cache is of {num_tokens} tokens; give the ids of its "
            "document, each from 0 to 4294967295",
            param="source",
        )
    width = next(width for width in _WIDTHS if max(source.ids) < 1 << 8 * width)
    plain = np.asarray(source.ids, "<u4").view("u1").reshape(-1, 4)[:, :width].tobytes()
    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(plain)
    compressed = len(frame) < len(plain)
    how = {"width": width, "compressed": compressed, "protected_prefix": source.protected_prefix}
    return frame if compressed else plain, how


def _unpacked(data: bytes, record: SourceRecord) -> Source:
    """The inverse of `packed_source`. Raises `BlobError` for anything else."""
    if not record.width:
        return data.decode()
    size = record.width * record.manifest.num_tokens
    try:
        plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=size) if record.compressed else data
    except zstandard.ZstdError as error:
        raise BlobError(f"its token ids are no Zstandard frame: {error}", reason="source_malformed") from error
    if record.width not in _WIDTHS or len(plain) != size:
        raise BlobError(f"{len(plain)} bytes of token ids, not {size}", reason="source_malformed")
    wide = np.zeros((record.manifest.num_tokens, 4), "u1")  # [N, 4], little-endian
    wide[:, : record.width] = np.frombuffer(plain, "u1").reshape(-1, record.width)
    return TokenIds(tuple(wide.view("<u4").ravel().tolist()), record.protected_prefix)
