"""Memory into which stored caches are read."""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from contextlib import suppress
from io import RawIOBase
from typing import Final

import numpy as np
import numpy.typing as npt

from kvshelf.errors import BlobError

_HUGE_PAGE: Final = 2 << 20  # bytes, on x86-64 and on arm64 with pages of 4 KiB
_SPARE_BYTES: Final = 512 << 20

spare: Final[deque[mmap.mmap]] = deque(maxlen=1)
"""The last block released, unless larger than `_SPARE_BYTES`. Shared by the whole process."""


def fresh_memory(size: int) -> memoryview:
    """Zeroed memory for `size` bytes of a file.

    The file is not mapped: its bytes could change after verification, and a truncated file would kill the process.
    Pages are huge, because touching fresh memory page by page takes several times as long as the reading itself (39
    against 5 ms for 64 MiB). The kernel gives huge pages to aligned memory only and may map unaligned memory, so more
    addresses than bytes are reserved. The last page is huge if that wastes less than half of it.
    """
    return _view(np.frombuffer(_mapped(size), np.uint8), size)


def used_memory(size: int) -> memoryview:
    """The last released block if it is large enough, else `fresh_memory`. The content is undefined: fill all of it.

    Even with huge pages, a first touch takes a third of the time of reading and hashing together (9 against 26 ms for
    64 MB). A process that drops one cache for the next has such a block, whose pages the kernel may reclaim meanwhile.
    """
    block = _take_spare(size) or _mapped(size)
    owner = np.frombuffer(block, np.uint8)  # alive for as long as anything views it
    weakref.finalize(owner, _keep, block).atexit = False
    return _view(owner, size)


def sparse_memory(size: int) -> memoryview:
    """Zeroed memory for `size` bytes, of which a page takes memory once it is written to: for a file of which scattered
    parts are read. Pages are small, because a huge one would hold 2 MiB for each part."""
    block = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux
        with suppress(OSError):  # a kernel without huge pages
            block.madvise(mmap.MADV_NOHUGEPAGE)
    return memoryview(block)[:size]


def fill(file: RawIOBase, buffer: memoryview) -> None:
    """Read from a file until the buffer is full. Raises `BlobError` if the file ends first."""
    done = 0
    while done < len(buffer):
        count = file.readinto(buffer[done:])
        if not count:
            raise BlobError(f"the file ended {len(buffer) - done} bytes early while it was read", reason="truncated")
        done += count


def _mapped(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, size + 2 * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = _start(np.frombuffer(block, np.uint8))
    huge = round(size / _HUGE_PAGE) * _HUGE_PAGE
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with suppress(OSError):  # a kernel without huge pages, which only save time
            block.madvise(mmap.MADV_HUGEPAGE, start, huge)
    return block


def _take_spare(size: int) -> mmap.mmap | None:
    """The spare block, if `size` bytes fit. Pages beyond them go back to the kernel."""
    # No lock: `_keep` runs whenever Python drops the last view, possibly between these lines.
    try:
        block = spare.pop()
    except IndexError:
        return None
    if len(block) < size + 2 * _HUGE_PAGE:
        spare.append(block)
        return None
    rest = _start(np.frombuffer(block, np.uint8)) - (-size // _HUGE_PAGE) * _HUGE_PAGE
    if hasattr(mmap, "MADV_DONTNEED"):
        block.madvise(mmap.MADV_DONTNEED, rest)
    return block


def _keep(block: mmap.mmap) -> None:
    if len(block) <= _SPARE_BYTES:
        if hasattr(mmap, "MADV_FREE"):
            with suppress(OSError):  # an old kernel
                block.madvise(mmap.MADV_FREE)
        spare.append(block)


def _view(owner: npt.NDArray[np.uint8], size: int) -> memoryview:
    start = _start(owner)
    return owner.data[start : start + size]


def _start(owner: npt.NDArray[np.uint8]) -> int:
    """Offset of the first huge page in a block."""
    return -owner.ctypes.data % _HUGE_PAGE
