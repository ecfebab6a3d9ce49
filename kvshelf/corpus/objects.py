"""Objects behind a URL, such as those in S3, through pyarrow."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pyarrow as pa
import pyarrow.fs as pafs

from kvshelf.errors import InvalidRequest
from kvshelf.store.private import without_secret

_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://")


def is_url(text: str) -> bool:
    """Whether this is a URL and no local path."""
    return _URL.match(text) is not None


def opened(url: str, *, param: str) -> tuple[Any, str]:
    """The `pyarrow.fs.FileSystem` of a URL, and the path there. Raises `InvalidRequest`."""
    try:
        system, path = pafs.FileSystem.from_uri(url)
    except (ValueError, OSError, pa.ArrowException) as error:
        raise InvalidRequest(f"cannot use {without_secret(url)!r}: {error!s:.200}", param=param) from error
    return system, path


def put(system: Any, path: str, data: Any) -> None:
    """Write an object: readers find the old bytes or all of these, also if this process is killed meanwhile.

    data: any buffer. Raises `OSError`; then the old bytes are still there. S3 has no rename, and needs none: an object
    appears when its upload is completed. But pyarrow completes an upload whenever its stream is closed, also by an
    exception. So a thread writes, in which no Ctrl-C is raised.
    """
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_put, system, path, data).result()


def _put(system: Any, path: str, data: Any) -> None:
    with system.open_output_stream(path) as stream:
        stream.write(data)
    size = system.get_file_info(path).size
    if size != len(data):
        raise OSError(f"{size} bytes are there of {len(data)} that were written")
