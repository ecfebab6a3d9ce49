"""`kvshelf bench rates`: the cost of a document and of a result is divided by as many as were written."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from kvshelf.corpus.row import Row
from kvshelf.corpus.run.journal import FileLines
from kvshelf_bench.stores import rates
from kvshelf_bench.stores.homes import made_in
from kvshelf_bench.stores.rates import home_rates, journal_s
from tests.store.objects.servers import S3Server
from tests.store.redis.servers import ValkeyServer

pytestmark = pytest.mark.slow


def test_what_a_folder_keeps_of_a_document_is_the_same_however_many_there_are(tmp_path: Path) -> None:
    """The WAL has one size for ten and for a thousand documents; a database page is larger than a document's rows."""
    place = tmp_path / "a folder, with a space"
    place.mkdir()
    found = []
    for documents in (10, 100):
        with made_in(f"disk://{place}") as home:
            found.append(home_rates(home, documents).index_bytes)
    few, many = found
    assert 1000 < many < 10_000  # a manifest of 32 layers, once; and its entries in index and job table
    assert few == pytest.approx(many, rel=0.5)


def test_what_a_redis_keeps_of_a_document_is_its_index_alone_wherever_the_blobs_are(
    tmp_path: Path, shared_s3: S3Server
) -> None:
    found = {}
    with ValkeyServer(tmp_path) as server:
        for query in ("", f"?blobs={quote(shared_s3.url('rates'), safe='')}"):
            with made_in(f"{server.url}{query}") as home:
                found[home.name] = home_rates(home, 50)
    in_redis, in_objects = found.values()
    assert 2000 < in_redis.index_bytes < 10_000  # a blob has 10 kB
    assert 2000 < in_objects.index_bytes < 10_000
    assert in_objects.server_s is not None
    assert in_objects.server_s > 0


def test_a_journal_is_given_as_many_results_as_it_is_divided_by(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    class Counting(FileLines):
        def append(self, results: list[Row]) -> None:  # type: ignore[override]
            given.append(len(results))
            super().append(results)

    monkeypatch.setattr(rates, "FileLines", Counting)
    assert journal_s(150) > 0
    assert given == [64, 64, 22]
