"""A service whose disk fills up: it says so by name, answers from what it has, and recovers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from kvshelf.cli import app
from tests.service.conftest import DOCUMENT, created, refused

if TYPE_CHECKING:
    from tests.conftest import LiveService

pytestmark = pytest.mark.faults  # it mounts, and a service starts for it alone

QUESTION = {"prompt": "Who lit it?", "max_tokens": 2}
MB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, with some MiB more than a service calls full."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=270m", "tmpfs", place]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"this user may not mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def parts(http: httpx.Client) -> dict[str, Any]:
    """The parts of a service that answers 200, by name."""
    answer = http.get("/readyz")
    assert answer.status_code == 200, "what is there can be asked, whether the disk is full or not"
    named = {part["name"]: part for part in answer.json()["parts"]}
    assert answer.json()["status"] == ("degraded" if "space" in named else "ready")
    return named


def doctor(url: str) -> Result:
    return CliRunner().invoke(app, ["doctor", "--url", url])


def test_a_full_disk_is_named_and_what_is_there_is_answered(
    start_service: Callable[..., AbstractContextManager[LiveService]],
    small_disk: Path,
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    filling = small_disk / "filling"
    with (
        start_service(tmp_path, tiny_folder, store=f"disk://{small_disk}/shelf") as service,
        httpx.Client(base_url=service.url, timeout=120) as http,
    ):
        cache = created(http, document=DOCUMENT)
        assert "space" not in parts(http)
        filling.write_bytes(bytes(30 * MB))
        space = parts(http)["space"]
        assert not space["ready"]
        assert space["reason"].startswith(f"the disk of {small_disk}/shelf is full: ")
        told = doctor(service.url)
        assert told.exit_code == 1
        assert "space" in told.stdout
        with pytest.raises(OSError, match="No space left"):
            filling.write_bytes(bytes(300 * MB))
        refused(http.post("/v1/caches", json={"document": DOCUMENT * 2}), 507, "storage_full")
        assert http.post(f"/v1/caches/{cache['id']}/query", json=QUESTION).status_code == 200
        assert "space" in parts(http)
        filling.unlink()
        assert "space" not in parts(http)
        assert not created(http, document=DOCUMENT * 2)["existing"]
        assert doctor(service.url).exit_code == 0
