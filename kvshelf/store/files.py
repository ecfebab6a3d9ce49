"""Memory to read a stored cache into."""

from __future__ import annotations

import mmap
from contextlib import suppress
from io import RawIOBase

import numpy as np

from kvshelf.errors import BlobError

_HUGE_PAGE = 2 << 20  # bytes, on x86-64 and on arm64 with pages of 4 KiB


def fresh_memory(size: int) -> memoryview:
    """Zeros to read `size` bytes of a file into.

    Not a map of the file: its bytes could change after they were verified, and a file cut short would kill the process.
    Huge pages, because the first touch of fresh memory page by page takes several times as long as the reading itself
    (39 against 5 ms for 64 MiB). The kernel gives them to aligned memory only and need not align what it maps, so more
    addresses than bytes are taken. The last page is a huge one where that wastes less than half of it.
    """
    memory = mmap.mmap(-1, size + 2 * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE_PAGE
    huge = round(size / _HUGE_PAGE) * _HUGE_PAGE
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with suppress(OSError):  # a kernel without them; they are never needed
            memory.madvise(mmap.MADV_HUGEPAGE, start, huge)
    return memoryview(memory)[start : start + size]


def fill(file: RawIOBase, buffer: memoryview) -> None:
    """Read on in a file until the buffer is full. Raises `BlobError` where the file ends before."""
    done = 0
    while done < len(buffer):
        count = file.readinto(buffer[done:])
        if not count:
            raise BlobError(f"the file ended {len(buffer) - done} bytes early while it was read", reason="truncated")
        done += count
