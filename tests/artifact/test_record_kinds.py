"""A kind of record is one file of `blob/kinds`, and nothing else in the format asks which kind a record is."""

from __future__ import annotations

import ast
import inspect
from itertools import permutations
from pathlib import Path

import pytest

from kvshelf.artifact.blob.kinds import KINDS
from kvshelf.artifact.records import RECORDS

ARTIFACT = Path(__file__).parents[2] / "kvshelf" / "artifact"


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_a_file_of_its_name(name: str) -> None:
    assert inspect.getmodule(KINDS[name]).__name__ == f"kvshelf.artifact.blob.kinds.{name}"  # type: ignore[union-attr]


def test_every_kind_of_a_blob_has_its_record_in_memory() -> None:
    assert list(KINDS) == list(RECORDS)
    assert {name: record.kind for name, record in RECORDS.items()} == {name: name for name in KINDS}


@pytest.mark.parametrize("table", [KINDS, RECORDS], ids=["in a blob", "in memory"])
def test_kinds_are_siblings(table: dict[str, type]) -> None:
    assert [pair for pair in permutations(table.values(), 2) if issubclass(*pair)] == []


def test_no_module_asks_for_one_kind_after_another() -> None:
    """At most one question a function; `Recent`, `Parts` and `States` are no kinds of a blob."""
    names = {record.__name__ for record in RECORDS.values()} | {header.__name__ for header in KINDS.values()}
    ladders = {}
    for path in ARTIFACT.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                calls = [call for call in ast.walk(function) if isinstance(call, ast.Call)]
                asked = [call for call in calls if ast.unparse(call.func) == "isinstance"]
                kinds = [names & {ast.unparse(name) for name in ast.walk(call.args[1])} for call in asked]
                if sum(map(bool, kinds)) > ("blob" not in path.parts):
                    ladders[f"{path.relative_to(ARTIFACT)}:{function.name}"] = kinds
    assert ladders == {}
