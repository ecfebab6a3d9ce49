"""S3 on this machine: moto's server, which keeps its objects in memory."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import httpx
import pyarrow.fs as pafs
import pytest
from moto.moto_server.threaded_moto_server import ThreadedMotoServer


@contextmanager
def s3_server(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server with a bucket, whose name it yields. The environment names the server, for child processes too."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    patch.setenv("AWS_ENDPOINT_URL", url)
    patch.setenv("AWS_ACCESS_KEY_ID", "key")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    patch.setenv("AWS_REGION", "us-east-1")
    try:
        assert httpx.put(f"{url}/results").is_success
        yield "results"
    finally:
        server.stop()


def objects(prefix: str) -> dict[str, bytes]:
    """What is below a prefix, by the name behind it."""
    system, _ = pafs.FileSystem.from_uri(f"s3://{prefix}")
    infos = system.get_file_info(pafs.FileSelector(prefix, recursive=True, allow_not_found=True))
    files = [info.path for info in infos if info.type is pafs.FileType.File]
    return {os.path.relpath(path, prefix): system.open_input_stream(path).read() for path in files}
