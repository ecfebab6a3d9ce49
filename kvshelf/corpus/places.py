"""Where a batch writes: a local file, or an object in S3. Both appear whole or not at all."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from typing import IO, Any, Final

import pyarrow as pa
import pyarrow.fs as pafs

from kvshelf import atomic
from kvshelf.errors import InvalidRequest, StorageFull
from kvshelf.store.private import without_secret

Place = Path | str
"""The path of a local file, or the URL of an object."""

_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://")
_SCHEME: Final = "s3://"
_IN_A_PREFIX: Final = "results.jsonl"


def place(text: str, *, param: str) -> Place:
    """A place as a user names it. An s3:// URL without an ending names a prefix for the object `results.jsonl`. Raises
    `InvalidRequest` for other URLs, and for one with credentials: it would be shown and recorded."""
    if not is_url(text):
        return Path(text)
    if not text.startswith(_SCHEME):
        raise InvalidRequest(f"{without_secret(text)}: give a local path or an {_SCHEME} URL", param=param)
    if without_secret(text) != text:
        raise InvalidRequest(
            f"{without_secret(text)}: leave the credentials out; they come from the environment (AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY) or from ~/.aws",
            param=param,
        )
    url, mark, query = text.partition("?")
    if not ending(url):
        url = f"{url.rstrip('/')}/{_IN_A_PREFIX}"
    return url + mark + query


def ending(of: Place) -> str:
    """The ending of its name in lower case, such as `.jsonl`."""
    return (of if isinstance(of, Path) else PurePosixPath(of.partition("?")[0])).suffix.lower()


def beside(of: Place, more: str) -> Place:
    """The place whose name has `more` at its end."""
    if isinstance(of, Path):
        return of.with_name(of.name + more)
    url, mark, query = of.partition("?")
    return url + more + mark + query


def require_place(where: Place, endings: Sequence[str], *, what: str, param: str) -> None:
    """Raises `InvalidRequest` unless the name has one of the endings, and the folder of a local file exists. `what`
    says in a sentence which names are taken."""
    if ending(where) not in endings:
        raise InvalidRequest(f"{where}: {what}", param=param)
    if isinstance(where, Path) and not where.absolute().parent.is_dir():
        raise InvalidRequest(f"{where}: there is no folder {where.absolute().parent}", param=param)


@contextmanager
def written(where: Place) -> Iterator[IO[bytes]]:
    """A file that replaces what is at the place when the block ends without an error; else the old bytes stay. For S3
    the file is built in this machine's temporary folder, and then uploaded whole. Raises `StorageFull` if it cannot be
    written."""
    try:
        if isinstance(where, Path):
            with atomic.written(where) as target:
                yield target
            return
        with TemporaryFile() as target:
            yield target
            target.flush()
            system, path = opened(where, param="--output")
            size = target.seek(0, 2)  # an empty file cannot be mapped
            put(system, path, mmap.mmap(target.fileno(), size, access=mmap.ACCESS_READ) if size else b"")
    except OSError as error:
        raise StorageFull(f"{where} cannot be written: {error.strerror or error}") from error


def exists(where: Place) -> bool:
    """Whether there is something. Raises `OSError` if S3 does not say."""
    if isinstance(where, Path):
        return where.exists()
    system, path = opened(where, param="--output")
    return system.get_file_info(path).type is not pafs.FileType.NotFound


def is_url(text: str) -> bool:
    return _URL.match(text) is not None


def opened(url: str, *, param: str) -> tuple[Any, str]:
    """The `pyarrow.fs.FileSystem` of a URL, and the path there. Raises `InvalidRequest`."""
    try:
        system, path = pafs.FileSystem.from_uri(url)
    except (ValueError, OSError, pa.ArrowException) as error:
        raise InvalidRequest(f"cannot use {without_secret(url)!r}: {error!s:.200}", param=param) from error
    return system, path


def put(system: Any, path: str, data: Any) -> None:
    """Write an object: readers find the old bytes or all of these, also if this process is killed meanwhile. data: any
    buffer. Raises `OSError`; then the old bytes are still there. S3 has no rename, and needs none: an object appears
    when its upload is completed. But pyarrow completes an upload whenever its stream is closed, also by an exception.
    So a thread writes, in which no Ctrl-C is raised."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_put, system, path, data).result()


def _put(system: Any, path: str, data: Any) -> None:
    with system.open_output_stream(path) as stream:
        stream.write(data)
    size = system.get_file_info(path).size
    if size != len(data):
        raise OSError(f"{size} bytes are there of {len(data)} that were written")
