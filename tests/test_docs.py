"""The documentation is run: its Python and shell blocks, page by page, against a real service with the bundled model.

The blocks of one page are one program per language, in the page's order, so a page that needs a name defines it first.
The tests change little: they replace the service's address and add --print-config to `kvshelf serve ...`, so its
options are checked and nothing starts; `pip install` and `make` are checked but not run.
"""

from __future__ import annotations

import os
import random
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvshelf.bench.quality.tasks import Fact, write_document
from kvshelf.cli import app
from kvshelf.client import DEFAULT_URL
from kvshelf.workers import selectors
from kvshelf.workers.policies import POLICIES, catalog
from kvshelf.workers.policies.registry import info_of
from kvshelf.workers.selectors.registry import info_of as selector_info
from kvshelf.workers.selectors.registry import names as selector_names
from tests.test_import_rule import FLOORS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)[^)]*\)")
FIRST = ("README.md", "put.md")
FACT = Fact("access code", "the amber falcon", "482913")


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in BLOCK.findall(page.read_text()) if found == language]


def with_blocks(language: str) -> list[Any]:
    """The pages that have any, as parameters of a test. `make test` runs what a user meets first."""
    return [
        pytest.param(page, id=page.name, marks=[] if page.name in FIRST else pytest.mark.slow)
        for page in PAGES
        if blocks(page, language)
    ]


def name(page: Path) -> str:
    return page.name


def environment(url: str) -> dict[str, str]:
    scripts = str(Path(sys.executable).parent)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("KVSHELF_")}
    return inherited | {"KVSHELF_URL": url, "PATH": scripts + os.pathsep + os.environ["PATH"]}


def run(command: list[str], cwd: Path, url: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=environment(url), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def run_page(page: Path, language: str, folder: Path, url: str) -> str:
    """What the blocks of a page print. Its document is no other page's, because a page may delete what it makes."""
    # Long enough that a quarter of it still holds the fact, as the documents are that the pages speak of.
    chance = random.Random(f"{page.name} {language}")
    report = write_document(chance, [FACT], "prose", 900, lambda text: len(text.split()))
    (folder / "report.txt").write_text(report.text)
    code = "\n".join(blocks(page, language))
    if language == "bash":
        own = code.replace("disk:///tmp/kvshelf-shelf", f"disk://{folder}/shelf")  # one in /tmp may be an old format's
        return run(["bash", "-c", runnable(own, url)], folder, url)
    return run([sys.executable, "-c", code.replace("disk:///tmp/kvshelf-docs", f"disk://{folder}/home")], folder, url)


Pages = dict[tuple[Path, str], Future[str]]


@pytest.fixture(scope="module")
def pages(
    request: pytest.FixtureRequest, bundled_service: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pages]:
    """What the pages print that are tested in this run. Two of them run at a time: most need one core."""
    running: Pages = {}
    with ThreadPoolExecutor(2) as pool:
        for item in request.session.items:
            if isinstance(item, pytest.Function) and "pages" in item.fixturenames:
                chosen: Any = item.callspec.params
                page, language = chosen["page"], chosen["language"]
                folder = tmp_path_factory.mktemp("page")
                running[page, language] = pool.submit(run_page, page, language, folder, bundled_service)
        yield running
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("language", ["python"])
@pytest.mark.parametrize("page", with_blocks("python"))
def test_the_python_of_a_page_runs(page: Path, language: str, pages: Pages) -> None:
    said = pages[page, language].result()
    assert said.strip(), "a page shows what its code prints"
    if page.name in ("README.md", "ask.md", "in-process.md"):
        assert "482913" in said


def runnable(script: str, url: str) -> str:
    """The shell blocks of a page as one program that starts nothing and installs nothing."""
    script = re.sub(r"^kvshelf serve[^\n#]*", lambda m: m[0].rstrip() + " --print-config ", script, flags=re.MULTILINE)
    script = re.sub(r"^make (\w+)", rf"make --directory {ROOT} --dry-run \1 > /dev/null", script, flags=re.MULTILINE)
    script = re.sub(r"^pip install[^\n]*", "", script, flags=re.MULTILINE)
    return "set -euo pipefail\n" + script.replace(DEFAULT_URL, url)


@pytest.mark.parametrize("language", ["bash"])
@pytest.mark.parametrize("page", with_blocks("bash"))
def test_the_shell_of_a_page_runs(page: Path, language: str, pages: Pages) -> None:
    said = pages[page, language].result()
    assert said.strip()
    assert '"error"' not in said  # curl exits with 0 when the service refuses
    if page.name in ("README.md", "ask.md"):
        assert "482913" in said


def test_serve_lines_are_found_and_defused() -> None:
    script = runnable("kvshelf serve --port 1   # note\nmake demo  # x\npip install 'kvshelf[serve]'\n", "http://x")
    assert "kvshelf serve --port 1 --print-config # note" in script
    assert "--dry-run demo" in script
    assert "pip" not in script.splitlines()[3:]


def test_the_extras_that_pages_install_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {found for page in PAGES for found in re.findall(r"(?:kvshelf|\.)\[(\w+)\]", page.read_text())}
    assert named <= extras.keys()
    assert "serve" in named


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text()) if not target.startswith("http")]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_first_screen_says_what_for_whom_and_how() -> None:
    screen = (ROOT / "README.md").read_text().splitlines()[:24]
    assert any(line.startswith("make demo") for line in screen)
    assert any(line.startswith("make test") for line in screen)
    assert any(line.startswith("It is for people who") for line in screen)


