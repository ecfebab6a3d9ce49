"""A cache that extends another one, stored as the bytes that the other lacks. docs/internals/format.md describes
the table.

    table    magic, version, length, msgpack, then zeros up to a multiple of 64
    bytes    those of the cache's blob that lie in no base, in their order

The table says how the whole blob is put together: from runs of the file's own bytes, and of the bytes of its bases,
which are stored blobs of the cache's ancestors. A base is always a file: the table of a cache whose parent has a table
itself names the files that have the parent's bytes. All offsets are of plain bytes; each file is sealed for itself.
Nothing here is trusted: who reads the whole blob checks all its digests, as for any blob.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import msgpack

from kvshelf.artifact.blob.layer import aligned
from kvshelf.errors import BlobError
from kvshelf.store.blobs import Name, SeekableFile, StoredFile, is_name

MAGIC: Final = b"KVSPLICE"
VERSION: Final = 1

BASES_LIMIT: Final = 64
"""Most bases of a cache; one that would have more is written whole."""

TABLE_LIMIT: Final = 4 << 20
"""Bytes of a packed table."""

_FIXED: Final = struct.Struct("<8sHHI")


class SplicedRun(NamedTuple):
    """Bytes of a file: of the cache's own, behind its table (file 0), or of base number `file`, from 1 on."""

    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Splice:
    """The composition of a blob. bases: names of stored files, with their sizes there. runs: in the order of the blob,
    as few as possible; those of the own file follow each other from its first byte to its last."""

    bases: tuple[Name, ...]
    runs: tuple[SplicedRun, ...]

    @property
    def nbytes(self) -> int:
        """Of the whole blob."""
        return sum(run.nbytes for run in self.runs)

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb({"bases": self.bases, "runs": self.runs})
        fixed = _FIXED.pack(MAGIC, VERSION, 0, len(packed)) + packed
        return fixed.ljust(aligned(len(fixed)), b"\0")


def read_splice(file: StoredFile, nbytes: int, bases: Sequence[Name]) -> tuple[Splice, int]:
    """The table of a file of `nbytes` plain bytes, and how many bytes it takes.

    bases: those that the index says. Raises `BlobError` for any table that `pack` does not write (`bad_magic`,
    `newer_major`, `unknown_major`, `header_too_large`, `header_malformed`, `field_malformed`, `not_canonical`,
    `nonzero_padding`, `truncated`), for one with other bases (`unknown_base`), and for one whose runs of own bytes
    leave some out (`hole`), repeat some (`overlap`) or end elsewhere than the file (`length_mismatch`).
    """
    if nbytes < _FIXED.size:
        raise BlobError(f"the spliced file is cut off: it has {nbytes} bytes", reason="truncated")
    magic, version, flags, length = _FIXED.unpack(_read(file, 0, _FIXED.size))
    if magic != MAGIC:
        raise BlobError(f"the file does not begin with a table of its bases, but with {magic!r}", reason="bad_magic")
    if version != VERSION:
        raise BlobError(
            f"the table of bases has version {version}; this version of kvshelf reads {VERSION}. Upgrade kvshelf",
            reason="newer_major" if version > VERSION else "unknown_major",
        )
    if flags:
        raise BlobError(f"the table of bases has flags {flags}", reason="field_malformed")
    if length > TABLE_LIMIT:
        raise BlobError(
            f"the table of bases claims {length} bytes, the format allows {TABLE_LIMIT}", reason="header_too_large"
        )
    size = aligned(_FIXED.size + length)
    if nbytes < size:
        raise BlobError(f"the spliced file is cut off within its table: it has {nbytes} bytes", reason="truncated")
    padded = _read(file, _FIXED.size, size - _FIXED.size)
    if any(padded[length:]):
        raise BlobError("the padding after the table of bases is not zero", reason="nonzero_padding")
    splice = _parse(padded[:length])
    if list(splice.bases) != list(bases):
        raise BlobError("the table names other bases than the cache was stored with", reason="unknown_base")
    _require_own(splice, nbytes - size)
    return splice, size


