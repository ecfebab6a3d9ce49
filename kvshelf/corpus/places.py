"""Where a batch writes: a local file, or an object in S3. Both appear whole or not at all."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from typing import IO, Any, Final

import pyarrow.fs as pafs

from kvshelf import atomic
from kvshelf.corpus.objects import is_url, opened, put
from kvshelf.errors import InvalidRequest, StorageFull
from kvshelf.store.private import without_secret

Place = Path | str
"""The path of a local file, or the URL of an object."""

_SCHEME: Final = "s3://"
_IN_A_PREFIX: Final = "results.jsonl"


def place(text: str, *, param: str) -> Place:
    """A place as a user names it. An s3:// URL without an ending names a prefix for the object `results.jsonl`.

    Raises `InvalidRequest` for other URLs, and for one with credentials: it would be shown and recorded.
    """
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
    """A file that replaces what is at the place when the block ends without an error; else the old bytes stay.

    For S3 the file is built in this machine's temporary folder, and then uploaded whole. Raises `StorageFull` if it
    cannot be written.
    """
    try:
        if isinstance(where, Path):
            with atomic.written(where) as target:
                yield target
            return
        with TemporaryFile() as built:
            yield built
            built.flush()
            system, path = opened(where, param="--output")
            put(system, path, _content(built))
    except OSError as error:
        raise StorageFull(f"{where} cannot be written: {error.strerror or error}") from error


def _content(file: IO[bytes]) -> Any:
    size = file.seek(0, 2)
    return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""  # nothing cannot be mapped


def exists(where: Place) -> bool:
    """Whether there is something. Raises `OSError` if S3 does not say."""
    if isinstance(where, Path):
        return where.exists()
    system, path = opened(where, param="--output")
    return system.get_file_info(path).type is not pafs.FileType.NotFound
