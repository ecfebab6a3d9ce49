"""Caches of which only some runs of rows are read: the same rows as in a whole read, verified, and no more bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.artifact import blob
from kvshelf.artifact.blob.kinds.record import RUN_ROWS
from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.opened.partial import PartialCache, PartialLayer
from kvshelf.artifact.records import Indexed, Latents, LayerRecord, PackedRecord, State, States
from kvshelf.errors import BlobError, CacheCorrupt, InvalidRequest, StoreUnavailable
from kvshelf.kernels.quantize.rows import plain
from kvshelf.store.blobs import SeekableFile
from kvshelf.store.disk import DiskStore
from kvshelf.store.objects.blobs import ObjectBlobs
from kvshelf.store.rules import Rules
from kvshelf.store.sealing.keyring import Keyring
from kvshelf.store.tiers.disk import DiskTier
from kvshelf.store.tiers.ram import RamTier
from kvshelf.store.tiers.tiered import TieredStore
from tests.store.caches import make_cache, make_identity, make_indexed, make_layer, make_merged, parts_of, require_equal
from tests.store.objects.servers import S3Server
from tests.store.places import Clock, DiskPlace, ObjectsPlace, Place, RedisPlace
from tests.store.processes import start_child
from tests.store.redis.servers import ValkeyServer

CODECS = ["none", "int8:residual=0", "int4", "int4:group=64,residual=1500", "int2:group=1024,residual=0", "mixed"]


class CountedFile(SeekableFile):
    """A blob in memory that counts the bytes that are read."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = bytearray(data)
        self.nbytes = len(data)
        self.count = 0

    def _read_some(self, view: memoryview) -> int:
        view[:] = self.data[self._position : self._position + len(view)]
        self.count += len(view)
        return len(view)


def opened(data: bytes) -> tuple[PartialCache, CountedFile]:
    file = CountedFile(data)
    return PartialCache(blob.inspect(data), file, nullcontext), file


def rows(record: PackedRecord, run: int) -> list[torch.Tensor]:
    """Everything that a record has of one run, head by head."""
    start, found = run * RUN_ROWS, []
    for side in (record.keys, record.values):
        if isinstance(side, torch.Tensor):
            found += [head[start : start + RUN_ROWS] for head in torch.split(side, record.lengths)]
        else:
            for head in (head for head in side.heads() if start < len(head)):
                coded = head.coded(start, min(start + RUN_ROWS, len(head)))
                found += [coded.codes, coded.scales, coded.zeros]
    return found


