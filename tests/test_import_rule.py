"""The rooms of kvshelf stand on floors: a module imports only from the floors below its own.

Every import statement counts, also those inside functions and under TYPE_CHECKING: a rule with exceptions for them
would let a cycle in through the back door.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kvshelf"

BELOW: dict[str, set[str]] = {
    "errors": set(),
    "_extras": {"errors"},
    "kernels": {"errors"},
    "store": {"errors", "kernels"},
    "workers": {"errors", "kernels", "store"},
    "client": {"errors"},
    "corpus": {"errors", "_extras", "kernels", "store", "workers", "client"},
    "service": {"errors", "_extras", "kernels", "store", "workers", "client", "corpus", ""},
    "bench": {"errors", "_extras", "kernels", "store", "workers", "client", "corpus"},
    "cli": {"errors", "_extras", "kernels", "store", "workers", "client", "corpus", "service", "bench", ""},
    "__main__": {"cli"},
    "": {"errors", "_extras", "client", "store", "workers"},  # kvshelf/__init__.py: the public names, loaded lazily
}

ONLY_FOREIGN = {
    "errors": set[str](),
    "_extras": set[str](),
    "": set[str](),
    "kernels": {"torch", "triton"},
    "client": {"httpx", "pydantic", "pydantic_core"},
}

NO_FOREIGN = {
    "store": {"transformers", "tokenizers", "ray", "fastapi", "starlette", "uvicorn", "httpx"},
    "workers": {"fastapi", "starlette", "uvicorn", "httpx"},
    "corpus": {"transformers", "tokenizers", "fastapi", "starlette", "uvicorn", "httpx"},
}

RAY_MODULES = {f"kvshelf.workers.{name}" for name in ("cluster", "deployment", "lifeline", "remote")}
RAY_MODULES |= {"kvshelf.corpus.pipeline", "kvshelf.corpus.run"}
"""The engine and its scheduler are plain Python, and so is a row's way to its end; Ray wraps them at the edge."""

CODE_FROM_DATA = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}

# In pieces, so that this file does not hold what it forbids.
FORBIDDEN_TEXT = {
    "a path of one machine": re.compile(
        r"(?<![\w.:])/(?:" + "|".join(("wo" + "rk", "ho" + "me", "ro" + "ot")) + r")/\w"
    ),
    "a reference to the workshop": re.compile(r"\.\./sha" + r"red|DES" + r"IGN\.md"),
    "unfinished work": re.compile(r"\b(?:TO" + "DO|FIX" + r"ME|X{3})\b"),
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """The room a module of kvshelf stands in; "" for the package itself."""
    return [*module.split("."), ""][1]


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that a source imports; `from kvshelf import errors` counts as kvshelf.errors."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            if node.module == "kvshelf":
                yield from (f"kvshelf.{alias.name}" for alias in node.names)
            else:
                yield node.module


def broken_rules(module: str, source: str) -> list[str]:
    """What the imports of `source`, standing in `module`, do that they must not."""
    here = room(module)
    found = []
    for name in imports(ast.parse(source)):
        top = name.partition(".")[0]
        if top == "kvshelf":
            target = room(name)
            if target != here and target not in BELOW[here]:
                found.append(f"{module} imports {name}: {target or 'kvshelf'} is not below {here}")
        elif top in CODE_FROM_DATA:
            found.append(f"{module} imports {name}, which runs code from data")
        elif top in sys.stdlib_module_names:
            continue
        elif here in ONLY_FOREIGN and top not in ONLY_FOREIGN[here]:
            found.append(f"{module} imports {name}; {here} may import {sorted(ONLY_FOREIGN[here])}")
        elif top in NO_FOREIGN.get(here, ()) or (
            top == "ray" and here in ("workers", "corpus") and module not in RAY_MODULES
        ):
            found.append(f"{module} imports {name}; {here} knows nothing of it")
    return found


def dangerous_calls(source: str) -> list[str]:
    """Calls that run code from data, and handlers that swallow every error."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            remote = any(k.arg == "trust_remote_code" and ast.unparse(k.value) != "False" for k in node.keywords)
            if name in ("torch.load", "torch.save", "eval", "exec", "compile", "__import__") or remote:
                found.append(f"line {node.lineno}: {name}")
        elif isinstance(node, ast.ExceptHandler):
            swallows = all(isinstance(statement, ast.Pass) for statement in node.body)
            if node.type is None or (ast.unparse(node.type) in ("Exception", "BaseException") and swallows):
                found.append(f"line {node.lineno}: except that swallows everything")
    return found


@pytest.mark.parametrize("path", modules(), ids=module_name)
def test_a_module_imports_only_from_floors_below(path: Path) -> None:
    assert broken_rules(module_name(path), path.read_text()) == []


@pytest.mark.parametrize("path", modules(), ids=module_name)
def test_a_module_runs_no_code_from_data_and_swallows_no_error(path: Path) -> None:
    assert dangerous_calls(path.read_text()) == []


def test_every_room_has_its_place() -> None:
    assert {room(module_name(path)) for path in modules()} <= BELOW.keys()


def test_the_command_line_imports_rooms_only_inside_commands() -> None:
    for path in sorted((PACKAGE / "cli").glob("*.py")):
        statements = [s for s in ast.parse(path.read_text()).body if isinstance(s, ast.Import | ast.ImportFrom)]
        rooms = {room(name) for s in statements for name in imports(s) if name.startswith("kvshelf")}
        # kvshelf.bench.cli only declares the options of its commands.
        assert rooms <= {"", "errors", "_extras", "cli", "bench"}, path.name


def texts() -> list[Path]:
    folders = ("kvshelf", "tests", "scripts", "docs", "deploy", ".ci")
    endings = {".py", ".md", ".toml", ".txt", ".json", ".yaml", ".yml", ".sh", ""}
    inside = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in endings]
    kept = [path for path in [*inside, *ROOT.glob("*")] if path.is_file() and path.suffix in endings]
    return [path for path in kept if path.name not in ("tokenizer.json", ".git") and "__pycache__" not in path.parts]


@pytest.mark.parametrize("what", FORBIDDEN_TEXT)
def test_no_file_holds(what: str) -> None:
    found = []
    for path in texts():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if FORBIDDEN_TEXT[what].search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvshelf.store.disk", "from kvshelf.workers.engine import Engine"),
        ("kvshelf.store.disk", "def f():\n    import transformers"),
        ("kvshelf.kernels.select", "import numpy"),
        ("kvshelf.kernels.select", "from kvshelf.store import artifact"),
        ("kvshelf.workers.engine", "import ray"),
        ("kvshelf.workers.engine", "import kvshelf.service.app"),
        ("kvshelf.client.types", "from kvshelf import Engine"),
        ("kvshelf.client.types", "from kvshelf.store.identity import Layout"),
        ("kvshelf.client.types", "import torch"),
        ("kvshelf.corpus.caller", "import ray"),
        ("kvshelf.corpus.run", "from kvshelf.service.settings import Settings"),
        ("kvshelf.service.app", "from kvshelf.bench import tasks"),
        ("kvshelf.service.app", "import pickle"),
        ("kvshelf.errors", "import httpx"),
    ],
)
def test_the_rule_sees_what_it_forbids(module: str, source: str) -> None:
    assert len(broken_rules(module, source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path)",
        "eval(text)",
        "load(name, trust_remote_code=True)",
        "try:\n    f()\nexcept Exception:\n    pass",
        "try:\n    f()\nexcept:\n    g()",
    ],
)
def test_the_rule_sees_dangerous_calls(source: str) -> None:
    assert len(dangerous_calls(source)) == 1