def _read(file: StoredFile, start: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    file.read_ranges([(start, memoryview(data))])
    return bytes(data)


def _parse(packed: bytes) -> Splice:
    try:
        table = msgpack.unpackb(packed, strict_map_key=True, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise BlobError(f"the table of bases is no msgpack: {error!r:.80}", reason="header_malformed") from error
    if not isinstance(table, dict) or table.keys() != {"bases", "runs"}:
        raise _malformed("it has other fields than bases and runs")
    bases = tuple(_items(table["bases"], (str, int)))
    runs = tuple(SplicedRun(*item) for item in _items(table["runs"], (int, int, int)))
    if not 0 < len(bases) <= BASES_LIMIT or len({name for name, _ in bases}) < len(bases):
        raise _malformed(f"it has {len(bases)} bases, some perhaps twice; it may have 1 to {BASES_LIMIT}")
    if not all(is_name(name) for name, _ in bases):
        raise _malformed("a base has a name that no file has")
    if {run.file for run in runs} - {0} != set(range(1, len(bases) + 1)):
        raise _malformed("its runs are of other bases than it names")
    splice = Splice(bases, runs)
    follow = any(a.file == b.file and a.offset + a.nbytes == b.offset for a, b in pairwise(runs))
    if follow or splice.pack()[_FIXED.size :][: len(packed)] != packed:
        raise BlobError("the table of bases is not written as kvshelf writes it", reason="not_canonical")
    return splice


def _items(items: Any, types: tuple[type, ...]) -> Iterator[Any]:
    if not isinstance(items, list):
        raise _malformed("bases or runs are no list")
    for item in items:
        if not isinstance(item, list) or list(map(type, item)) != list(types):
            raise _malformed(f"{item!r:.80} is no base or run")
        *_, nbytes = item
        if any(isinstance(value, int) and not 0 <= value < 2**63 for value in item) or not nbytes:
            raise _malformed(f"{item!r:.80} has a number out of range")
        yield tuple(item)


def _require_own(splice: Splice, nbytes: int) -> None:
    end = 0
    for run in splice.runs:
        if run.file == 0:
            if run.offset != end:
                reason = "hole" if run.offset > end else "overlap"
                raise BlobError(f"own bytes are used from {run.offset} on, not from {end} on", reason=reason)
            end += run.nbytes
    if end != nbytes:
        raise BlobError(f"the table tells of {end} own bytes, the file has {nbytes}", reason="length_mismatch")


def _malformed(why: str) -> BlobError:
    return BlobError(f"the table of bases is malformed: {why}", reason="field_malformed")


class SplicedFile(SeekableFile):
    """A whole blob, read from several files, all of which it closes. files: the own file, then the bases; sizes: their
    plain bytes. table: bytes of the table before the own bytes. Raises `BlobError` for a run beyond the end of its file
    (`truncated`). Every read asks the files for exactly its bytes: what follows them there is seldom what is read
    next."""

    def __init__(self, splice: Splice, table: int, files: Sequence[StoredFile], sizes: Sequence[int]) -> None:
        super().__init__()
        self._files = files
        self._runs = [run._replace(offset=run.offset + table) if run.file == 0 else run for run in splice.runs]
        self._starts = list(accumulate((run.nbytes for run in self._runs[:-1]), initial=0))
        self.nbytes = splice.nbytes
        for run in self._runs:
            if run.offset + run.nbytes > sizes[run.file]:
                raise BlobError(
                    f"the table asks for bytes up to {run.offset + run.nbytes} of a file of {sizes[run.file]}",
                    reason="truncated",
                )

    def locate(self, start: int, nbytes: int) -> Iterator[SplicedRun]:
        """Where bytes of the blob lie: offsets count from the beginning of each file."""
        index = bisect_right(self._starts, start) - 1
        while nbytes:
            run, skipped = self._runs[index], start - self._starts[index]
            count = min(nbytes, run.nbytes - skipped)
            yield SplicedRun(run.file, run.offset + skipped, count)
            start, nbytes, index = start + count, nbytes - count, index + 1

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]], /) -> None:
        """See `StoredFile`: one request to each file, if its bytes are asked for in ascending order."""
        ranges_of: dict[int, list[tuple[int, memoryview]]] = {}
        for start, buffer in ranges:
            if start + len(buffer) > self.nbytes:
                raise BlobError("the blob ended early while it was read", reason="truncated")
            for run in self.locate(start, len(buffer)):
                of_file = ranges_of.setdefault(run.file, [])
                if of_file and of_file[-1][0] + len(of_file[-1][1]) > run.offset:  # a base may be used in any order
                    self._files[run.file].read_ranges(of_file)
                    of_file.clear()
                of_file.append((run.offset, buffer[: run.nbytes]))
                buffer = buffer[run.nbytes :]
        for file, of_file in ranges_of.items():
            self._files[file].read_ranges(of_file)

    def close(self) -> None:
        for file in self._files:
            file.close()
        super().close()

    def _read_some(self, view: memoryview) -> int:
        self.read_ranges([(self._position, view)])
        return len(view)
