"""A replica of two processes that share a model answers as one process does. A killed process ends its replica, which
Serve starts anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from kvshelf.errors import PolicyUnsupported
from kvshelf.model.loading import shares_models
from kvshelf.service.process.preflight import require_startable
from kvshelf.service.settings import Settings
from kvshelf.workers.cluster.connect import own_folder
from tests.conftest import LiveService, _descendants, _title
from tests.page.conftest import ANSWER, QUESTION, document
from tests.service.process.test_recovery import await_ready
from tests.store.redis.servers import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shares_models(), reason="sharing a model among processes needs a newer transformers"),
]

StartService = Callable[..., AbstractContextManager[LiveService]]


def ranks(service: LiveService) -> list[int]:
    """The processes beside the replica's own."""
    return [pid for pid in _descendants(service.process.pid) if "parallel.follower" in _title(pid)]


@pytest.mark.timeout(300)
def test_a_killed_rank(start_service: StartService, tmp_path: Path) -> None:
    with (
        start_service(tmp_path, "kvshelf-tiny", gpus_per_replica=2, device="cpu") as service,
        httpx.Client(base_url=service.url, timeout=60) as http,
    ):
        made = http.post("/v1/caches", json={"document": document(3), "policy": "full", "codec": "int4"})
        assert made.status_code == 201, made.text
        query = f"/v1/caches/{made.json()['id']}/query"
        assert ANSWER in http.post(query, json={"prompt": QUESTION}).json()["text"]
        (replica,), (rank,) = service.replica_pids(), ranks(service)
        os.kill(rank, signal.SIGSTOP)  # so that the question is under way when the process is killed
        with ThreadPoolExecutor(1) as threads:
            asking = threads.submit(http.post, query, json={"prompt": QUESTION})
            time.sleep(1)
            os.kill(rank, signal.SIGKILL)
            crashed = asking.result()
        assert (crashed.status_code, crashed.json()["error"]["code"]) == (503, "worker_crashed")
        wait_until(lambda: not os.path.exists(f"/proc/{replica}"), "the replica has ended")
        said = f"rank 1 (process {rank}) ended by signal 9; 'kvshelf-tiny' runs in 2 processes"
        assert any(said in log.read_text() for log in Path(own_folder()).glob(f"*/logs/worker-*-{replica}.err"))
        await_ready(http)
        assert ANSWER in http.post(query, json={"prompt": QUESTION}).json()["text"]
        (other,) = ranks(service)
        assert other != rank
    end = time.monotonic() + 20
    while os.path.exists(f"/proc/{other}"):
        assert time.monotonic() < end, "a rank outlived its service"
        time.sleep(0.1)


def test_what_cannot_be_shared_is_refused_before_ray_starts(tmp_path: Path) -> None:
    with pytest.raises(PolicyUnsupported, match="the 2 KV heads of 'kvshelf-tiny' cannot be shared evenly by 3"):
        require_startable(Settings(gpus_per_replica=3))
    command = [sys.executable, "-m", "kvshelf", "serve", "--port", "0", "--gpus-per-replica", "3"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSHELF_")}
    environment = clean | {"KVSHELF_STORE": f"disk://{tmp_path}/shelf"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "take a number that divides 2" in done.stderr
    assert "Ray" not in done.stderr