def test_the_page_of_policies_names_each_before_its_section() -> None:
    text = (ROOT / "docs" / "policies.md").read_text().partition("## Which to choose")[0]
    assert [info.name for info in catalog() if f"`{info.name}`" not in text] == []


def test_the_readme_names_every_command_that_pages_use() -> None:
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    groups = {group.name for group in app.registered_groups}
    used = {
        m
        for page in PAGES
        for m in re.findall(r"\bkvshelf ([a-z]+)\b(?! is| reads| one)", "\n".join(blocks(page, "bash")))
    }
    assert used <= commands | groups


def architecture() -> str:
    return (ROOT / "docs" / "architecture.md").read_text()


def test_the_architecture_fits_on_a_page_and_names_files_that_exist() -> None:
    assert len(architecture().splitlines()) <= 60
    paths = re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:\.py|/))`", architecture())
    assert len(paths) >= 10
    assert [path for path in paths if not any((root / path).exists() for root in (ROOT, ROOT / "kvshelf"))] == []


def test_the_architecture_names_modules_that_exist() -> None:
    modules = re.findall(r"`(?:kvshelf\.)?((?:client|store|workers|service|corpus|bench)(?:\.\w+)+)`", architecture())
    places = [ROOT / "kvshelf" / module.replace(".", "/") for module in modules]
    assert len(places) >= 4
    assert [place for place in places if not place.is_dir() and not place.with_suffix(".py").exists()] == []


def test_the_architecture_shows_the_layers_of_the_import_rule_in_their_order() -> None:
    lines = architecture().split("```")[1].strip().splitlines()
    shown = [set(line.split("  ")[0].split(", ")) for line in lines]
    existing = [{package for package in floor if package and exists(package)} for floor in reversed(FLOORS)]
    assert shown == [packages for packages in existing if packages]


def exists(package: str) -> bool:
    place = ROOT / "kvshelf" / package.replace(".", "/")
    return place.is_dir() or place.with_suffix(".py").exists()


def test_the_pages_and_catalogs_are_made_of_docstrings_and_the_packaged_numbers() -> None:
    publish = runpy.run_path(str(ROOT / "scripts" / "publish_quality.py"))
    for file, text in publish["written"]().items():
        assert file.read_text() == text, f"{file}: run scripts/publish_quality.py"
    assert catalog() == [info_of(cls) for cls in POLICIES.values()]
    assert selectors.catalog() == list(map(selector_info, selector_names()))


def test_every_selector_says_when_to_choose_it_and_what_it_measured() -> None:
    for info in selectors.catalog():
        assert info.advice, info.name
        if info.name != "policy:sage":  # the same as sage
            shares = {row["share"] for row in info.measured}
            assert {0.25, 0.125, 0.0625} <= shares, info.name
        assert all(0 <= row["exact"] <= 1 and row["read_share"] <= row["share"] * 1.05 for row in info.measured)


def test_every_policy_says_when_to_choose_it_and_what_it_cost() -> None:
    for info in catalog():
        assert info.advice, info.name
        removed = {row["removed"] for row in info.measured if row["codec"] == "none"}
        assert removed == ({0.5, 0.75, 0.875, 0.9375} if info.takes_budget else {0.0}), info.name
        assert all(0 <= row["exact"] <= 1 and row["bytes_per_token"] > 0 for row in info.measured)
