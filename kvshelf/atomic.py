"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def partial_of(path: Path) -> Path:
    """The name of a file that `written` has not completed yet."""
    file = _target_of(path)
    return file.with_name(file.name + ".partial")


def _target_of(path: Path) -> Path:
    # What is no link may lie in a folder whose parents nobody may search. `Path.resolve` fails for links in a circle.
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def require_file(path: Path) -> None:
    """Raises `OSError` for what `written` cannot replace by a file: a folder, a device or a pipe."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    folder = os.path.realpath(path.parent)
    # /dev/stdout may lead to a file, of which a shell that appends to it would lose the beginning.
    is_stream = folder == "/dev" or folder.startswith("/proc/")
    if is_stream or (path.exists() and not path.is_file()):
        raise OSError(errno.EINVAL, "it is a device or a pipe; give the name of a file", str(path))


@contextmanager
def written(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """A file that replaces `path` when the block ends without an error: a reader finds the old content or the new.

    The new content is durable then. A link at `path` stays, and the file is replaced that it leads to. private: only
    its owner may read it, and several processes may write it at once.
    Raises `OSError`; then the old content is still there, unless the disk failed at the very last step. What is no
    regular file is refused: root would replace /dev/stdout for the whole machine.
    """
    require_file(path)
    path = _target_of(path)
    if private:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        partial, file = Path(name), os.fdopen(handle, "wb")
    else:
        partial = partial_of(path)
        file = partial.open("wb")
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):  # the error in the block says more, and the caller gets it
            partial.unlink()
        raise
    _make_names_durable(path.parent)


def _make_names_durable(folder: Path) -> None:
    """Where possible: some file systems cannot sync a folder, and a folder may be writable but unreadable."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
