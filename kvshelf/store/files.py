"""A folder of blob files. Names come from hex digests only, and no symbolic link is ever followed."""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from io import FileIO, RawIOBase
from pathlib import Path
from typing import Self

import numpy as np

from kvshelf.errors import BlobError

Step = Callable[[str], None]
"""Called with the name of each step of a write as it is completed: for tracing, and for tests that stop there."""

_HUGE_PAGE = 2 << 20  # bytes, on x86-64 and on arm64 with pages of 4 KiB

_NAME = re.compile(r"[0-9a-f]{40}-[0-9a-f]{16}\.kvb")


def new_name(cache_id: str) -> str:
    """A fresh file name for a cache. The random part keeps two writers of one cache out of each other's way."""
    return f"{cache_id.removeprefix('kvs_')}-{secrets.token_hex(8)}.kvb"


def is_name(name: str) -> bool:
    """Whether `new_name` can have made this name."""
    return _NAME.fullmatch(name) is not None


def _checked(name: str) -> str:
    """Names come back from the index; whoever changed it there still cannot lead us out of the folder."""
    if not is_name(name):
        raise OSError(f"{name!r:.80} is not the name of a blob file")
    return name


class BlobFolder:
    """One folder, held open: files are found relative to it, whatever happens to its path. Raises `OSError`."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    @classmethod
    def open(cls, path: Path) -> Self:
        path.mkdir(mode=0o700, exist_ok=True)
        return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))

    def write(self, name: str, buffers: Sequence[memoryview], on_step: Step) -> None:
        """Create a new file and make it durable, its name included."""
        with self._file(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
            on_step("created")
            for buffer in buffers:
                _write_all(file, buffer)
            on_step("written")
            os.fsync(file.fileno())
        os.fsync(self._fd)  # the file's content is durable by now, its name only with the folder
        on_step("synced")

    def read(self, name: str) -> FileIO | None:
        """Open a file for reading; None when no regular file has this name (a symbolic link is none)."""
        try:
            file = self._file(name, os.O_RDONLY | os.O_NONBLOCK)  # a planted pipe must not make the opening wait
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO):
                return None
            raise  # anything else, too many open files for one, says nothing about the cache
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        file.close()
        return None

    def size(self, name: str) -> int | None:
        """Bytes of a regular file; None when there is none of this name."""
        try:
            found = os.stat(_checked(name), dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def remove(self, name: str) -> bool:
        """Unlink a file if it is there; readers that have it open keep it."""
        try:
            os.unlink(_checked(name), dir_fd=self._fd)
        except (FileNotFoundError, IsADirectoryError):
            return False  # a folder in a blob's place is not ours; `check` goes on naming it
        return True

    def move(self, name: str, to: BlobFolder) -> bool:
        """Move a file to another folder of the same home, if it is there."""
        try:
            os.rename(_checked(name), name, src_dir_fd=self._fd, dst_dir_fd=to._fd)
        except FileNotFoundError:
            return False
        return True

    def entries(self) -> Iterator[tuple[str, float]]:
        """Names of all that lies in the folder, with the time of the last change (Unix seconds)."""
        for name in os.listdir(self._fd):
            try:
                yield name, os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mtime
            except FileNotFoundError:
                continue  # removed since it was listed

    def close(self) -> None:
        os.close(self._fd)

    def _file(self, name: str, flags: int) -> FileIO:
        def opener(path: str, mode: int) -> int:  # noqa: ARG001 - FileIO's own flags lack O_NOFOLLOW
            return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._fd)

        return FileIO(_checked(name), "w" if flags & os.O_WRONLY else "r", opener=opener)


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


def _write_all(file: FileIO, buffer: memoryview) -> None:
    """Write a buffer whole: one call writes at most 2 GiB."""
    done = 0
    while done < len(buffer):
        done += file.write(buffer[done:]) or 0
