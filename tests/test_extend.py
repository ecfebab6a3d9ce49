"""docs/extend.md: its files are written down as it says, and its commands run as if its package were installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvshelf.errors import InvalidRequest
from kvshelf.workers.policies import POLICIES
from kvshelf.workers.policies.info import GROUP
from kvshelf.workers.policies.installed import installed

PAGE = Path(__file__).resolve().parent.parent / "docs" / "extend.md"
FILE = re.compile(r"^```\w+\n# ([\w.]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's package in `vnorm`, which `pip install` put beside it as `run` needs it."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "vnorm").mkdir()
    for name, content in FILE.findall(PAGE.read_text()):
        (folder / "vnorm" / name).write_text(content)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    # What is needed to build is installed with torch; an index may not be there.
    done = run(folder, *pip, "install", "--no-index", "--no-deps", "--no-build-isolation", "--target", ".", "./vnorm")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_package_has_its_test_beside_it_and_installs_without_it(package: Path) -> None:
    assert {path.name for path in (package / "vnorm").iterdir()} >= {"vnorm.py", "pyproject.toml", "test_vnorm.py"}
    assert (package / "vnorm.py").is_file()
    assert not (package / "test_vnorm.py").exists()


def advertise(folder: Path, name: str, group: str, entries: dict[str, str]) -> None:
    metadata = folder / f"{name}-0.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    lines = [f"{entry} = {value}" for entry, value in entries.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    paths = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    scripts = str(Path(sys.executable).parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PATH": f"{scripts}:/usr/bin:/bin"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def test_the_commands_of_the_page_run(package: Path) -> None:
    shell = "\n".join(SHELL.findall(PAGE.read_text()))
    assert "pip install ./vnorm" in shell
    done = run(package, "bash", "-euo", "pipefail", "-c", shell.replace("pip install ./vnorm", ""))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "last tokens that always stay" in " ".join(done.stdout.split())
    assert re.search(r"\b17 passed\b", done.stdout), done.stdout


def test_what_it_adds_to_a_prefill_is_unknown(package: Path) -> None:
    command = [sys.executable, "-m", "kvshelf", "plan", "--policy", "vnorm"]
    refused = run(package, *command)
    assert refused.returncode == 2
    assert "what policy 'vnorm' adds to a prefill is unknown" in " ".join(refused.stderr.split())
    assert run(package, *command, "--tokens-per-s", "1000").returncode == 0


STRANGERS = """
from kvshelf.workers.policies.keydiff import KeyDiff

class NoPolicy:
    name = "odd"
"""


@pytest.fixture
def strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "strangers.py").write_text(STRANGERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "strangers", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ({"odd": "no_such_module:X"}, "ModuleNotFoundError"),
        ({"odd": "strangers:Missing"}, "AttributeError"),
        ({"odd": "strangers:NoPolicy"}, "no subclass"),
        ({"odd": "strangers:KeyDiff"}, "has the name 'keydiff'"),
        ({"keydiff": "strangers:KeyDiff"}, "there is a policy 'keydiff' already"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_policy_that_cannot_be_used_is_refused_by_name(
    strangers: Path, entries: dict[str, str], problem: str
) -> None:
    advertise(strangers, "strangers", GROUP, entries)
    with pytest.raises(InvalidRequest, match=problem) as refusal:
        installed(POLICIES)
    assert "of strangers" in refusal.value.message


def test_the_command_line_says_it_in_a_line(strangers: Path) -> None:
    advertise(strangers, "strangers", GROUP, {"odd": "strangers:NoPolicy"})
    done = run(strangers, sys.executable, "-m", "kvshelf", "policies")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "no subclass" in " ".join(done.stderr.split())