def require_rows(layer: PartialLayer, whole: LayerRecord) -> None:
    """What was fetched is what a whole read has; what was not is zero."""
    for part, expected, own in zip(parts_of(layer.record), parts_of(whole), layer.runs, strict=True):
        assert torch.equal(part.entry_positions, expected.entry_positions)
        for index, run in enumerate(own or [None] * -(-max(expected.lengths) // RUN_ROWS)):
            for ours, theirs in zip(rows(part, index), rows(expected, index), strict=True):
                if run is None or run in layer.fetched:
                    assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
                else:
                    assert not ours.any()


@st.composite
def long_caches(draw: st.DrawFn) -> CompressedCache:
    """Kept, merged and latent records and states, of none to three runs and ragged heads, under every codec but klt."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    tokens, dims = 3200, draw(st.sampled_from([(3, 5), (16, 16)]))
    sizes = st.sampled_from([0, 1, 40, 1023, 1024, 1025, 2048, 2500, 3200])

    def layer(kind: str) -> LayerRecord:
        if kind == "latents":
            made = make_layer([draw(sizes)], tokens, dims=dims, generator=generator)
            return replace(Latents.of(made), importance=torch.rand(made.entries, generator=generator))
        heads = draw(st.lists(sizes, min_size=1, max_size=3))
        if kind == "merged":
            merged = make_merged([min(head, 1100) for head in heads], tokens, dims=dims, generator=generator)
            return replace(merged, importance=torch.rand(merged.entries, generator=generator))
        kept = make_layer(heads, tokens, dims=dims, generator=generator)
        kept = replace(kept, importance=torch.rand(kept.entries, generator=generator))
        return States((State("conv", 0, torch.ones(3, 4)),), kept) if kind == "states" else kept

    kinds = draw(st.lists(st.sampled_from(["kept", "merged", "latents", "states"]), min_size=1, max_size=2))
    cache = CompressedCache(tuple(map(layer, kinds)), tokens, tokens, make_identity(tokens))
    return cache.encoded(draw(st.sampled_from(CODECS)))


@settings(deadline=None, max_examples=60)
@given(long_caches(), st.data())
def test_any_runs_are_the_rows_of_a_whole_read(cache: CompressedCache, data: st.DataObject) -> None:
    packed = cache.to_bytes()
    whole = CompressedCache.from_bytes(packed)
    require_equal(whole, cache)
    assert whole.to_bytes() == packed
    blob.verify_file(io.BytesIO(packed), len(packed))
    parts, file = opened(packed)
    for index, record in enumerate(whole.layers):
        layer = parts.layer(index)
        require_rows(layer, record)
        numbers = [run for own in layer.runs for run in own]
        assert numbers == list(range(len(numbers)))
        for _ in range(2):
            chosen = data.draw(st.sets(st.sampled_from(numbers))) if numbers else set()
            layer.fetch(chosen)
            assert layer.fetched >= chosen
            require_rows(layer, record)
        layer.fetch(numbers)
        require_rows(layer, record)
    assert file.count == parts.read_bytes == parts.nbytes


@pytest.mark.parametrize(
    ("lengths", "runs"), [((5, 1024), 0), ((1024, 1025), 2), ((0, 2048), 2), ((2049, 0), 3), ((3000, 1), 3)]
)
def test_a_record_has_runs_once_one_does_not_hold_it(lengths: tuple[int, ...], runs: int) -> None:
    parts, _ = opened(make_cache(num_tokens=3000, lengths=(lengths,)).to_bytes())
    assert parts.layer(0).runs == (range(runs),)


def test_records_that_are_read_whole() -> None:
    """Merged ones and residuals; of windows, chunks and klt see docs/internals/format.md."""
    merged = make_merged((1400,), 3000, generator=torch.Generator().manual_seed(1))
    cache = replace(make_cache(num_tokens=3000, lengths=((3000,),)), layers=(merged,))
    assert opened(cache.to_bytes())[0].layer(0).runs == (range(0),)
    cache = make_cache(num_tokens=3000, lengths=((3000, 2900),)).encoded("int4")
    layer = opened(cache.to_bytes())[0].layer(0)
    assert layer.runs == (range(3), range(3, 3))
    assert [part.lengths for part in parts_of(layer.record)] == [[2968, 2868], [32, 32]]


def test_no_more_is_read_than_was_asked_for() -> None:
    cache = make_cache(num_tokens=5000, lengths=((5000, 4000), (5000, 5000)), dims=(16, 8), dtype=torch.bfloat16)
    parts, file = opened(cache.to_bytes())
    layer = parts.layer(1)
    head = file.count
    assert head == parts.read_bytes < 1000, "positions of every entry, and six digests"
    layer.fetch([3])
    assert file.count - head == parts.read_bytes - head == 2 * RUN_ROWS * (16 + 8) * 2
    layer.fetch([3])
    parts.layer(1).fetch([])
    assert file.count - head == 2 * RUN_ROWS * (16 + 8) * 2
    layer.fetch([3, 4])
    assert file.count - head == 2 * (5000 - 3 * RUN_ROWS) * (16 + 8) * 2


def test_runs_that_do_not_exist_are_refused_by_name() -> None:
    parts, _ = opened(make_cache(num_tokens=3000, lengths=((3000,),)).to_bytes())
    for run in (-1, 3):
        with pytest.raises(InvalidRequest, match="has runs 0 to 2"):
            parts.layer(0).fetch([run])


def test_a_flipped_bit_is_refused_with_its_run_and_disturbs_no_other() -> None:
    packed = make_cache(num_tokens=5000, lengths=((40,), (5000, 5000))).encoded("int4:residual=0").to_bytes()
    whole = CompressedCache.from_bytes(packed)
    described = blob.inspect(packed).header.layers[1]
    body = len(packed) - 40 - blob.inspect(packed).header.body_bytes
    for run in range(5):
        for span in described.run_spans(run):
            parts, file = opened(packed)
            file.data[body + described.offset + span.offset + span.nbytes // 2] ^= 1
            layer = parts.layer(1)
            layer.fetch(set(range(5)) - {run})
            with pytest.raises(BlobError, match=f"run {run} of segment 1 is not what was written") as error:
                layer.fetch([run])
            assert error.value.reason == "digest_mismatch"
            assert run not in layer.fetched
            file.data[body + described.offset + span.offset + span.nbytes // 2] ^= 1
            layer.fetch([run])
            require_rows(layer, whole.layers[1])


def test_a_flipped_bit_in_the_head_is_refused_before_any_row() -> None:
    packed = make_cache(num_tokens=5000, lengths=((4999, 4000),)).to_bytes()
    (layer,) = blob.inspect(packed).header.layers
    body = len(packed) - 40 - layer.nbytes
    for span in (layer.digests, layer.arrays[0]["positions"]):
        parts, file = opened(packed)
        file.data[body + span.offset] ^= 1
        with pytest.raises(BlobError, match="segment 0 is not what was written"):
            parts.layer(0)


def test_a_file_that_ends_early_is_refused() -> None:
    parts, file = opened(make_cache(num_tokens=3000, lengths=((3000,),)).to_bytes())
    layer = parts.layer(0)
    file.nbytes = 5000
    with pytest.raises(BlobError) as error:
        layer.fetch([2])
    assert error.value.reason == "truncated"


@pytest.mark.parametrize("codec", ["none", "int4:group=8,residual=5"])
def test_blocks_of_an_index_are_read_one_by_one(codec: str) -> None:
    """The index comes with the head; a block is a run."""
    cache = replace(make_cache(num_tokens=100), layers=(make_indexed(100, 16),)).encoded(codec)
    parts, file = opened(cache.to_bytes())
    layer = parts.layer(0)
    (whole, *_), (record, *_) = parts_of(cache.layers[0]), parts_of(layer.record)
    assert isinstance(record, Indexed)
    assert isinstance(whole, Indexed)
    assert torch.equal(record.summaries, whole.summaries)
    assert (layer.run_rows[0], len(layer.runs[0])) == (16, len(whole.summaries))
    head_bytes = file.count
    layer.fetch([2, 5])
    assert file.count - head_bytes == sum(span.nbytes for run in (2, 5) for span in layer._layer.run_spans(run))
    for name in ("keys", "values"):
        ours, right = (plain(getattr(each, name)).view(2, whole.lengths[0], -1) for each in (record, whole))
        for block in range(len(whole.summaries)):
            own = slice(16 * block, 16 * block + 16)
            assert torch.equal(ours[:, own], right[:, own]) == (block in (2, 5))


# On every home


def long_cache(seed: int = 0) -> CompressedCache:
    made = make_cache(seed, num_tokens=6000, lengths=((6000, 5500), (40, 2000)), dims=(64, 64))
    return made.encoded("int4:residual=100")


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
def test_every_home_gives_runs(place: Place, clock: Clock, sealed: bool) -> None:
    rules = Rules(keyring=Keyring([b"k" * 32])) if sealed else Rules()
    with place.open(now=clock, rules=rules) as shelf:
        cache = long_cache()
        manifest = shelf.put(cache)
        whole = shelf.get(manifest.id)
        with shelf.open_parts(manifest.id) as parts:
            assert (parts.identity, parts.root.hex()) == (cache.identity, manifest.blob_digest)
            for index, record in enumerate(whole.layers):
                layer = parts.layer(index)
                for runs in ([1], [0, 1], [own[-1] for own in layer.runs if own]):
                    layer.fetch(runs)
                    require_rows(layer, record)
        with pytest.raises(StoreUnavailable, match="closed"):
            parts.layer(0).fetch([2])
        require_rows(layer, record)
        assert shelf.check() == []


def test_a_damaged_run_quarantines_the_cache_once_it_is_read(place: Place, clock: Clock) -> None:
    with place.open(now=clock) as shelf:
        manifest = shelf.put(long_cache())
        header = blob.inspect(long_cache().to_bytes()).header
        start = manifest.bytes_stored - 40 - header.body_bytes + header.layers[0].run_spans(3)[0].offset
        place.change(manifest, _flipping(start))
        with shelf.open_parts(manifest.id) as parts:
            layer = parts.layer(0)
            layer.fetch([0, 1, 2, 4])
            with pytest.raises(CacheCorrupt, match="run 3 of segment 0"):
                layer.fetch([3])
        with pytest.raises(CacheCorrupt):
            shelf.get(manifest.id)
        require_equal(shelf.get(shelf.put(long_cache()).id), long_cache())


def test_a_cache_that_is_deleted_while_it_is_open_can_be_read_on(place: Place, clock: Clock) -> None:
    with place.open(now=clock) as shelf:
        manifest = shelf.put(long_cache())
        with shelf.open_parts(manifest.id) as parts:
            layer = parts.layer(0)
            shelf.delete(manifest.id)
            layer.fetch([2])
            require_rows(layer, long_cache().layers[0])


def test_redis_sends_no_more_than_was_asked_for(shared_valkey: ValkeyServer) -> None:
    """Though the header is longer than what comes with the lease, and a whole read would request all that follows."""
    cache = make_cache(num_tokens=6000, lengths=((6000, 5500), *[(7, 8)] * 60), dims=(64, 64))
    with RedisPlace(shared_valkey).open() as shelf:
        manifest = shelf.put(cache)
        assert manifest.bytes_stored > 5 << 20
        before = shared_valkey.client().info("stats")["total_net_output_bytes"]
        with shelf.open_parts(manifest.id) as parts:
            parts.layer(0).fetch([4])
        sent = shared_valkey.client().info("stats")["total_net_output_bytes"] - before
        assert 2 * RUN_ROWS * 128 * 4 < sent < 2 * RUN_ROWS * 128 * 4 + (128 << 10)


def test_object_storage_sends_no_more_than_was_asked_for(
    tmp_path: Path, shared_s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for gaps that take less time than a request."""
    asked: list[int] = []
    fetch = ObjectBlobs.fetch_range

    def counted(blobs: ObjectBlobs, path: str, start: int, stop: int) -> memoryview:
        asked.append(stop - start)
        return fetch(blobs, path, start, stop)

    monkeypatch.setattr(ObjectBlobs, "fetch_range", counted)
    place = ObjectsPlace(DiskPlace(tmp_path / "home"), shared_s3, start_child)
    with place.open() as shelf:
        manifest = shelf.put(make_cache(num_tokens=6000, lengths=((6000, 5500),), dims=(64, 64)))
        asked.clear()
        with shelf.open_parts(manifest.id) as parts:
            layer = parts.layer(0)
            layer.fetch([2, 3])
        rows_of_a_head = 2 * RUN_ROWS * 64 * 4
        assert sorted(asked)[-4:] == [rows_of_a_head] * 4
        assert sum(asked) < 4 * rows_of_a_head + (64 << 10)


@contextmanager
def tiered(folder: Path) -> Iterator[TieredStore]:
    home = DiskStore.open(folder / "home")
    with TieredStore(home, [RamTier(1 << 30), DiskTier.open(folder / "tier", 1 << 30, key=home.key)]) as store:
        yield store


@pytest.mark.parametrize(("first", "dropped"), [("ram", 0), ("disk", 1), ("home", 2)])
def test_tiers_give_runs(tmp_path: Path, first: str, dropped: int) -> None:
    with tiered(tmp_path) as store:
        manifest = store.put(long_cache())
        for tier in store.tiers.all[:dropped]:
            tier.drop(manifest.id, manifest.tenant)
        with store.open_parts(manifest.id) as parts:
            assert parts.place == first
            layer = parts.layer(0)
            layer.fetch([1, 4])
            if first != "ram":
                require_rows(layer, long_cache().layers[0])
            for run in (1, 4):
                (ours, _), (theirs, _) = parts_of(layer.record), parts_of(long_cache().layers[0])
                assert all(map(torch.equal, rows(ours, run), rows(theirs, run)))


def test_a_damaged_copy_on_disk_is_left_for_the_home(tmp_path: Path) -> None:
    with tiered(tmp_path) as store:
        manifest = store.put(long_cache())
        store.tiers.all[0].drop(manifest.id, manifest.tenant)
        header = blob.inspect(long_cache().to_bytes()).header
        start = manifest.bytes_stored - 40 - header.body_bytes + header.layers[0].run_spans(3)[0].offset
        with store.open_parts(manifest.id) as parts:
            layer = parts.layer(0)
            layer.fetch([0])
            DiskPlace(tmp_path / "tier").change(manifest, _flipping(start))
            layer.fetch([3])
            assert parts.place == "home"
            require_rows(layer, long_cache().layers[0])


def _flipping(at: int) -> Callable[[bytearray], bytearray]:
    def flip(data: bytearray) -> bytearray:
        data[at] ^= 1
        return data

    return flip
