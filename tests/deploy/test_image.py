"""The image, as far as it can be tried without a container engine: its files, and its steps in a plain folder."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path

import pytest

from kvshelf import Client
from kvshelf.service.access.keyfile import KeyFile
from tests.deploy.files import DEPLOY, DOCKERFILE, ROOT, copies, environment_of, image_of
from tests.deploy.wheels import built_wheel
from tests.store.redis.servers import free_port

USER = 10001


@pytest.mark.parametrize("stage", ["cpu", "cuda", "installed-cpu", "installed-cuda"])
def test_what_is_copied_is_there_and_not_ignored(stage: str) -> None:
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert copies(stage)
    for source, _ in copies(stage):
        assert (ROOT / source).exists()
        assert any(f"!{source}".startswith(line) for line in kept if line.startswith("!")), source


def test_the_final_images_have_no_tools_but_what_a_kernel_needs() -> None:
    packages = {
        stage: set(re.findall(r"--no-install-recommends ([^&]+)", image_of(stage))) for stage in ("cpu", "cuda")
    }
    reached = "wget openssh-client rsync "  # by KubeRay and by `ray up`
    assert packages["cpu"] == {reached}
    assert packages["cuda"] == {reached, "gcc libc6-dev "}
    assert "gcc libc6-dev" in image_of("wheel")  # for the wheel alone
    for stage in ("cpu", "cuda", "vllm"):
        assert re.findall(r"^USER (.*)$", image_of(stage), re.M)[-1] == f"{USER}:{USER}"
        assert "HEALTHCHECK" in image_of(stage)
    assert re.search(r"^ARG PYTHON=\d+\.\d+\.\d+-slim", DOCKERFILE.read_text(), re.M)


def test_the_health_check_tells_a_service_that_lives_from_one_that_does_not(service_url: str) -> None:
    check = [sys.executable, str(DEPLOY / "docker" / "alive.py")]
    port = service_url.rpartition(":")[2]
    subprocess.run(check, env=os.environ | {"KVSHELF_PORT": port}, check=True, timeout=60)
    dead = subprocess.run(check, env=os.environ | {"KVSHELF_PORT": str(free_port())}, capture_output=True, timeout=60)
    assert dead.returncode == 1
    assert b"/livez" in dead.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, soak: bool) -> Path:
    """Built as the Dockerfile builds it, from a folder with nothing but what it copies."""
    if not soak:  # here and not in the tests, which would find it built
        pytest.skip("building a wheel takes 20 seconds: make soak")
    return built_wheel(tmp_path_factory.mktemp("src"), tmp_path_factory.mktemp("wheels"))


def test_the_wheel_has_the_files_that_are_no_python(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    command = ["git", "ls-files", "kvshelf", "kvshelf_bench"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(tracked.stdout.split()) <= inside


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """A folder laid out as the image is, with an environment of its own. Its dependencies are those of this one, by a
    path: to download torch once more would tell nothing."""
    root = tmp_path / "image"
    subprocess.run([sys.executable, "-m", "venv", str(root / "opt")], check=True, timeout=120)
    python = root / "opt" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True, timeout=120)
    (site,) = (root / "opt").glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"])
    for folder in ("keys", "shelf"):
        (root / "home" / folder).mkdir(parents=True, mode=0o700)
    return root


def test_the_service_runs_from_the_folder_alone(installed: Path) -> None:
    """The environment of the image, its command and its health check, where nothing of the repository is."""
    home, port = installed / "home", free_port()
    given = {name: value.replace("/var/lib/kvshelf", str(home)) for name, value in environment_of("cpu").items()}
    given["PATH"] = f"{installed}/opt/bin:/usr/bin:/bin"
    given |= {"HOME": str(home), "KVSHELF_PORT": str(port), "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    keys = KeyFile(given["KVSHELF_API_KEY_FILE"])
    _, key = keys.create("acme", ["read", "write"])
    assert re.findall(r"^CMD (.*)$", image_of("cpu"), re.M) == ['["kvshelf", "serve"]']
    with (installed / "log").open("w") as log:
        process = subprocess.Popen(
            ["kvshelf", "serve"], cwd=home, env=given, stdout=log, stderr=log, executable=f"{installed}/opt/bin/kvshelf"
        )
    try:
        _wait_for_health(given, home, installed / "log")
        with Client(f"http://127.0.0.1:{port}", api_key=key) as client:
            cache = client.caches.create(document="The tide tables are green. " * 40, compression_ratio=0.5)
            assert client.caches.query(cache.id, prompt="Which colour?", max_tokens=4).text
    finally:
        process.terminate()
        process.wait(timeout=90)
    assert process.returncode == 0, (installed / "log").read_text()[-3000:]


def _wait_for_health(given: dict[str, str], home: Path, log: Path) -> None:
    ends_at = time.monotonic() + 180
    check = [sys.executable, str(DEPLOY / "docker" / "alive.py")]
    while subprocess.run(check, env=given, cwd=home, capture_output=True, timeout=60).returncode != 0:
        assert time.monotonic() < ends_at, log.read_text()[-3000:]
        time.sleep(0.5)
