"""A name says what it names: one class for a name, and variables that are nouns (docs/internals/architecture.md); and
tests ask what kvshelf tells anybody."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kvshelf"

FILLERS = frozenset({"found", "each", "given", "asked", "held", "told"})
"""Participles and pronouns: as variables they say where a value came from, and not what it is."""

DOCUMENTED = {
    ("kvshelf/api/caches.py", "asked"),
    ("kvshelf/engine/engine.py", "asked"),
    ("kvshelf/store/table.py", "held"),
}
"""What users see: a field of the API, a parameter of `Engine.answer_all`, and a column of stores."""

TWICE = frozenset({"ARKV", "CaM", "D2O", "EMS", "H2O", "InfLLM", "LagKV", "MPCache", "SentenceKV", "TrimKV"})
"""Of methods of two kinds, by the paper's name."""


MOST_PRIVATE = 72
"""How often tests reach into private names of kvshelf, its bench and its scripts: may only fall."""

NOT_OURS = {"_replace", "_exit", "_attn_implementation", "_request_id", "_parser", "_constants"}
"""Private names that libraries define, too, and that tests ask of these."""


def trees(package: Path = PACKAGE) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(package.rglob("*.py")):
        yield str(path.relative_to(package)), ast.parse(path.read_text())


def fillers(package: str) -> set[tuple[str, str]]:
    """The variables, parameters and fields with such names, by file and name, but for `given` of `Policy.fitted`, which
    plug-ins override."""
    names = set()
    for path, tree in trees(ROOT / package):
        fitted = [
            node.args.args for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "fitted"
        ]
        documented = {id(arg) for args in fitted for arg in args}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                name = node.id if isinstance(node, ast.Name) else node.attr
            elif isinstance(node, ast.arg) and id(node) not in documented:
                name = node.arg
            else:
                continue
            if name.strip("_") in FILLERS:
                names.add((f"{package}/{path}", name))
    return names


@pytest.mark.parametrize(("package", "known"), [("kvshelf", TWICE), ("kvshelf_bench", frozenset())])
def test_no_class_name_is_defined_twice(package: str, known: frozenset[str]) -> None:
    files = defaultdict(list)
    for path, tree in trees(ROOT / package):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(path)
    several = {name for name, paths in files.items() if len(paths) > 1}
    assert several <= known, {name: files[name] for name in several - known}


def test_variables_are_nouns() -> None:
    assert fillers("kvshelf") == DOCUMENTED
    assert fillers("kvshelf_bench") == set()


def test_the_glossary_has_forty_words_and_explains_each_once() -> None:
    page = (ROOT / "docs" / "internals" / "architecture.md").read_text()
    glossary = page.split("## Words\n")[1].split("\n## ")[0]
    words = re.findall(r"^\| (?!word )([a-z]+) \|", glossary, re.MULTILINE)
    assert len(words) == 40
    assert words == sorted(set(words))


def private_uses(tree: ast.Module, defined: frozenset[str]) -> Iterator[str]:
    """Attributes of anything but the test itself, names that `setattr` and the like are given, and imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
            "setattr",
            "getattr",
            "delattr",
        ):
            texts = (one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str))
            yield from (next((part for part in text.split(".") if part in defined), "") for text in texts)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("tests"):
            yield from (alias.name for alias in node.names)


def test_tests_reach_into_few_private_names() -> None:
    defined = set()
    for folder in ("kvshelf", "kvshelf_bench", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    defined.add(node.name)
                elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                    defined.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    private = frozenset(name for name in defined if name.startswith("_") and not name.startswith("__")) - NOT_OURS
    uses = Counter(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*.py")
        for name in private_uses(ast.parse(path.read_text()), private)
        if name in private
    )
    assert uses.total() <= MOST_PRIVATE, uses.most_common()
