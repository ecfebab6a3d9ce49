"""`kvshelf serve --address`: a real `ray start`, a real Valkey, and services that come and go on them."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvshelf import Client
from kvshelf.api import CacheObject
from tests.conftest import LiveService, _descendants, _title
from tests.deploy.files import DEPLOY
from tests.store.redis.servers import PATIENT, ValkeyServer, free_port, wait_until

pytestmark = pytest.mark.slow

DOCUMENT = "The harbour master keeps the tide tables in a green book. " * 20

RAY = Path(sys.executable).parent / "ray"


class Head:
    """A Ray cluster of one node and one CPU, which has room for one replica and no more."""

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        command = [str(RAY), "start", "--head", "--block", "--disable-usage-stats", "--include-dashboard=false"]
        command += [f"--port={self.address.partition(':')[2]}", "--num-cpus=1", f"--temp-dir={folder}"]
        self.log = folder.with_name(f"{folder.name}.log")
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

    def await_start(self) -> None:
        """Until the node has joined. Ray says so in its output, after what may take it a minute where others work."""
        wait_until(self._is_up, "Ray's head is up", timeout_s=200)

    def _is_up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return "Ray runtime started" in self.log.read_text()

    def replicas(self) -> list[int]:
        return [pid for pid in _descendants(self.process.pid) if _title(pid).startswith("ray::ServeReplica")]

    def stop(self) -> None:
        for pid in (self.process.pid, *_descendants(self.process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # nothing of it is kept, and its own way down takes ten seconds
        self.process.wait()


@pytest.fixture(autouse=True)
def _other_nodes_may_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own clusters are for this machine alone, and their variable says so."""
    monkeypatch.delenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", raising=False)


@contextmanager
def head() -> Iterator[Head]:
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # the path of a socket has at most 107 characters
    running = Head(folder)
    try:
        running.await_start()
        yield running
    finally:
        running.stop()
        running.log.unlink()
        shutil.rmtree(folder, ignore_errors=True)


JOINS = """
import sys
from kvshelf.errors import NoWorker
from kvshelf.workers.cluster.connect import prepare_environment, ray_cluster

prepare_environment(sys.argv[1])
try:
    with ray_cluster(sys.argv[1], min_cpus=1):
        print("it is in")
except NoWorker as error:
    print(error)
"""


def joining(address: str, **variables: str) -> tuple[str, float]:
    """What a process says that joins a cluster, and its seconds. variables: of its environment."""
    given = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"}
    given |= {"RAY_AUTH_TOKEN_PATH": "/nowhere/token"} | variables
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", JOINS, address], env=given, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, time.monotonic() - began


@pytest.mark.timeout(300)
def test_a_token_that_is_not_the_cluster_s_is_named_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would try for 20 seconds, and only say that it could not connect."""
    token = secrets.token_hex(32)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    with head() as cluster:
        for other in ({"RAY_AUTH_TOKEN": secrets.token_hex(32)}, {}):
            said, seconds = joining(cluster.address, **other)
            assert f"the Ray cluster at '{cluster.address}' does not let us in" in said
            assert "Set RAY_AUTH_TOKEN (with RAY_AUTH_MODE=token) to the cluster's" in said
            assert seconds < 15, said
        # "auto" is the cluster that RAY_ADDRESS names.
        said, seconds = joining("auto", RAY_AUTH_TOKEN="another", RAY_ADDRESS=cluster.address)
        assert ("the Ray cluster at 'auto' does not let us in" in said, seconds < 15) == (True, True), said
        assert joining(cluster.address, RAY_AUTH_TOKEN=token)[0] == "it is in\n"
    said, seconds = joining("auto", RAY_AUTH_TOKEN=token, RAY_ADDRESS=cluster.address)
    assert ("Connection refused" in said, seconds < 15) == (True, True), "nothing listens there any more"


@pytest.mark.faults
@pytest.mark.timeout(600)  # it starts Ray twice and a service twice
def test_services_come_and_go_on_a_cluster_and_leave_nothing_behind(
    start_service: Callable[..., AbstractContextManager[LiveService]],
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with head() as cluster, ValkeyServer(tmp_path, appendonly="yes") as valkey:
        settings = {"address": cluster.address, "store": valkey.url + PATIENT, "threads": 1}
        with start_service(tmp_path / "first", tiny_folder, **settings) as first:
            assert first.replica_pids() == []  # it runs on the cluster
            assert len(cluster.replicas()) == 1
            with Client(first.url) as client:
                cache = client.caches.create(document=DOCUMENT, compression_ratio=0.75)
                answer = ask(client, cache)
            first.kill()
        # The dead one's replica still holds the only CPU.
        with front_end(tiny_folder, RAY_HEAD=cluster.address, KVSHELF_STORE=settings["store"]) as second:
            with Client(second.url) as client:
                assert client.caches.create(document=DOCUMENT, compression_ratio=0.75).existing
                assert ask(client, cache) == answer
            assert len(cluster.replicas()) == 1
            # Without its node it cannot call anybody, so both end, and what supervises the script starts both anew.
            os.kill(second.raylet(), signal.SIGKILL)
            assert second.process.wait(timeout=200) == 0
        wait_until(lambda: cluster.replicas() == [], "who leaves takes its replicas along", timeout_s=120)


@dataclass(frozen=True)
class FrontEnd:
    process: subprocess.Popen[str]
    url: str

    def raylet(self) -> int:
        (found,) = (pid for pid in _descendants(self.process.pid) if "raylet/raylet" in _title(pid).partition(" ")[0])
        return found


@contextmanager
def front_end(model: Path, **variables: object) -> Iterator[FrontEnd]:
    """The script that the images start a front end with."""
    path = f"{RAY.parent}{os.pathsep}{os.environ['PATH']}"
    given = os.environ | {"PATH": path} | {name: str(value) for name, value in variables.items()}
    command = ["bash", str(DEPLOY / "docker" / "front-end.sh"), "--port=0", "--threads=1", f"--model={model}"]
    process = subprocess.Popen(command, env=given, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = next(line for line in process.stdout if line.startswith("kvshelf is ready at "))
        yield FrontEnd(process, ready.split()[-1])
    finally:
        for pid in (process.pid, *_descendants(process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def ask(client: Client, cache: CacheObject) -> str:
    answer = client.caches.query(cache.id, prompt="Where are the tide tables?", max_tokens=8)
    assert answer.usage.cache_read_tokens > 0
    return answer.text
