"""docs/internals/extend.md and docs/internals/selectors.md: their files are written down as they say, and their
commands run as if their packages were installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvshelf.errors import InvalidRequest
from kvshelf.methods.method import POLICY, SELECTOR, SUFFIX_POLICY
from kvshelf.methods.policies import Policy
from kvshelf.methods.registry import Registry
from kvshelf.methods.selectors import UnitSelector, names
from kvshelf.methods.suffixes.base import SuffixPolicy
from tests.amounts import few

pytestmark = pytest.mark.slow

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "internals" / "extend.md"
SELECTORS_PAGE = DOCS / "internals" / "selectors.md"
FILE = re.compile(r"^```\w+\n# ([\w.]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's package in `vnorm`, which `pip install` put beside it as `run` needs it."""
    return install(tmp_path_factory.mktemp("package"), PAGE, "vnorm")


@pytest.fixture(scope="module")
def selector_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of `middle`."""
    return install(tmp_path_factory.mktemp("package"), SELECTORS_PAGE, "middle")


def install(folder: Path, page: Path, package: str) -> Path:
    (folder / package).mkdir()
    for name, content in FILE.findall(page.read_text()):
        (folder / package / name).write_text(content)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    # What is needed to build is installed with torch; an index may not be there.
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--target", "."]
    done = run(folder, *pip, "install", *options, f"./{package}")
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


USE = """
import middle  # before kvshelf, as a test of the package would
from kvshelf import Engine

engine = Engine.load("kvshelf-tiny")
text = "The access code of the amber falcon is 482913. " + "The tide turns and the boats wait. " * 60
cache = engine.compress(text, policy="full")
question = "What is the access code of the amber falcon?"
for page in (16, 8):
    told = engine.answer(cache, question, select="middle", select_tokens=128, select_params={"page": page})
    print(told.usage.read_tokens, told.usage.cache_read_tokens)
"""


def test_the_selector_of_the_page_is_installed_and_used(selector_package: Path) -> None:
    (shell,) = SHELL.findall(SELECTORS_PAGE.read_text())
    assert "pip install ./middle" in shell
    done = run(selector_package, "bash", "-euo", "pipefail", "-c", shell.replace("pip install ./middle", ""))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "entries of a page" in done.stdout
    listed = run(selector_package, sys.executable, "-m", "kvshelf", "selectors", "--json").stdout.splitlines()
    assert [json.loads(line)["id"] for line in listed] == [*names(), "middle"]
    used = run(selector_package, sys.executable, "-c", USE)
    assert used.returncode == 0, used.stderr
    for line in used.stdout.splitlines():
        read, stored = map(int, line.split())
        assert 100 < read <= 128 < stored


STRANGERS = """
from dataclasses import dataclass

from kvshelf.methods.policies.keydiff import KeyDiff
from kvshelf.methods.selectors import UnitSelector
from kvshelf.methods.selectors.quest import Quest
from kvshelf.methods.suffixes.base import SuffixPolicy
from kvshelf.methods.suffixes.window import Window

class NoPolicy:
    name = "odd"

@dataclass(frozen=True)
class Unitless(UnitSelector):
    name = "odd"

@dataclass(frozen=True)
class Endless(SuffixPolicy):
    name = "odd"

    def reduce(self, suffix):
        raise AssertionError

@dataclass(frozen=True)
class Sage(Quest):
    name = "sage"
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
    advertise(strangers, "strangers", POLICY.group, entries)
    with pytest.raises(InvalidRequest, match=problem) as refusal:
        Registry(Policy)
    assert "of strangers" in refusal.value.message
    assert refusal.value.param == "policy"


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ({"odd": "no_such_module:X"}, "ModuleNotFoundError"),
        ({"odd": "strangers:NoPolicy"}, "no subclass of kvshelf.methods.selectors.base.UnitSelector"),
        ({"keydiff": "strangers:KeyDiff"}, "no subclass"),
        ({"odd": "strangers:Unitless"}, "its class lacks units"),
        ({"odd": "strangers:Quest"}, "has the name 'quest'"),
        ({"quest": "strangers:Quest"}, "there is a selector 'quest' already"),
        ({"sage": "strangers:Sage"}, "there is a selector 'sage' already"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_selector_that_cannot_be_used_is_refused_by_name(
    strangers: Path, entries: dict[str, str], problem: str
) -> None:
    advertise(strangers, "strangers", SELECTOR.group, entries)
    with pytest.raises(InvalidRequest, match=problem) as refusal:
        Registry(UnitSelector, reserved=("sage",))
    assert refusal.value.message.startswith(f"the selector {next(iter(entries))!r} of strangers")
    assert refusal.value.param == "select.method"


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ({"odd": "strangers:NoPolicy"}, "no subclass of kvshelf.methods.suffixes.base.SuffixPolicy"),
        ({"keydiff": "strangers:KeyDiff"}, "no subclass"),
        ({"odd": "strangers:Endless"}, "its class lacks interval"),
        ({"odd": "strangers:Window"}, "has the name 'window'"),
        ({"window": "strangers:Window"}, "there is a suffix policy 'window' already"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_suffix_policy_that_cannot_be_used_is_refused_by_name(
    strangers: Path, entries: dict[str, str], problem: str
) -> None:
    advertise(strangers, "strangers", SUFFIX_POLICY.group, entries)
    with pytest.raises(InvalidRequest, match=problem) as refusal:
        Registry(SuffixPolicy)
    assert refusal.value.message.startswith(f"the suffix policy {next(iter(entries))!r} of strangers")
    assert refusal.value.param == "suffix.policy"


@pytest.mark.parametrize(
    ("group", "command"),
    few(1, [(POLICY.group, "policies"), (SELECTOR.group, "selectors"), (SUFFIX_POLICY.group, "suffixes")]),
)
def test_the_command_line_says_it_in_a_line(strangers: Path, group: str, command: str) -> None:
    advertise(strangers, "strangers", group, {"odd": "strangers:NoPolicy"})
    done = run(strangers, sys.executable, "-m", "kvshelf", command)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "no subclass" in " ".join(done.stderr.split())
