"""The table of a spliced file: what is written is read, anything else is a named error."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvshelf.artifact import blob
from kvshelf.errors import BlobError, CacheCorrupt
from kvshelf.store.blobs import StoredFile, new_name
from kvshelf.store.disk import DiskStore
from kvshelf.store.rules import Rules
from kvshelf.store.sealing.keyring import Keyring
from kvshelf.store.splice import BASES_LIMIT, TABLE_LIMIT, Splice, SplicedFile, SplicedRun, read_splice
from kvshelf.store.splice.sharing import shared_with, spliced
from tests.store.caches import extended, family, make_cache, require_equal

NAMES = [new_name(f"kvs_{number:040x}") for number in range(3)]
BASES = ((NAMES[0], 1000), (NAMES[1], 500))
OWN = 300
SPLICE = Splice(
    BASES,
    (
        SplicedRun(0, 0, 100),
        SplicedRun(1, 40, 900),
        SplicedRun(0, 100, 200),
        SplicedRun(2, 0, 500),
        SplicedRun(1, 0, 40),
    ),
)


class BytesFile(io.BytesIO, StoredFile):  # type: ignore[misc]
    """Bytes as a stored file."""


def table(splice: Any = SPLICE, *, own: int = OWN, **fixed: Any) -> bytes:
    """A file with any table."""
    packed = fixed.get("packed") or msgpack.packb({"bases": splice.bases, "runs": splice.runs})
    length = fixed.get("length", len(packed))
    head = struct.pack(
        "<8sHHI", fixed.get("magic", b"KVSPLICE"), fixed.get("version", 1), fixed.get("flags", 0), length
    )
    return (head + packed).ljust(-(-(len(head) + len(packed)) // 64) * 64, fixed.get("pad", b"\0")) + b"o" * own


def read(data: bytes) -> tuple[Splice, int]:
    return read_splice(BytesFile(data), len(data), BASES)


def test_a_table_is_read_as_it_was_written() -> None:
    assert read(SPLICE.pack() + b"o" * OWN) == (SPLICE, len(SPLICE.pack()))
    assert table() == SPLICE.pack() + b"o" * OWN
    assert SPLICE.nbytes == 1740


def runs(*of: tuple[Any, ...]) -> Splice:
    return Splice(BASES, tuple(of))  # type: ignore[arg-type]


def packed(value: Any) -> bytes:
    return table(packed=msgpack.packb(value))


RIGHT = {"bases": BASES, "runs": SPLICE.runs}

HOSTILE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "empty": ("truncated", lambda: b""),
    "cut within the table": ("truncated", lambda: table()[:70]),
    "magic": ("bad_magic", lambda: table(magic=b"KVSHELF\n")),
    "next version": ("newer_major", lambda: table(version=2)),
    "version 0": ("unknown_major", lambda: table(version=0)),
    "flags": ("field_malformed", lambda: table(flags=1)),
    "length over the limit": ("header_too_large", lambda: table(length=TABLE_LIMIT + 1)),
    "length beyond the file": ("truncated", lambda: table(length=TABLE_LIMIT)),
    "padding": ("nonzero_padding", lambda: table(pad=b"\1")),
    "no msgpack": ("header_malformed", lambda: table(packed=b"\xc1")),
    "two values": ("header_malformed", lambda: table(packed=b"\x80\x80")),
    "an extension": ("header_malformed", lambda: packed(RIGHT | {"runs": msgpack.ExtType(4, b"code")})),
    "deep nesting": ("header_malformed", lambda: table(packed=b"\x91" * 5000 + b"\xc0")),
    "array of a billion": ("header_malformed", lambda: table(packed=b"\xdd\x40\0\0\0")),
    "a list": ("field_malformed", lambda: packed([BASES, SPLICE.runs])),
    "no runs": ("field_malformed", lambda: packed({"bases": BASES})),
    "another field": ("field_malformed", lambda: packed(RIGHT | {"total": 1740})),
    "runs that are a map": ("field_malformed", lambda: packed(RIGHT | {"runs": {}})),
    "a run of two numbers": ("field_malformed", lambda: packed(RIGHT | {"runs": [[0, 0]]})),
    "a run of a flag": ("field_malformed", lambda: packed(RIGHT | {"runs": [[False, 0, 300]]})),
    "a run of a float": ("field_malformed", lambda: packed(RIGHT | {"runs": [[0, 0, 300.0]]})),
    "a negative offset": ("field_malformed", lambda: table(runs((0, 0, 300), (1, -1, 9), (2, 0, 9)))),
    "an offset that wraps": ("field_malformed", lambda: table(runs((0, 0, 300), (1, 2**63, 9), (2, 0, 9)))),
    "an empty run": ("field_malformed", lambda: table(runs((0, 0, 300), (1, 0, 0), (2, 0, 9)))),
    "a base that there is not": ("field_malformed", lambda: table(runs((0, 0, 300), (1, 0, 9), (3, 0, 9)))),
    "a base that is not used": ("field_malformed", lambda: table(runs((0, 0, 300), (1, 0, 9)))),
    "no base": ("field_malformed", lambda: table(Splice((), (SplicedRun(0, 0, 300),)))),
    "a base twice": ("field_malformed", lambda: table(Splice((BASES[0], BASES[0]), SPLICE.runs))),
    "too many bases": (
        "field_malformed",
        lambda: table(
            Splice(
                tuple((new_name("kvs_" + "0" * 40), 9) for _ in range(BASES_LIMIT + 1)),
                tuple(SplicedRun(number, 0, 9) for number in range(BASES_LIMIT + 2)),
            )
        ),
    ),
    "a name with a path": ("field_malformed", lambda: table(Splice((("../../shelf", 9), BASES[1]), SPLICE.runs))),
    "another base than the index says": (
        "unknown_base",
        lambda: table(Splice(((NAMES[2], 1000), BASES[1]), SPLICE.runs)),
    ),
    "a base of another size": ("unknown_base", lambda: table(Splice(((NAMES[0], 999), BASES[1]), SPLICE.runs))),
    "bases in another order": ("unknown_base", lambda: table(Splice(BASES[::-1], SPLICE.runs))),
    "runs that could be one": (
        "not_canonical",
        lambda: table(runs((0, 0, 100), (0, 100, 200), (1, 0, 9), (2, 0, 9))),
    ),
    "fields in another order": ("not_canonical", lambda: packed(dict(reversed(RIGHT.items())))),
    "a key twice": (
        "not_canonical",
        lambda: table(packed=b"\x83\xa5bases\x90" + msgpack.packb(RIGHT)[1:]),
    ),
    "a long integer": (
        "not_canonical",
        lambda: table(packed=msgpack.packb(RIGHT).replace(b"\x93\0\0\x64", b"\x93\0\0\xcc\x64")),
    ),
    "own bytes left out": ("hole", lambda: table(runs((0, 0, 100), (1, 0, 9), (0, 200, 100), (2, 0, 9)))),
    "own bytes twice": ("overlap", lambda: table(runs((0, 0, 100), (1, 0, 9), (0, 50, 200), (2, 0, 9)))),
    "fewer own bytes than there are": ("length_mismatch", lambda: table(own=OWN + 1)),
    "more own bytes than there are": ("length_mismatch", lambda: table(own=OWN - 1)),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_table_is_a_named_error(case: str) -> None:
    reason, make = HOSTILE[case]
    with pytest.raises(BlobError) as caught:
        read(make())
    assert caught.value.reason == reason


@pytest.mark.parametrize("run", [SplicedRun(1, 101, 900), SplicedRun(1, 2**62, 2**62), SplicedRun(2, 0, 501)])
def test_a_run_beyond_the_end_of_its_base(run: SplicedRun) -> None:
    splice = Splice(BASES, (*SPLICE.runs, run))
    with pytest.raises(BlobError) as caught:
        SplicedFile(splice, 0, [BytesFile()] * 3, [300, 1000, 500])
    assert caught.value.reason == "truncated"


def test_a_spliced_file_reads_as_the_bytes_it_joins() -> None:
    contents = [bytes(range(100)) * 3, bytes(range(250)) * 4, bytes(range(125)) * 4]
    files = [BytesFile(SPLICE.pack() + contents[0]), *map(BytesFile, contents[1:])]
    start = len(SPLICE.pack())
    file = SplicedFile(SPLICE, start, files, [start + 300, 1000, 500])
    whole = b"".join(contents[run.file][run.offset : run.offset + run.nbytes] for run in SPLICE.runs)
    assert file.read() == whole
    for first, last in ((0, 1740), (90, 1200), (1699, 1701), (1739, 1740)):
        file.seek(first)
        assert file.read(last - first) == whole[first:last]
    buffers = [(0, memoryview(bytearray(150))), (990, memoryview(bytearray(750)))]
    file.read_ranges(buffers)
    assert [bytes(buffer) for _, buffer in buffers] == [whole[:150], whole[990:]]
    with pytest.raises(BlobError, match="ended early"):
        file.read_ranges([(1739, memoryview(bytearray(2)))])
    file.close()
    assert all(file.closed for file in files)


def splice_of(child: Any, parent: Any) -> Splice | None:
    whole = parent.to_bytes()
    file = BytesFile(whole)
    shared = shared_with(child.pack(), blob.open_file(file, len(whole)), file)  # type: ignore[arg-type]
    file_parts = spliced(child.pack(), shared, (NAMES[0], len(whole)), file, ())
    if file_parts is None:
        return None
    assert file_parts.nbytes == sum(len(buffer) for part in file_parts.parts for buffer in part)
    own = b"".join(buffer for part in file_parts.parts for buffer in part)
    splice, start = read_splice(BytesFile(own), len(own), file_parts.splice.bases)
    assert SplicedFile(splice, start, [BytesFile(own), file], [len(own), len(whole)]).read() == child.to_bytes()
    return file_parts.splice


def test_whole_records_are_shared_in_few_runs() -> None:
    parent = make_cache(num_tokens=160, lengths=((64, 64), (100, 28)), dims=(64, 64))
    splice = splice_of(extended(parent), parent)
    assert splice is not None
    assert [run.file for run in splice.runs] == [0, 1, 0, 1, 0], "keys and values of a layer together"


def test_small_arrays_are_written_again() -> None:
    parent = make_cache()
    assert splice_of(extended(parent), parent) is None


def test_other_numbers_are_not_shared() -> None:
    """One number differs in a layer's keys; its values are shared, and the other layer."""
    parent = make_cache(num_tokens=160, lengths=((64, 64), (100, 28)), dims=(64, 64))
    child = extended(parent)
    child.layers[0].parts[0].keys[-1, -1] += 1  # type: ignore[union-attr]  # which is the parent's memory, too
    changed = make_cache(num_tokens=160, lengths=((64, 64), (100, 28)), dims=(64, 64))
    before, after = splice_of(child, parent), splice_of(child, changed)
    assert before is not None
    assert after is not None
    assert (
        sum(run.nbytes for run in before.runs if run.file) - sum(run.nbytes for run in after.runs if run.file) == 32768
    )


