"""Secrets: files that only their owner may access, files that only their owner may change, and URLs without their
passwords."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvshelf.atomic import written
from kvshelf.errors import InvalidRequest

_LIMIT: Final = 1 << 20
_AUTHORITY: Final = re.compile(r"(?:(?<=://)|(?<=^//))(?!/)")


def read_private(path: Path, *, param: str) -> bytes:
    """The bytes of a file that only its owner can read, or that root wrote for one of our groups, as Kubernetes writes
    secrets. Checks the opened file, not the path. Raises `InvalidRequest`, which names the setting `param`, for a file
    that is missing, not regular, accessible to others, or longer than 1 MiB."""
    return _read(path, _accessible, param=param)


def read_owned(path: Path, *, param: str) -> bytes:
    """The bytes of a file that only this user or root can change, as `read_private`; others may read it."""
    return _read(path, _changeable, param=param)


def _read(path: Path, problem_of: Callable[[Path, os.stat_result], str | None], *, param: str) -> bytes:
    try:
        # O_NONBLOCK: opening a pipe in the file's place would wait for a writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise refused(path, "it is not a regular file", param=param)
            if (problem := problem_of(path, status)) is not None:
                raise refused(path, problem, param=param)
            data = file.read(_LIMIT + 1)
    except OSError as error:
        raise refused(path, error.strerror or "it cannot be read", param=param) from error
    if len(data) > _LIMIT:
        raise refused(path, f"it has more than {_LIMIT} bytes", param=param)
    return data


def _accessible(path: Path, status: os.stat_result) -> str | None:
    if _is_ours_alone(status):
        return None
    mode = stat.S_IMODE(status.st_mode)
    return f"others than its owner have access to it (mode {mode:o}); run: chmod 600 {path}"


def _changeable(path: Path, status: os.stat_result) -> str | None:
    mode = stat.S_IMODE(status.st_mode)
    if _is_ours_alone(status):
        return None
    if mode & 0o022:
        return f"others than its owner can change it (mode {mode:o}); run: chmod go-w {path}"
    if status.st_uid not in (0, os.geteuid()):
        return f"it is of user {status.st_uid}, who can change it; run: chown {os.geteuid()} {path}"
    return None


def _is_ours_alone(status: os.stat_result) -> bool:
    others = status.st_mode & 0o077
    by_root = status.st_uid == 0 != os.geteuid() and status.st_gid in (os.getegid(), *os.getgroups())
    return others == 0 or (others == stat.S_IRGRP and by_root)


@contextmanager
def locked(path: Path, *, param: str) -> Iterator[None]:
    """Allows one change of a file at a time. Locks its folder, because each change replaces the file. Raises
    `InvalidRequest`, which names the setting `param`."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise refused(path, error.strerror or "its folder cannot be read", param=param) from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def write_private(path: Path, data: bytes, *, param: str) -> None:
    """Replace a file's content with `data`, see `atomic.written`. Raises `InvalidRequest` if that fails."""
    try:
        with written(path, private=True) as file:
            file.write(data)
    except OSError as error:
        raise refused(path, f"it cannot be written: {error.strerror}", param=param) from error


def refused(path: Path | str, problem: str, *, param: str) -> InvalidRequest:
    """The one form of every error about a key file."""
    return InvalidRequest(f"the key file {path} cannot be used: {problem}", param=param)


def without_secret(url: str) -> str:
    """A URL, or several joined by `+`, with user and password replaced by stars. Everything before the last @ goes, so
    that a password that should have been quoted does not show either. The path of a folder (three slashes) stays."""
    begins, end = _AUTHORITY.search(url), url.rfind("@")
    return url if begins is None or begins.end() > end else f"{url[: begins.end()]}***{url[end:]}"
