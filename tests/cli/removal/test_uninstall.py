"""`kvshelf uninstall`: what is left on a machine is listed, and nothing else is removed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvshelf.cli.removal import uninstall
from kvshelf.store.disk import DiskStore
from tests.store.caches import make_cache

UNIT = """[Service]
Environment=HOME=/var/lib/kvshelf "KVSHELF_STORE=disk://{home}?max=9GiB"
ExecStart=/opt/kvshelf/bin/kvshelf serve --env-file {settings}
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder of a user, with what a service and a few commands leave."""
    for name in [name for name in os.environ if name.startswith("KVSHELF_")] + [
        "XDG_DATA_HOME",
        "XDG_CACHE_HOME",
        "RAY_TMPDIR",
        "HF_HOME",
    ]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tmp" / f"kvshelf-{os.getuid()}" / "ray").mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    data = tmp_path / ".local" / "share" / "kvshelf"
    for folder in (data, tmp_path / "scratch", tmp_path / "of-the-unit"):
        with DiskStore.open(folder) as store:
            store.put(make_cache())
    (data / "calibrations").mkdir()
    (tmp_path / ".cache" / "kvshelf" / "models").mkdir(parents=True)
    (tmp_path / "scratch" / "of somebody else").touch()
    (tmp_path / "keys.json").touch()
    (tmp_path / "env").write_text(
        f"KVSHELF_API_KEY_FILE='{tmp_path}/keys.json'\nKVSHELF_STORE=disk://{tmp_path}/of-the-unit\n"
    )
    units = tmp_path / ".config" / "systemd" / "user"
    units.mkdir(parents=True)
    (units / "kvshelf.service").write_text(UNIT.format(home=tmp_path / "of-the-unit", settings=tmp_path / "env"))
    (units / "other.service").write_text("[Service]\nExecStart=/bin/true\n")
    monkeypatch.setenv(
        "KVSHELF_STORE", f"ram:1GiB+disk://{tmp_path}/scratch?max=1GiB+redis://me:secret@host/0?blobs=s3://bucket/p"
    )
    return tmp_path


def run(*args: str, code: int = 0, running: Sequence[str] = ()) -> str:
    """In a process of its own, which knows the folders of `machine` alone. running: the processes that it finds."""
    program = (
        "import os, sys, tempfile; from kvshelf.cli import app; from kvshelf.cli.removal import uninstall; "
        "assert tempfile.gettempdir().startswith(os.environ['HOME']); "
        f"uninstall._KERNELS, uninstall.running_in = uninstall.Path('/nowhere'), lambda _: {list(running)!r}; "
        "app(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, "uninstall", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"COLUMNS": "300"})
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_what_is_left_is_listed_and_stays(machine: Path) -> None:
    before = files(machine)
    shown = run("--dry-run")
    for what, place in {
        "home": machine / ".local" / "share" / "kvshelf",
        "tier": machine / "scratch",
        "Ray": machine / "tmp" / f"kvshelf-{os.getuid()}",
        "keys": machine / "keys.json",
        "settings": machine / "env",
        "calibrations": machine / ".local" / "share" / "kvshelf" / "calibrations",
        "models": machine / ".cache" / "kvshelf",
        "unit": machine / ".config" / "systemd" / "user" / "kvshelf.service",
    }.items():
        assert any(line.startswith(what) and str(place) in line for line in shown.splitlines()), (what, shown)
    assert f"home          {machine}/of-the-unit" in shown
    assert "redis://***@host/0" in shown
    assert "s3://bucket/p" in shown
    assert "secret" not in shown
    assert "other.service" not in shown
    assert files(machine) == before


def test_what_is_its_own_is_removed_after_a_yes(machine: Path) -> None:
    before = files(machine)
    assert "repeat it with --yes" in run(code=2)
    assert "kvshelf runs (process 4711); stop it first" in run("--yes", code=2, running=["4711"])
    assert files(machine) == before
    assert f"removed {machine}/of-the-unit\n" in run("--yes")
    assert not (machine / "of-the-unit").exists()
    assert not (machine / ".local" / "share" / "kvshelf" / "shelf.sqlite3").exists()
    assert files(machine / "scratch") == {"of somebody else"}
    assert (machine / "keys.json").exists()
    assert files(machine / "tmp") == set()
    assert not any(line.startswith(("home", "tier", "Ray")) for line in run("--dry-run").splitlines())


def test_whoever_uses_a_folder_is_found(tmp_path: Path) -> None:
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)", f"--raylet_socket_name={tmp_path}/kvshelf-1/ray"]
    with subprocess.Popen(sleeping) as process:
        told = Path(f"/proc/{process.pid}/cmdline")
        while not told.read_bytes():  # empty for a moment after the program has begun
            time.sleep(0.01)
        try:
            assert str(process.pid) in uninstall.running_in([str(tmp_path / "kvshelf-1")])
            assert str(process.pid) not in uninstall.running_in([str(tmp_path / "kvshelf-2")])
        finally:
            process.kill()
