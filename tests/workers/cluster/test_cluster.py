"""A Ray cluster of one's own that does not come up, in a process that wants one."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kvshelf.errors import NoWorker
from kvshelf.workers.cluster.connect import make_private
from tests.conftest import _descendants, _title
from tests.store.redis.servers import wait_until

WANTS_RAY = """
from kvshelf.errors import NoWorker
from kvshelf.workers.cluster.connect import prepare_environment, ray_cluster

prepare_environment(None)
try:
    with ray_cluster(None, min_cpus=1):
        print("it is up")
except NoWorker as error:
    print(error)
"""


def wanting_ray(**environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WANTS_RAY], env=os.environ | environment, stdout=subprocess.PIPE, text=True
    )


def test_what_ray_does_not_start_for_is_named(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)  # its sockets would have longer names than the kernel takes
    folder.mkdir()
    process = wanting_ray(RAY_TMPDIR=str(folder))
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    assert said.startswith("Ray did not come up on this machine: "), said
    assert "107 bytes" in said


def test_the_operators_folder_for_ray_is_closed_to_others(tmp_path: Path) -> None:
    made, closed = tmp_path / "one" / "two", tmp_path / "open"
    (closed / "ray").mkdir(parents=True)
    for folder in (made, closed, closed):
        make_private(folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("problem", ["others may write", "others may read", "another user's", "Not a directory"])
def test_a_folder_that_is_not_ours_alone_is_refused_by_name(
    tmp_path: Path, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "of others").touch()
    if problem == "others may write":
        folder.chmod(0o1777)
    elif problem == "another user's":
        monkeypatch.setattr(os, "getuid", lambda: 4711)
    elif problem == "Not a directory":
        folder = folder / "of others" / "below"
    before = tmp_path.joinpath("shared").stat().st_mode
    with pytest.raises(NoWorker, match=r"RAY_TMPDIR=.*shared") as refusal:
        make_private(folder)
    assert problem in refusal.value.message
    assert tmp_path.joinpath("shared").stat().st_mode == before


@pytest.mark.timeout(300)
def test_a_node_that_is_late_is_named_and_leaves_nothing_behind(soak: bool) -> None:
    """Its raylet is stopped as soon as it runs, as if the machine had no time for it."""
    if not soak:
        pytest.skip("Ray waits half a minute for it")
    process = wanting_ray()
    started: list[int] = []
    try:
        while not (late := [pid for pid in _descendants(process.pid) if "raylet/raylet" in _title(pid)]):
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(late[0], signal.SIGSTOP)
        started = _descendants(process.pid)
        said, _ = process.communicate(timeout=240)
        assert process.returncode == 0
        assert "timed out during startup" in said
        assert "start again when the machine does less" in said
        wait_until(lambda: not any(map(_title, started)), "its processes are gone", timeout_s=60)
    finally:
        for pid in started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