@pytest.mark.parametrize("sealed", [False, True])
def test_the_bytes_of_another_tenant_are_no_base(tmp_path: Path, sealed: bool) -> None:
    """Whoever can write to the home, but not to the index, cannot make one tenant's cache read another's bytes."""
    rules = Rules(keyring=Keyring([b"k" * 32])) if sealed else Rules()
    root, child = family(2)
    with DiskStore.open(tmp_path, rules=rules) as store:
        theirs = store.put(root, tenant="you")
        mine = store.put(root)
        manifest = store.put(child, parent_id=mine.id)
        entry, other = store.index.find(manifest.id, "default"), store.index.find(theirs.id, "you")
        assert entry is not None
        assert other is not None
        require_equal(child, store.get(manifest.id))
        path = tmp_path / "blobs" / f"{entry.name}.kvb"
        if sealed:
            (tmp_path / "blobs" / f"{entry.bases[0][0]}.kvb").write_bytes(
                (tmp_path / "blobs" / f"{other.name}.kvb").read_bytes()
            )
        else:
            data = path.read_bytes().replace(entry.bases[0][0].encode(), str(other.name).encode())
            path.write_bytes(data)
        with pytest.raises(CacheCorrupt, match="does not open" if sealed else "other bases"):
            store.get(manifest.id)
