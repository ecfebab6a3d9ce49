"""Every regular expression of the package, found in its source, and texts that are hard for it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, product
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]  # the parser of patterns has no public name
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
METHODS: Final = frozenset({"match", "fullmatch", "search", "split", "sub", "subn", "findall", "finditer"})


@dataclass(frozen=True)
class Used:
    """A pattern where it is used. source: as it is written. pattern: None where only a run knows it. methods: by which
    texts are searched."""

    module: str
    line: int
    source: str
    pattern: re.Pattern[Any] | None
    methods: frozenset[str] = field(default=frozenset())


def used_patterns() -> Iterator[Used]:
    for file in sorted(ROOT.glob("kvshelf*/**/*.py")):
        tree = ast.parse(file.read_text())
        constants = _constants(tree)
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "re"):
                continue
            if (method := node.func.attr) not in METHODS | {"compile"}:
                continue
            methods = frozenset({method}) if method != "compile" else _methods_of(tree, node)
            flags = next((word.value for word in node.keywords if word.arg == "flags"), None)
            flags = flags or (node.args[-1] if len(node.args) > 1 and "re." in ast.unparse(node.args[-1]) else None)
            yield Used(
                str(file.relative_to(ROOT)),
                node.lineno,
                ast.unparse(node.args[0]),
                _compiled(node.args[0], flags, constants),
                methods,
            )


def _constants(tree: ast.Module) -> dict[str, Any]:
    """The names of a module whose values its source says."""
    values: dict[str, Any] = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and getattr(node, "value", None) is not None:
            try:
                values[target.id] = eval(ast.unparse(node.value), {"re": re}, values)  # type: ignore[attr-defined]
            except Exception:
                continue  # it needs what the module imports
    return values


class _Filled(ast.NodeTransformer):
    """Puts a letter where only a run knows what stands there."""

    def visit_FormattedValue(self, _node: ast.FormattedValue) -> ast.AST:
        return ast.Constant("k")


def _compiled(node: ast.expr, flags: ast.expr | None, constants: dict[str, Any]) -> re.Pattern[Any] | None:
    said = eval(ast.unparse(flags), {"re": re}) if flags is not None else 0
    for form in (node, _Filled().visit(ast.parse(ast.unparse(node), mode="eval").body)):
        try:
            return re.compile(eval(ast.unparse(form), {"re": re}, constants), said)
        except (NameError, TypeError, re.error):
            continue
    return None


def _methods_of(tree: ast.Module, made: ast.Call) -> frozenset[str]:
    """The methods of a compiled pattern that its module calls; all where it calls none by the pattern's name."""
    names = {
        ast.unparse(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is made
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    }
    called = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in METHODS and ast.unparse(node.value) in names
    }
    return frozenset(called or {"match", "fullmatch", "search"})


def hard_texts(pattern: re.Pattern[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Beginnings, pieces to repeat and ends, of which a text is hard for the pattern: what it takes up to each of its
    parts, what each part takes, and an end that does not fit, or none."""
    samples = list(dict.fromkeys(_samples(parser.parse(pattern.pattern, pattern.flags))))
    parts = [sample for sample in samples if sample][:12]
    repeated = [*parts, *map("".join, islice(product(parts, parts), 36))]
    made = product(["", *parts[:3]], repeated, ["", "\0"])
    for text in made:
        yield tuple(part.encode("latin-1", "ignore") for part in text) if isinstance(pattern.pattern, bytes) else text


def _samples(tree: Any) -> Iterator[str]:
    """Texts of the parts of a pattern, and of its beginnings up to each part."""
    before = ""
    for operation, argument in tree:
        for inner in _inner(operation, argument):
            yield from _samples(inner)
            yield from (before + sample for sample in islice(_samples(inner), 4))
        sample = _sample(operation, argument)
        yield sample
        before += sample
        yield before


def _inner(operation: Any, argument: Any) -> list[Any]:
    if operation in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
        return [argument[2]]
    if operation is codes.SUBPATTERN:
        return [argument[3]]
    if operation is codes.BRANCH:
        return list(argument[1])
    if operation is codes.ATOMIC_GROUP:
        return [argument]
    return [argument[1]] if operation in (codes.ASSERT, codes.ASSERT_NOT) else []


_OF_CATEGORY: Final = {
    codes.CATEGORY_DIGIT: "1",
    codes.CATEGORY_NOT_DIGIT: "a",
    codes.CATEGORY_SPACE: "\n",
    codes.CATEGORY_NOT_SPACE: "a",
    codes.CATEGORY_WORD: "a",
    codes.CATEGORY_NOT_WORD: " ",
}


def _sample(operation: Any, argument: Any) -> str:
    """A text that one part of a pattern takes."""
    match operation:
        case codes.LITERAL:
            return chr(argument)
        case codes.NOT_LITERAL | codes.ANY:
            return "\\" if argument == ord('"') else "a"
        case codes.IN:
            if argument[0][0] is codes.NEGATE:
                return _outside(argument[1:])
            return _sample(*argument[0])
        case codes.RANGE:
            return chr(argument[0])
        case codes.CATEGORY:
            return _OF_CATEGORY[argument]
    if operation in (codes.ASSERT, codes.ASSERT_NOT):
        return ""
    inner = _inner(operation, argument)
    return "".join(_sample(*part) for part in inner[0]) if inner else ""


def _outside(members: Any) -> str:
    """A character that a negated class takes: if it can, one that the pattern may begin with."""
    taken = {chr(value) for kind, value in members if kind is codes.LITERAL}
    return next(character for character in "{[:/a \n" if character not in taken)
