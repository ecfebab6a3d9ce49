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


def test_methods_of_another_package_get_gates_an_index_sentences_and_chunks(package: Path) -> None:
    """A policy with gates, selectors with each of their needs, and a suffix policy, each in an engine."""
    told = strangers.run(
        package,
        "tests/methods/test_needs.py",
        "tests/methods/policies/test_gates.py",
        "tests/engine/test_selecting.py",
        "-m",
        "not slow",
        "-k",
        "needs or gates_engine or infllm or sentence or fasa",
    )
    assert int(re.search(r"(\d+) passed", told)[1]) > 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "tests",
    [
        ("tests/methods",),
        ("tests/engine/test_selecting.py", "tests/engine/test_bounded.py", "tests/engine/test_suffix_policies.py"),
        ("tests/engine/test_append.py", "tests/engine/test_episodes.py", "tests/engine/test_scores.py"),
        ("tests/training/test_gates.py", "tests/training/test_chunk_search.py"),
    ],
    ids=lambda tests: tests[0].removeprefix("tests/"),
)
def test_the_suite_of_methods_runs_with_those_of_another_package(package: Path, tests: tuple[str, ...]) -> None:
    told = strangers.run(package, *tests, "-m", "not slow", "--deselect", "tests/methods/test_strangers.py")
    assert int(re.search(r"(\d+) passed", told)[1]) > 10
