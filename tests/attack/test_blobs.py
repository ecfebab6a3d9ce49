"""Blobs with right digests and lying content: each is refused by name, or answers as any cache does."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvshelf import CompressedCache
from tests.amounts import few
from tests.attack.conftest import Attacked
from tests.attack.watch import watched
from tests.service.conftest import created, refused
from tests.store.caches import make_cache
from tests.store.hostile import Parts, places

DOCUMENT = "Every chest in the hold has a number and a seal. " * 12
BLOB = {"content-type": "application/octet-stream"}
MB = 1 << 20

NUMBERS = (0, 1, -1, 2, 7, 64, 127, 128, 300, 4096, 65_536, 20_000_000, 2**31 - 1, 2**31, 2**63 - 1, 0.5, -0.0, 1e308)
OTHERS: tuple[Any, ...] = (
    "",
    "none",
    "int4",
    "range",
    "bitmap",
    "delta",
    "merged",
    "float16",
    "\ud7ff",
    b"",
    b"\0" * 32,
    None,
    True,
    [],
    {},
)


@pytest.fixture(scope="module")
def blobs(attacked: Attacked) -> list[bytes]:
    """Exported caches of the served model: whole, of ragged heads, merged and encoded, and in streams."""
    options: list[dict[str, Any]] = [
        {"policy": "full"},
        {"policy": "lagkv", "compression_ratio": 0.9, "codec": "int8"},
        {"policy": "ems", "compression_ratio": 0.5, "codec": "int4"},
        {"policy": "full", "codec": "klt"},
        {"policy": "full", "codec": "lossless"},
        {"policy": "kvzip", "compression_ratio": 0.5, "codec": "klt"},
    ]
    with attacked.client("alice") as client:
        ids = [created(client, document=DOCUMENT, **chosen)["id"] for chosen in options]
        return [client.get(f"/v1/caches/{cache_id}/blob").content for cache_id in ids]


def imported(client: httpx.Client, blob: bytes) -> httpx.Response:
    return client.post("/v1/caches/import", content=blob, headers=BLOB)


def emptied(blob: bytes, heads: int, tokens: int) -> bytes:
    """A blob of a kilobyte or so that claims so many heads and tokens, of which it keeps none."""
    cache = CompressedCache.from_bytes(blob)
    layers = make_cache(lengths=((0,) * heads,) * len(cache.layers), dims=(16, 16)).layers
    parts = Parts(replace(cache, layers=layers, codec="none", sentence_ends=()).to_bytes())
    parts.fields["num_tokens"] = parts.fields["next_position"] = parts.fields["identity"]["num_tokens"] = tokens
    return parts.join()


def long(blob: bytes, tokens: int) -> bytes:
    """A blob whose positions are deltas of one byte each, all of entries that take next to nothing."""
    cache = CompressedCache.from_bytes(blob)
    layer = make_cache(lengths=((tokens // 16,),), num_tokens=tokens, dims=(1, 1)).layers[0]
    identity = replace(cache.identity, num_tokens=tokens)
    return CompressedCache((layer,), tokens, tokens, identity).to_bytes("int2:residual=0")


@pytest.mark.parametrize(
    ("make", "problem"),
    few(
        1,
        [
            (lambda blob: emptied(blob, 2, 20_000_000), "20000000 tokens"),
            (lambda blob: emptied(blob, 300, 1_000_000), "300 KV heads"),
            (lambda blob: long(blob, 64 << 20), "layers"),
        ],
    ),
    ids=["tokens", "heads", "deltas"],
)
def test_a_blob_is_checked_against_its_model_before_anything_is_allocated(
    attacked: Attacked, mallory: httpx.Client, blobs: list[bytes], make: Callable[[bytes], bytes], problem: str
) -> None:
    """They were accepted, and took 500, 925 and 664 MB."""
    blob = make(blobs[0])
    pids = [attacked.service.front_end_pid(), *attacked.service.replica_pids()]
    for pid in pids:
        with watched(attacked.url, pid) as seen:
            response = imported(mallory, blob)
        print(f"{len(blob)} bytes: {response.status_code}, {seen.peak_bytes - seen.base_bytes >> 20} MB more")
        assert problem in refused(response, 424, "cache_corrupt")["message"]
        assert seen.peak_bytes - seen.base_bytes < 30 * MB + 2 * len(blob)


def test_a_blob_of_a_model_that_is_not_served_is_refused_by_name(mallory: httpx.Client) -> None:
    refused(imported(mallory, make_cache().to_bytes()), 409, "model_mismatch")


class Forger:
    """Makes blobs with right digests and lying content, from good ones."""

    def __init__(self, blobs: list[bytes], seed: int) -> None:
        self.random = random.Random(seed)
        self._blobs = blobs

    def blob(self) -> bytes:
        make = self.random.choice([self._field, self._field, self._two_fields, self._shape, self._content, self._array])
        return make(self.random.choice(self._blobs))

    def _value(self) -> Any:
        return self.random.choice(NUMBERS if self.random.random() < 0.7 else OTHERS)

    def _put(self, parts: Parts) -> None:
        path = self.random.choice(list(places(parts.fields)))
        within: Any = parts.fields
        for key in path[:-1]:
            within = within[key]
        found = within[path[-1]]
        near = type(found) is int and self.random.random() < 0.5
        within[path[-1]] = found + self.random.choice((-1, 1)) if near else self._value()

    def _field(self, blob: bytes) -> bytes:
        parts = Parts(blob)
        self._put(parts)
        return _joined(parts, blob)

    def _two_fields(self, blob: bytes) -> bytes:
        """The same change in two places that have to agree, such as the number of tokens."""
        parts, tokens = Parts(blob), self.random.choice(NUMBERS)
        parts.fields["num_tokens"] = parts.fields["identity"]["num_tokens"] = tokens
        parts.fields["sentence_ends"] = b""  # they would have to end with the document
        if self.random.random() < 0.5:
            parts.fields["next_position"] = tokens
        return _joined(parts, blob)

    def _shape(self, blob: bytes) -> bytes:
        """A whole cache with other layers, heads or channels."""
        cache, draw = CompressedCache.from_bytes(blob), self.random
        tokens = draw.choice([cache.num_tokens, draw.randrange(1, 400)])
        heads, layers = draw.choice([2, draw.randrange(1, 9)]), draw.choice([2, draw.randrange(1, 9)])
        lengths = [[draw.randrange(tokens + 1) for _ in range(heads)] for _ in range(layers)]
        dims = (draw.choice([16, 8, 1]), draw.choice([16, 8, 1]))
        made = make_cache(draw.randrange(99), num_tokens=tokens, lengths=lengths, dims=dims)
        document = f"{draw.randrange(1 << 99):040x}"
        identity = replace(cache.identity, num_tokens=tokens, document=document, transforms="")
        return replace(made, identity=identity).to_bytes(draw.choice(["none", "int8", "int4:group=8", "int2"]))

    def _content(self, blob: bytes) -> bytes:
        """Other bytes in the place of keys, values, scales and positions: numbers that are none, positions out of
        order."""
        parts = Parts(blob)
        start = self.random.randrange(len(parts.body))
        stop = min(len(parts.body), start + self.random.choice((1, 64, 4096)))
        fill = self.random.choice((b"\xff", b"\0", b"\x7f", b""))
        parts.body[start:stop] = fill * (stop - start) if fill else self.random.randbytes(stop - start)
        return _joined(parts, blob)

    def _array(self, blob: bytes) -> bytes:
        """Every number of the first keys or values at once, or every word of their streams."""
        parts = Parts(blob)
        arrays = ("keys", "values", "keys scales", "values zeros", "keys coded", "values coded")
        names = [name for name in arrays if _has(parts, name)]
        array = parts.array(0, self.random.choice(names))
        array[:] = self.random.choice((b"\xff", b"\x7f", b"\0")) * len(array)
        del array
        return _joined(parts, blob)


def _has(parts: Parts, name: str) -> bool:
    try:
        parts.array(0, name)
    except KeyError:
        return False
    return True


def _joined(parts: Parts, blob: bytes) -> bytes:
    try:
        return parts.join()
    except (ValueError, OverflowError, TypeError):  # no header says such a thing
        return blob


def used(client: httpx.Client, cache_id: str) -> list[httpx.Response]:
    """Everything that can be asked of a cache."""
    path = f"/v1/caches/{cache_id}"
    short = {"max_tokens": 2}
    answers = [
        client.get(path),
        client.post(f"{path}/query", json={"prompt": "Which seal?"} | short),
        client.post(f"{path}/query", json={"prompt": ["One?", "Two?"], "seed": 1, "temperature": 1} | short),
        client.get(f"{path}/kept"),
        client.post(f"{path}/kept", json={"document": DOCUMENT}),
        client.post(f"{path}/verify"),
        client.get(f"{path}/blob"),
    ]
    return [*answers, client.delete(path)]


def test_forged_blobs_crash_nothing(attacked: Attacked, mallory: httpx.Client, blobs: list[bytes], soak: bool) -> None:
    forger, tally = Forger(blobs, seed=18), Counter[str]()
    pids = {attacked.service.front_end_pid(), *attacked.service.replica_pids()}
    for number in range(10_000 if soak else 150):
        blob = forger.blob()
        response = imported(mallory, blob)
        answers = [response]
        if response.status_code in (200, 201):
            answers += used(mallory, response.json()["id"])
        for answer in answers:
            code = answer.json()["error"]["code"] if answer.status_code >= 400 else "ok"
            tally[f"{answer.request.method} {answer.status_code} {code}"] += 1
            assert answer.status_code < 500, (number, answer.text)
    print(dict(tally))
    assert {attacked.service.front_end_pid(), *attacked.service.replica_pids()} == pids
    assert tally["POST 201 ok"] > 0, "no forged blob was good enough to be asked"
