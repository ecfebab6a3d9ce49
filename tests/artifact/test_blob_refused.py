"""Whatever is not a blob is refused, each fault under one name."""

from __future__ import annotations

import copy
import random
import re
from pathlib import Path

import pytest
import torch

from kvshelf.artifact.cache import CompressedCache
from kvshelf.errors import BlobError, CacheCorrupt
from kvshelf.store.disk import DiskStore
from tests.store.caches import parts_of, tensors_of
from tests.store.faults import CASES
from tests.store.hostile import (
    Make,
    Parts,
    chunk_blob,
    columns_blob,
    encoded_blob,
    file_of,
    indexed_blob,
    kept_blob,
    latents_blob,
    places,
    pruned_blob,
    refusal,
    require_one_form,
    residuals_blob,
    runs_blob,
    some_blob,
    state_blob,
    threes_blob,
    two_layers,
    whole_blob,
    window_blob,
)

ROOT = Path(__file__).parents[2]


SOME = [
    some_blob, encoded_blob, kept_blob, two_layers, whole_blob, runs_blob, window_blob, chunk_blob, indexed_blob,
    latents_blob, pruned_blob, residuals_blob, state_blob, threes_blob, columns_blob,
]  # fmt: skip


@pytest.mark.parametrize("make", SOME)
def test_a_blob_put_together_again_is_the_same(make: Make) -> None:
    """Otherwise the cases below would be refused for the wrong cause."""
    assert Parts(make()).join() == make()


def test_the_arrays_are_where_the_format_says() -> None:
    """Otherwise the cases below would change other bytes than they say."""
    (layer,) = CompressedCache.from_bytes(encoded_blob()).layers
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
    with pytest.raises(BlobError) as error:
        CompressedCache.from_bytes(parts.join())
    assert error.value.reason == reason, error.value
    assert error.value.details["reason"] == reason
    assert isinstance(error.value, CacheCorrupt)


def test_a_header_is_at_most_thirty_two_levels_deep() -> None:
    """A parameter lies on the fourth."""
    for levels, reason in ((28, ""), (29, "header_malformed")):
        parts = Parts(some_blob())
        parts.put_raw(b"\x91" * levels + b"\x01")
        assert refusal(parts.join()) == reason


STRANGE = (
    None, True, -1, 0, 1, 2, 3, 5, 7, 8, 9, 16, 63, 64, 128, 2**16, 2**31 - 1, 2**31, 2**62, 2**63, 0.5, b"", b"x" * 32,
    "", "none", "kept", "window", "chunk", "indexed", "latents", "pruned", "residuals", "merged",
    "int2", "int8", "mixed:high=none", "range",
    "bitmap", "delta", "pre", "float16", "conv", "recurrent", [], [0], [1, 1], [2**31 - 1] * 4, {}, {"kind": "kept"},
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        some_blob,
        encoded_blob,
        kept_blob,
        window_blob,
        chunk_blob,
        indexed_blob,
        latents_blob,
        pruned_blob,
        residuals_blob,
        state_blob,
    ],
)
def test_a_writer_that_signs_anything_gets_a_named_refusal(make: Make, soak: bool) -> None:
    """Random changes of header and body under digests that fit: refused as a blob, or taken and written the same."""
    rng = random.Random(20261120)
    taken = 0
    for _ in range(5_000 if soak else 500):
        parts = Parts(make())
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            *path, last = rng.choice(list(places(parts.fields)))
            within = parts.fields
            for key in path:
                within = within[key]
            within[last] = copy.deepcopy(rng.choice(STRANGE))
        for _ in range(rng.choice((0, 0, 1, 3))):
            parts.body[rng.randrange(len(parts.body))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        if refusal(data := parts.join()) == "":
            require_one_form(data)
            taken += 1
    assert taken > 20, "changes of numbers and of free text are fine"


def test_every_reason_is_tested_and_documented() -> None:
    source = "".join(path.read_text() for path in (ROOT / "kvshelf/artifact/blob").rglob("*.py"))
    source += (ROOT / "kvshelf/artifact/positions.py").read_text()
    named = set(re.findall(r'reason="(\w+)"', source))
    elsewhere = {"digest_mismatch", "wrong_shape", "coded_malformed"}  # see test_shape.py and test_klt.py
    tested = {reason for reason, _, _ in CASES.values()} | elsewhere
    page = (ROOT / "docs/internals/format.md").read_text()
    section = page.partition("\n## What is refused\n")[2].partition("\n## ")[0]
    documented = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    assert tested == documented
    assert named <= tested


@pytest.mark.slow
def test_no_file_of_a_hostile_writer_is_read_from_a_shelf(home: Path) -> None:
    """Their digests fit, but they are not what was put."""
    with DiskStore.open(home) as store:
        for name, (reason, make, edit) in CASES.items():
            parts = Parts(make())
            edit(parts)
            cache_id = store.put(CompressedCache.from_bytes(make())).id
            file_of(home, cache_id).write_bytes(parts.join())
            with pytest.raises(CacheCorrupt) as error:
                store.get(cache_id)
            assert error.value.details["reason"] in {reason, "truncated", "trailing_bytes", "wrong_blob"}, name
        assert store.list().data == ()
