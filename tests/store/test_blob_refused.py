"""Whatever is not a blob is refused, each fault under one name."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvshelf.errors import BlobError, CacheCorrupt
from kvshelf.store import blob
from tests.store import faults_1_0, faults_1_1
from tests.store.caches import make_cache, parts_of, tensors_of
from tests.store.hostile import Make, Parts, encoded_blob, kept_blob, some_blob

ROOT = Path(__file__).parent.parent.parent
CASES = faults_1_0.CASES | faults_1_1.CASES


@pytest.mark.parametrize("make", [some_blob, encoded_blob, kept_blob])
def test_a_blob_put_together_again_is_the_same(make: Make) -> None:
    """Otherwise the cases below would be refused for the wrong cause."""
    assert Parts(make()).join() == make()


def test_the_arrays_are_where_the_format_says() -> None:
    """Otherwise the cases below would change other bytes than they say."""
    (layer,) = blob.decode(encoded_blob()).layers
    parts = Parts(encoded_blob())
    for index, part in enumerate(parts_of(layer)):
        for name, tensor in tensors_of(part).items():
            if name.startswith(("keys", "values", "slot_scales")):
                expected = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                assert bytes(parts.array(index, name.replace("_", " "))) == expected, name


@pytest.mark.parametrize("name", CASES)
def test_each_fault_has_one_name(name: str) -> None:
    reason, make, edit = CASES[name]
    parts = Parts(make())
    edit(parts)
    with pytest.raises(BlobError) as refusal:
        blob.decode(parts.join())
    assert refusal.value.reason == reason, refusal.value
    assert refusal.value.details["reason"] == reason
    assert isinstance(refusal.value, CacheCorrupt)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in nested maps and arrays."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


STRANGE = (
    None, True, -1, 0, 1, 2, 3, 5, 7, 8, 9, 16, 63, 64, 128, 2**16, 2**31 - 1, 2**31, 2**62, 2**63, 0.5, b"", b"x" * 32,
    "", "none", "kept", "merged", "records", "int2", "int8", "mixed:high=none", "range", "bitmap", "delta", "pre",
    "float16", [], [0], [1, 1], [2**31 - 1] * 4, {}, {"kind": "kept"},
)  # fmt: skip


@pytest.mark.parametrize("make", [some_blob, encoded_blob, kept_blob])
def test_a_writer_that_signs_anything_gets_a_named_refusal(make: Make, soak: bool) -> None:
    """Random changes of header and body under digests that fit: refused as a blob, or taken and written the same."""
    rng = random.Random(20261120)
    taken = 0
    for _ in range(20_000 if soak else 1500):
        parts = Parts(make())
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            *path, last = rng.choice(list(places(parts.fields)))
            within = parts.fields
            for key in path:
                within = within[key]
            within[last] = copy.deepcopy(rng.choice(STRANGE))
        for _ in range(rng.choice((0, 0, 1, 3))):
            parts.body[rng.randrange(len(parts.body))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        try:
            data = parts.join()
        except (TypeError, AttributeError):  # no header can say this, or no digest can be put into it
            continue
        try:
            cache = blob.decode(data)
        except BlobError:
            continue
        taken += 1
        assert cache.to_bytes() == data
    assert taken > 20, "changes of numbers and of free text are fine"


def test_a_changed_segment_is_found_by_its_own_digest() -> None:
    data = bytearray(make_cache().to_bytes())
    data[-100] ^= 1
    with pytest.raises(BlobError, match="segment 1 is not what was written") as refusal:
        blob.decode(data)
    assert refusal.value.reason == "digest_mismatch"


def test_every_reason_is_tested_and_documented() -> None:
    assert len(CASES) == len(faults_1_0.CASES) + len(faults_1_1.CASES), "no two faults have one name"
    source = "".join(path.read_text() for path in (ROOT / "kvshelf/store").glob("blob*.py"))
    source += (ROOT / "kvshelf/store/positions.py").read_text()
    named = set(re.findall(r'reason="(\w+)"', source))
    tested = {reason for reason, _, _ in CASES.values()} | {"digest_mismatch"}
    section = (ROOT / "docs/format.md").read_text().partition("## What is refused")[2]
    documented = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    assert tested == documented
    assert named <= tested


@pytest.mark.parametrize("make", [some_blob, encoded_blob])
def test_every_truncation_is_refused_as_such(make: Make) -> None:
    data = make()
    for size in range(len(data)):
        with pytest.raises(BlobError) as refusal:
            blob.decode(data[:size])
        assert refusal.value.reason == "truncated", size


@pytest.mark.parametrize("extra", [b"\0", b"\0" * 64, b"x" * 1000])
def test_nothing_may_follow(extra: bytes) -> None:
    with pytest.raises(BlobError) as refusal:
        blob.decode(some_blob() + extra)
    assert refusal.value.reason == "trailing_bytes"


@pytest.mark.parametrize("make", [some_blob, encoded_blob])
def test_every_bit_of_a_small_blob_counts(make: Make) -> None:
    """Not a sample: all of them. The first 16 bytes have their own reasons, the rest are found by digests."""
    data = bytearray(make())
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BlobError) as refusal:
            blob.decode(data)
        assert bit < 128 or refusal.value.reason == "digest_mismatch"
        data[bit // 8] ^= 1 << bit % 8
    blob.decode(data)


@pytest.mark.parametrize("codec", ["none", "int2"])
def test_random_bit_flips_of_a_large_blob_are_refused(soak: bool, codec: str) -> None:
    rng = random.Random(20261120)
    data = bytearray(make_cache(num_tokens=4096, lengths=((2048, 1024),) * 4, dims=(32, 32)).to_bytes(codec))
    refused = 0
    for _ in range(1000 if soak else 50):
        bit = rng.randrange(len(data) * 8)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BlobError):
            blob.decode(data)
        refused += 1
        data[bit // 8] ^= 1 << bit % 8
    blob.decode(data)
    assert refused == (1000 if soak else 50)
