"""`make setup` with another Python. The Python here is a script that writes down what it is asked to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Makes an environment whose python is this script again.
PYTHON = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
  *print*) echo {version} ;;
  *version_info*) exit {too_old} ;;
  "-m venv"*) for last; do :; done; rm -rf $last; mkdir -p $last/bin; cp $0 $last/bin/python ;;
esac
"""


class Checkout:
    """A folder with what `make setup` reads, and what its Pythons were asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.venv = folder / ".venv"
        self.log = folder / "log"
        for name in ("Makefile", "pyproject.toml", "constraints.txt", "hatch_build.py", "kvshelf/kernels/compiling.py"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)

    def setup(self, version: str, *, too_old: bool = False) -> tuple[int, str, list[str]]:
        """The exit code, what went to stderr, and the arguments of each call but those that ask for the version."""
        python = self.folder / f"python{version}"
        python.write_text(PYTHON.format(log=self.log, version=version, too_old=int(too_old)))
        python.chmod(0o755)
        self.log.write_text("")
        command = ["make", "setup", f"PYTHON={python}"]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        calls = [line for line in self.log.read_text().splitlines() if "version_info" not in line]
        return done.returncode, done.stderr, calls


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_an_old_python_is_refused_before_anything_is_made(checkout: Checkout) -> None:
    code, told, calls = checkout.setup("3.10", too_old=True)
    assert code != 0
    assert "needs Python 3.11 or newer" in told
    assert "is 3.10" in told
    assert calls == []
    assert not checkout.venv.exists()


def test_another_python_makes_the_environment_anew_and_the_same_one_does_nothing(checkout: Checkout) -> None:
    code, told, (made, installed, _) = checkout.setup("3.11")
    assert (code, told) == (0, "")
    assert made.startswith("-m venv --clear")
    assert "install" in installed
    assert checkout.setup("3.11") == (0, "", [])
    (checkout.venv / "of-3.11").touch()
    code, _, calls = checkout.setup("3.12")
    assert (code, len(calls)) == (0, 3)
    assert not (checkout.venv / "of-3.11").exists()


def test_another_pyproject_is_installed_into_the_environment_that_is_there(checkout: Checkout) -> None:
    checkout.setup("3.11")
    (checkout.venv / "stays").touch()
    os.utime(checkout.venv / ".installed-3.11", (0, 0))  # older than pyproject.toml, as after an edit
    code, _, calls = checkout.setup("3.11")
    assert (code, len(calls)) == (0, 2)
    assert "install" in calls[0]
    assert (checkout.venv / "stays").exists()


def test_every_link_of_the_checkout_leads_somewhere() -> None:
    """Two led to a folder that had moved."""
    listed = subprocess.run(
        ["git", "ls-files", "-s", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    links = [line.partition("\t")[2] for line in listed.split("\0") if line.startswith("120000 ")]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
