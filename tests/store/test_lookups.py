"""A tenant cannot tell by the time of a look-up what other tenants have."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from tempfile import TemporaryFile
from typing import Any

import pytest

from kvshelf.errors import NotFound
from kvshelf.store.shelf import Shelf
from tests.store.caches import make_cache
from tests.store.places import DiskPlace, Place, RedisPlace

Lookup = Callable[[Shelf, str], Any]

LARGE = b"x" * (4 << 20)
UNKNOWN = "e" * 40


def _file(store: Shelf, content: bytes) -> str:
    with TemporaryFile() as file:
        file.write(content)
        return store.files.create(file, tenant="them", filename="", purpose="batch").id


LOOKUPS: dict[str, tuple[Callable[[Shelf], str], Lookup, str]] = {
    # How the other tenant's thing is made; the look-up; and what there is not.
    "label": (
        lambda _: "theirs",
        lambda store, value: store.list(tenant="me", labels={"case": value}),
        "nobody's",
    ),
    "name": (
        lambda _: "theirs.txt",
        lambda store, value: store.list(tenant="me", name=value),
        "nobody's",
    ),
    "short id": (
        lambda store: store.list(tenant="them").data[0].id[:12],
        lambda store, value: store.list(tenant="me", id_prefix=value),
        f"kvs_{UNKNOWN[:8]}",
    ),
    "cache": (
        lambda store: store.list(tenant="them").data[0].id,
        lambda store, id_: store.stat(id_, tenant="me"),
        f"kvs_{UNKNOWN}",
    ),
    "source": (
        lambda store: store.put(make_cache(10**6), tenant="them", source="word " * 100_000).id,
        lambda store, id_: store.source(id_, tenant="me"),
        f"kvs_{UNKNOWN}",
    ),
    "request": (
        lambda store: store.requests.open("req_" + "a" * 40, tenant="them", body=LARGE).id,
        lambda store, id_: store.requests.get(id_, tenant="me"),
        f"req_{UNKNOWN}",
    ),
    "file": (
        lambda store: _file(store, LARGE),
        lambda store, id_: store.files.get(id_, tenant="me"),
        f"file_{UNKNOWN}",
    ),
    "batch": (
        lambda store: store.batches.create("them", {"input": "x" * 100_000}, now=0, expires_at=1e12).id,
        lambda store, id_: store.batches.get(id_, tenant="me"),
        f"batch_{UNKNOWN}",
    ),
}


def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    with suppress(NotFound):
        assert not call().data, "another tenant's thing was found"
    return time.perf_counter() - began


@pytest.fixture(scope="module", params=["disk", "redis"])  # an index is all that a look-up needs
def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, soak: bool) -> Place:
    """A shelf with a cache of mine, and with many of theirs."""
    place: Place = DiskPlace(tmp_path_factory.mktemp("lookups") / "home")
    if request.param == "redis":
        place = RedisPlace(request.getfixturevalue("shared_valkey"))
    with place.open() as store:
        store.put(make_cache(1), tenant="me", labels={"case": "mine"})
        for seed in range(2, 2000 if soak else 150):
            store.put(make_cache(seed), tenant="them", name="theirs.txt", labels={"case": "theirs"})
    return place


@pytest.mark.slow
@pytest.mark.parametrize("what", LOOKUPS)
def test_another_tenant_s_thing_takes_as_long_as_none(filled: Place, what: str, soak: bool) -> None:
    """By another tenant's label a search took 184 ms in place of 0.03; a guessed request id 97 ms in place of 13."""
    make, look_up, nothing = LOOKUPS[what]
    draw = random.Random(18)
    with filled.open() as store:
        theirs = make(store)
        pairs: list[tuple[float, float]] = []
        for _ in range(1000 if soak else 300):
            taken = {key: timed(lambda key=key: look_up(store, key)) for key in draw.sample([theirs, nothing], 2)}
            pairs.append((taken[theirs], taken[nothing]))
    # Both look-ups of a pair meet the same load: a busy machine moves the middle of all pairs less than two medians.
    middle_s = statistics.median(unknown for _, unknown in pairs)
    more_s = statistics.median(known_s - unknown for known_s, unknown in pairs)
    spread_s = statistics.median(abs(known_s - unknown - more_s) for known_s, unknown in pairs)
    error_s = 1.253 * 1.4826 * spread_s / math.sqrt(len(pairs))  # of a median, by the normal distribution
    print(f"{what}: {middle_s * 1e6:.1f} us, another tenant's {more_s * 1e6:+.2f} +- {error_s * 1e6:.2f} us")
    assert abs(more_s) < 0.1 * middle_s + 10e-6 + 4 * error_s
