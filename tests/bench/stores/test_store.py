"""`kvshelf bench store` on a folder and on real servers: it times what it names, and removes its shelves."""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from urllib.parse import quote

import obstore
import pytest
from typer.testing import CliRunner

from kvshelf.errors import InvalidRequest, KvshelfError, StoreUnavailable
from kvshelf.kernels.dispatch import cpu_form
from kvshelf.store.shelf import Shelf
from kvshelf.store.url import open_store
from kvshelf_bench.cli import app
from kvshelf_bench.measure import status_bytes
from kvshelf_bench.stores.homes import Bare, BareFile, BareObject, BareValues, made_in
from kvshelf_bench.stores.manifests import OF_DOCUMENT, manifests
from kvshelf_bench.stores.store import GET, OURS, PUT, STEPS, PutSteps, random_cache, throughput, timed_put
from tests.store.objects.servers import BUCKET, S3Server
from tests.store.redis.servers import ValkeyServer

pytestmark = pytest.mark.slow

SMALL = ["--sizes", "0.1,0.3", "--layers", "2", "--rounds", "2", "--manifests", "30"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("bench")) as running:
        yield running


@pytest.fixture(params=["disk", "redis", "objects, index in disk", "objects, index in redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL under which the bench makes its shelf."""
    objects, _, index = request.param.rpartition("objects, index in ")
    if index == "disk":
        url = f"disk://{tmp_path}?"
    else:
        server: ValkeyServer = request.getfixturevalue("server")
        url = f"{server.url}?timeout_s=10&"
    return f"{url}{blobs_in(request.getfixturevalue('shared_s3'))}" if objects else url[:-1]


def blobs_in(server: S3Server) -> str:
    return f"blobs={quote(server.url('bench'), safe='')}"


def test_the_command_measures_every_home_says_what_and_leaves_nothing(
    tmp_path: Path, server: ValkeyServer, shared_s3: S3Server
) -> None:
    shared_s3.client().put_object(Bucket=BUCKET, Key="bench/theirs", Body=b"somebody else's")
    with server.client() as client:
        client.set("{kvshelf}:home", "somebody else's")
    place, report = tmp_path / "place", tmp_path / "report.json"
    place.mkdir()
    places = ["--store", f"disk://{place}", "--store", f"{server.url}?timeout_s=10"]
    places += ["--store", f"{server.url}?timeout_s=10&{blobs_in(shared_s3)}", "--output", str(report)]
    done = CliRunner().invoke(app, ["store", *SMALL, *places])
    assert done.exit_code == 0, done.output
    for said in (
        "page cache",
        "2 layers",
        "of 30 caches",
        "read back",
        "obstore 0.",
        "cores, load",
        f"on a CPU: {cpu_form()}",
    ):
        assert said in done.stdout
    found = json.loads(report.read_text())
    assert found["layers"] == 2
    assert [(row["home"], round(row["nbytes"] / 1e6, 1)) for row in found["throughput"]] == [
        ("disk", 0.1), ("disk", 0.3), ("redis", 0.1), ("redis", 0.3),
        ("objects, index in redis", 0.1), ("objects, index in redis", 0.3),
    ]  # fmt: skip
    for row in found["throughput"]:
        assert {*OURS, row["limit"]} <= row["ways"].keys()
        assert row["peer"] is None or row["peer"] in row["ways"]
        assert all(way["wall_s"]["low"] > 0 for way in row["ways"].values())
    homes = ["disk", "redis", "objects, index in redis"]
    assert [(row["home"], row["count"]) for row in found["manifests"]] == [(home, 30) for home in homes]
    assert not list(place.iterdir())
    assert shared_s3.keys("bench") == ["bench/theirs"]
    with server.client() as client:
        assert client.keys() == [b"{kvshelf}:home"]
        client.flushall()


@pytest.mark.parametrize(
    "options",
    [
        ["--sizes", "many"],
        ["--sizes", "1,0"],
        ["--sizes", "-1"],
        ["--sizes", "nan"],
        ["--parts", "everything"],
        ["--layers", "0"],
        ["--rounds", "0"],
        ["--manifests", "0"],
    ],
)
def test_bad_options_are_refused(options: list[str]) -> None:
    done = CliRunner().invoke(app, ["store", *options])
    assert done.exit_code == 2, done.output


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("ram:1GiB", InvalidRequest),
        ("ftp://host/folder", InvalidRequest),
        ("disk:///no/such/folder", InvalidRequest),
        ("redis://:secret@localhost?timeout_s=never", InvalidRequest),
        ("redis-cluster://:secret@localhost", InvalidRequest),
        ("disk:///tmp?blobs=s3://key:secret@bucket/prefix", InvalidRequest),
        ("disk:///no/such/folder?blobs=s3://bucket/prefix", InvalidRequest),
        ("s3://bucket/prefix", InvalidRequest),
        ("redis://:secret@127.0.0.1:1", StoreUnavailable),  # nobody listens there
    ],
)
def test_places_that_cannot_be_measured_are_refused(url: str, error: type[KvshelfError]) -> None:
    with pytest.raises(error) as refusal, made_in(url):
        pass
    assert "secret" not in str(refusal.value)


