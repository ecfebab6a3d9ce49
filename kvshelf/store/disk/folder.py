"""A folder of blob files, and one for those found corrupt. Names come from hex digests only; no link is followed."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from kvshelf.store.blobs import Blobs, Step, StoredFile, is_name
from kvshelf.store.disk.faults import translated

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


_SUFFIX = ".kvb"

_CLOSED: Final = -1
"""In place of the descriptor of a folder: no call of the system takes it."""


class Folder(Blobs):
    """See `Blobs`. A file that is open stays readable when its name is removed: the kernel holds the lease. A reader
    also takes a shared lock on its file, so that other processes see that it is in use; the kernel releases the lock
    when the reader closes the file or dies."""

    home = "disk"
    walk_every_s = 0.0
    read_ahead = True

    def __init__(self, path: Path, blobs: int, quarantine: int) -> None:
        """blobs, quarantine: descriptors of the two folders; files are found through them even if the paths change."""
        self.path = path
        self._blobs = blobs
        self._quarantine = quarantine

    @classmethod
    def open_in(cls, home: Path) -> Self:
        """Raises `OSError`."""
        return cls(home, _folder(home / "blobs"), _folder(home / "quarantine"))

    def write(
        self,
        name: str,
        buffers: Iterable[memoryview],
        nbytes: int,  # noqa: ARG002
        *,
        on_step: Step,
    ) -> None:
        with translated(self.path), self._file(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
            on_step("created")
            for buffer in buffers:
                while buffer:  # one system call writes at most 2 GiB
                    buffer = buffer[file.write(buffer) or 0 :]
            on_step("written")
            os.fsync(file.fileno())
            os.fsync(self._blobs)  # the content is durable by now; the name becomes so with the folder
        on_step("synced")

    def renew(self, name: str, nbytes: int) -> None:
        """A disk drops nothing by itself."""

    def open(self, name: str, nbytes: int, *, once: bool = False) -> StoredFile | None:  # noqa: ARG002 - the kernel knows
        with translated(self.path):
            try:
                file = self._file(name, os.O_RDONLY | os.O_NONBLOCK)  # must not block on a planted pipe
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO):
                    return None
                raise  # other errors, such as too many open files, say nothing about the cache
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                with suppress(OSError):  # without file locks, eviction sees no readers; open files stay readable
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return file
            file.close()
            return None

    def beginning(self, name: str, nbytes: int, count: int) -> bytes | None:
        file = self.open(name, nbytes)
        if file is None:
            return None
        with file:
            return file.read(count)

    def holds(self, name: str, nbytes: int) -> bool:
        with translated(self.path):
            try:
                status = os.stat(_file_name(name), dir_fd=self._blobs, follow_symlinks=False)
            except FileNotFoundError:
                return False
        return stat.S_ISREG(status.st_mode) and status.st_size == nbytes

    def keep_until(self, name: str, nbytes: int, expires_at: float | None) -> None:
        """A disk drops nothing by itself."""

    def remove(self, name: str, nbytes: int) -> bool:  # noqa: ARG002
        with translated(self.path):
            for folder in (self._blobs, self._quarantine):
                with suppress(FileNotFoundError, IsADirectoryError):  # `problems` reports a folder in a blob's place
                    os.unlink(_file_name(name), dir_fd=folder)
        return True

    def set_aside(self, name: str, nbytes: int) -> None:  # noqa: ARG002
        file = _file_name(name)
        with translated(self.path), suppress(FileNotFoundError):
            os.rename(file, file, src_dir_fd=self._blobs, dst_dir_fd=self._quarantine)

    def is_read(self, name: str) -> bool:
        with translated(self.path), suppress(FileNotFoundError), self._file(name, os.O_RDONLY | os.O_NONBLOCK) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def walk(self) -> Iterator[tuple[str, float]]:
        with translated(self.path):
            for name, changed in self._entries():
                if name.endswith(_SUFFIX) and is_name(name.removesuffix(_SUFFIX)):
                    yield name.removesuffix(_SUFFIX), time.time() - changed

    def problems(self) -> list[str]:
        with translated(self.path):
            strange = [name for name, _ in self._entries() if not is_name(name.removesuffix(_SUFFIX))]
        return [f"{name} in {self.path} is not a blob file" for name in strange]

    def close(self) -> None:
        folders = {self._blobs, self._quarantine} - {_CLOSED}
        # The kernel gives their numbers to the next files that are opened, those of other shelves among them.
        self._blobs = self._quarantine = _CLOSED
        for folder in folders:
            os.close(folder)

    def _entries(self) -> Iterator[tuple[str, float]]:
        """Everything in the folders, with the time of its last change (Unix seconds)."""
        for folder in (self._blobs, self._quarantine):
            for name in os.listdir(folder):
                with suppress(FileNotFoundError):  # removed since it was listed
                    yield name, os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime

    def _file(self, name: str, flags: int) -> _BlobFile:
        def opener(path: str, mode: int) -> int:  # noqa: ARG001 - FileIO's own flags lack O_NOFOLLOW
            return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._blobs)

        file = _BlobFile(_file_name(name), "w" if flags & os.O_WRONLY else "r", opener=opener)
        file.place = self.path
        return file


class _BlobFile(FileIO, StoredFile):
    """A file that raises the store's errors when it is read."""

    place: Path

    def readinto(self, buffer: WriteableBuffer) -> int:
        with translated(self.place):
            return super().readinto(buffer) or 0

    def read(self, size: int | None = -1) -> bytes:
        with translated(self.place):
            return super().read(-1 if size is None else size) or b""


def _folder(path: Path) -> int:
    path.mkdir(mode=0o700, exist_ok=True)
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _file_name(name: str) -> str:
    """Names come from the index; even a tampered index cannot lead out of the folder."""
    if not is_name(name):
        raise OSError(f"{name!r:.80} is not the name of a blob file")
    return name + _SUFFIX


LEAST_BYTES: Final = 256 << 20
LEAST_FILES: Final = 1000


def shortage(folder: Path) -> str | None:
    """A sentence if the file system of a folder has less room than `LEAST_BYTES` and `LEAST_FILES`, else None."""
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    if free < LEAST_BYTES:
        return f"the disk of {folder} is full: {free / 2**20:.0f} MiB are free, fewer than {LEAST_BYTES >> 20}"
    if room.f_files and room.f_favail < LEAST_FILES:
        return f"the disk of {folder} is full: it takes {room.f_favail} more files, fewer than {LEAST_FILES}"
    return None
