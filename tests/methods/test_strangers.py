"""What another package installs can do all that kvshelf's own methods can."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.methods import strangers


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strangers")
    strangers.write(folder)
    return folder


@pytest.mark.slow
def test_methods_of_another_package_get_gates_an_index_sentences_and_chunks(package: Path) -> None:
    """A policy with gates, selectors with each of their needs, and a suffix policy, each in an engine."""
    files = ["test_blocks.py", "test_sentences.py", "test_selecting.py", "test_bounded.py"]
    output = strangers.run(
        package,
        *("tests/methods/test_needs.py", "tests/methods/policies/test_gates.py"),
        *(f"tests/engine/{file}" for file in files),
        *("-m", "not slow", "-k", "needs or bundled or anew or reads or window"),
    )
    assert int(re.search(r"(\d+) passed", output)[1]) > 20


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "tests",
    [
        ("tests/methods",),
        ("tests/engine/test_selecting.py", "tests/engine/test_bounded.py", "tests/engine/test_suffix_policies.py"),
        ("tests/engine/test_blocks.py", "tests/engine/test_sentences.py", "tests/engine/test_append.py"),
        ("tests/training/test_gates.py", "tests/training/test_chunk_search.py"),
    ],
    ids=lambda tests: tests[0].removeprefix("tests/"),
)
def test_the_suite_of_methods_runs_with_those_of_another_package(package: Path, tests: tuple[str, ...]) -> None:
    ours = ("--deselect", "tests/methods/test_strangers.py")
    output = strangers.run(package, *tests, "-m", "not slow", "-n", "2", *ours, timeout=840)
    assert int(re.search(r"(\d+) passed", output)[1]) > 10