def test_a_missing_bucket_is_said_and_leaves_nothing(tmp_path: Path, shared_s3: S3Server) -> None:
    nobody = quote(shared_s3.url(bucket="nobody"), safe="")
    with (
        pytest.raises(StoreUnavailable, match="no bucket 'nobody'"),
        made_in(f"disk://{tmp_path}?blobs={nobody}") as home,
    ):
        home.open()
    assert not list(tmp_path.iterdir())


def test_the_default_place_is_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with made_in(None) as home:
        assert home.url.startswith(f"disk://{tmp_path}/kvshelf-bench-")
    assert not list(tmp_path.iterdir())


def test_a_random_cache_has_the_size_that_was_asked_for() -> None:
    cache = random_cache(2, 4)
    assert cache.pack().nbytes == pytest.approx(2e6, rel=0.02)
    assert [layer.entries for layer in cache.layers] == [cache.num_tokens] * 4  # an eighth of 8 heads' entries
    assert random_cache(2, 4, seed=1).identity != cache.identity


def test_the_ways_without_kvshelf_move_the_same_bytes(place: str) -> None:
    packed = random_cache(9, 2).pack()  # more than two chunks
    whole = b"".join(packed.buffers)
    with made_in(place) as home:
        bare = home.bare(packed)
        assert isinstance(bare, BareFile | BareValues | BareObject)
        for name, way in {**bare.writes, **bare.reads}.items():
            if not isinstance(bare, BareObject):
                bare.reused[:] = bytes(packed.nbytes)
            found = way()
            if isinstance(found, list):
                found = b"".join(found)
            if isinstance(found, bytes | memoryview):
                assert found == whole, name
            elif name == bare.limit and not isinstance(bare, BareObject):
                assert bare.reused == whole
            else:
                assert name in bare.writes


def test_what_the_ways_without_kvshelf_write_is_not_there_before(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for `put`, whose cache is deleted outside its time."""
    there: list[bool] = []

    def is_there(bare: Bare) -> bool:
        if isinstance(bare, BareFile):
            return bare.path.exists()
        if isinstance(bare, BareObject):
            return any(each["path"] == "bare" for each in obstore.list(bare.store).collect())
        assert isinstance(bare, BareValues)
        return bool(bare.client.exists(bare.key))

    def watched(bare: Bare) -> Bare:
        ((name, write),) = bare.writes.items()

        def look_and_write() -> None:
            there.append(is_there(bare))
            write()
            there.append(is_there(bare))

        bare.writes = {name: look_and_write}
        return bare

    with made_in(place) as home:
        made = home.bare
        monkeypatch.setattr(home, "bare", lambda packed: watched(made(packed)))
        throughput(home, 0.1, 2, rounds=2)
    assert there == [False, True] * 3  # a round is thrown away


def test_ratios_and_steps_are_those_of_put_and_get(place: str) -> None:
    with made_in(place) as home:
        found = throughput(home, 0.5, 3, rounds=3)
    assert (found.home, found.layers) == (home.name, 3)
    for own in (PUT, GET):
        assert (found.ways[own].ours.low, found.ways[own].ours.high) == (1, 1)
    limit, ours = found.ways[found.limit], found.ways[GET]
    assert limit.wall_s.low / ours.wall_s.high <= limit.ours.median <= limit.wall_s.high / ours.wall_s.low
    assert list(found.steps_s) == list(STEPS.values())
    assert sum(step.low for step in found.steps_s.values()) <= found.ways[PUT].wall_s.high


def test_every_put_writes(tmp_path: Path) -> None:
    """A cache that is there already would be found, not written."""
    steps, cache = PutSteps(), random_cache(0.1, 2)
    with made_in(f"disk://{tmp_path}") as home:
        index, blobs = home.open()
        with Shelf(index, blobs, on_step=steps) as store:
            for _ in range(3):
                timed_put(store, cache, steps)
    assert {name: len(seconds) for name, seconds in steps.seconds.items()} == dict.fromkeys(STEPS.values(), 3)


def test_the_shelf_that_is_listed_has_the_manifests_it_should(place: str) -> None:
    with made_in(place) as home:
        count = 2 * OF_DOCUMENT
        seen = []
        found = manifests(home, count, 1, lambda: seen.append(1))
        with open_store(home.url) as store:
            page = store.list(limit=1000)
            assert store.usage().caches == len(page.data) == len(seen) == found.count == count
            middle = page.data[count // 2]
            assert len(store.list(document_id=middle.document_id).data) == OF_DOCUMENT
            assert [each.id for each in store.list(labels={"team": middle.labels["team"]}).data] == [middle.id]
            assert not store.check()
        assert found.manifest_bytes == pytest.approx(len(middle.model_dump_json()), rel=0.05)
        assert re.fullmatch(r"[0-9a-f]{64}", middle.segment_digests[31])
    assert found.publish_s > 0
    assert {"open, first stat", "sweep", "check"} <= found.calls_s.keys()


def test_the_peak_is_that_of_the_asking_process_alone() -> None:
    ballast = bytearray(b"x") * (1 << 30)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
        assert 10 << 20 < alone.submit(status_bytes, "VmHWM").result() < len(ballast)
