"""Packages of kvshelf stand on floors: a module imports only from floors below its own, and no imports form a circle.

Every import statement counts, also those inside functions and under TYPE_CHECKING: a rule with exceptions for them
would let a circle in through the back door.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvshelf.methods.bundled import BUNDLED

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kvshelf"

FLOORS: list[set[str]] = [
    {"errors", "atomic", "backoff", "names", "workers"},  # of the last itself only a docstring
    {"_extras", "terminal", "api", "kernels"},
    {"client", "artifact"},
    {"store", "model", "methods"},  # of methods itself: what every method has, and their registry
    {"methods.policies"},
    {"methods.selectors", "methods.suffixes"},
    {"methods.catalog"},
    {"engine"},
    {"training", "workers.replica"},
    {"workers.cluster", "samples"},
    {"corpus"},
    {""},  # kvshelf/__init__.py: the public names, loaded lazily
    {"service"},
    {"integrations"},  # vLLM's proxy speaks HTTP as the service does
    {"cli"},
    {"__main__"},
    {"kvshelf_bench"},  # a package of its own, beside kvshelf
]
"""From the lowest to the highest. Packages of one floor do not import each other."""

LEVEL = {package: level for level, floor in enumerate(FLOORS) for package in floor}
LEVEL |= dict.fromkeys(("workers.policies", "workers.selectors"), LEVEL["engine"])  # old names of methods

MODEL_SIDE = {
    *("model", "methods", "methods.policies", "methods.selectors", "methods.suffixes", "methods.catalog"),
    *("engine", "training"),
}
"""Plain Python around a transformers model: they know neither the store, nor Ray, nor HTTP."""

NOT_BELOW = {
    **{package: {"store", "client", "api", "_extras"} for package in MODEL_SIDE - {"engine", "training"}},
    **{package: {"store", "client", "_extras"} for package in ("engine", "training")},  # reports are types of the API
    **{package: {"client"} for package in ("store", "workers.replica", "workers.cluster")},
    "client": {"kernels"},
    "artifact": {"api"},
}
"""What stands below a package and is still not for it."""

ONLY_FOREIGN = {
    "errors": set[str](),
    "atomic": set[str](),
    "backoff": set[str](),
    "names": set[str](),
    "_extras": set[str](),
    "": set[str](),
    "kernels": {"constriction", "numpy", "torch", "triton"},
    "terminal": {"rich"},
    "api": {"pydantic", "pydantic_core"},
    "client": {"httpx", "pydantic", "pydantic_core"},
}

HTTP = {"fastapi", "starlette", "uvicorn", "httpx"}

NO_FOREIGN = {
    "artifact": {"transformers", "tokenizers", "ray", "redis", *HTTP},
    "store": {"transformers", "tokenizers", "ray", *HTTP},
    **{package: {"ray", "redis", *HTTP} for package in MODEL_SIDE},
    "workers.replica": {"ray", *HTTP},
    "workers.cluster": HTTP,
    "corpus": {"transformers", "tokenizers", "ray", *HTTP},
}

RAY_MODULES = {"kvshelf.corpus.run.pipeline", "kvshelf.corpus.run.run"}
"""In the corpus only a run and its pipeline know Ray: how a row gets done is plain Python."""

METHODS = {value.partition(":")[0] for own in BUNDLED.values() for value in own.values()}
"""Modules of a method each. The engine asks what a method needs, never which one it is."""

CODE_FROM_DATA = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}

BETWEEN_OWN_PROCESSES = {"kvshelf.engine.parallel.operations"}
"""Writes to a pipe between a process and the one that it started; no other process has either end."""

# In pieces, so that this file does not hold what it forbids.
FORBIDDEN_TEXT = {
    "a path of one machine": re.compile(
        r"(?<![\w.:])/(?:" + "|".join(("wo" + "rk", "ho" + "me", "ro" + "ot")) + r")/\w"
    ),
    "a reference to the workshop": re.compile(r"\.\./sha" + r"red|DES" + r"IGN\.md"),
    "unfinished work": re.compile(r"\b(?:TO" + "DO|FIX" + r"ME|X{3})\b"),
}


def modules() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.py"), *(ROOT / "kvshelf_bench").rglob("*.py")])


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package(module: str) -> str:
    """The package of `FLOORS` that a module of kvshelf belongs to; "" for kvshelf itself."""
    if module.partition(".")[0] == "kvshelf_bench":
        return "kvshelf_bench"
    parts = module.split(".")[1:]
    names = [".".join(parts[:length]) for length in (2, 1)]
    return next((name for name in names if name in LEVEL), parts[0] if parts else "")


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
    here = package(module)
    found = []
    for name in imports(ast.parse(source)):
        top = name.partition(".")[0]
        if top in ("kvshelf", "kvshelf_bench"):
            target = package(name)
            below = target in LEVEL and LEVEL[target] < LEVEL[here] and target not in NOT_BELOW.get(here, ())
            if target != here and not below:
                found.append(f"{module} imports {name}: {target or 'kvshelf'} is not below {here}")
        elif top in CODE_FROM_DATA and module not in BETWEEN_OWN_PROCESSES:
            found.append(f"{module} imports {name}, which runs code from data")
        elif top in sys.stdlib_module_names:
            continue
        elif here in ONLY_FOREIGN and top not in ONLY_FOREIGN[here]:
            found.append(f"{module} imports {name}; {here} may import {sorted(ONLY_FOREIGN[here])}")
        elif top in NO_FOREIGN.get(here, ()) and not (top == "ray" and module in RAY_MODULES):
            found.append(f"{module} imports {name}; {here} knows nothing of it")
    return found


def imported_modules(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """For each module, the modules among `sources` that it imports."""
    found: dict[str, set[str]] = {}
    for module, source in sources.items():
        found[module] = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                found[module] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                found[module] |= inside & sources.keys()
                if inside - sources.keys():
                    found[module].add(str(node.module))
        found[module] &= sources.keys() - {module}
    return found


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others."""
    reached = {node: _reached(node, graph) for node in graph}
    groups = {tuple(sorted({m, *(n for n in reached[m] if m in reached[n])})) for m in graph if m in reached[m]}
    return [list(group) for group in sorted(groups)]


def _reached(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    todo = list(graph[start])
    while todo:
        module = todo.pop()
        if module not in found:
            found.add(module)
            todo += graph[module]
    return found


def knots(graph: Mapping[str, set[str]]) -> dict[str, list[list[str]]]:
    """For each folder, the groups of its files and folders that need each other, directly or through others."""
    folders = {".".join(parts[:depth]) for parts in (m.split(".") for m in graph) for depth in range(1, len(parts))}
    groups = {folder: circles(_within(folder, graph)) for folder in sorted(folders)}
    return {folder: of_folder for folder, of_folder in groups.items() if of_folder}


def _within(folder: str, graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """For each child of a folder, the other children that modules in it import."""

    def child(module: str) -> str:
        """Of the folder's own `__init__`, the folder."""
        return ".".join(module.split(".")[: folder.count(".") + 2])

    found: dict[str, set[str]] = {}
    for module in graph:
        if module == folder or module.startswith(f"{folder}."):
            inside = {child(m) for m in graph[module] if m == folder or m.startswith(f"{folder}.")}
            found.setdefault(child(module), set()).update(inside - {child(module)})
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


def asked_of_methods(source: str) -> list[str]:
    """Where a source asks which method it has before it: imports of a single method's module, and checks of classes
    that come from `kvshelf.methods`."""
    tree, found, classes = ast.parse(source), [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("kvshelf.methods"):
            names = {alias.asname or alias.name for alias in node.names}
            named = {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
            found += [f"line {node.lineno}: {module}" for module in sorted(named & METHODS)]
            classes |= names
        elif isinstance(node, ast.Import):
            found += [f"line {node.lineno}: {alias.name}" for alias in node.names if alias.name in METHODS]
    for node in ast.walk(tree):
        asked: list[ast.expr] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            asked = node.args[1:]
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        names = {name.id for one in asked for name in ast.walk(one) if isinstance(name, ast.Name)}
        found += [f"line {node.lineno}: {name}" for name in sorted(names & classes)]
    return found


@pytest.mark.parametrize("path", sorted((PACKAGE / "engine").rglob("*.py")), ids=module_name)
def test_the_engine_never_asks_which_method_it_has(path: Path) -> None:
    assert asked_of_methods(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "from kvshelf.methods.policies.ada import Ada",
        "def f():\n    from kvshelf.methods.selectors import fasa",
        "import kvshelf.methods.suffixes.window",
        "from kvshelf.methods.policies.base import Policy\nisinstance(x, Tensor | Policy)",
        "from kvshelf.methods.policies.base import Policy\nmatch x:\n    case Policy():\n        pass",
    ],
)
def test_the_rule_sees_what_asks_for_a_method(source: str) -> None:
    assert len(asked_of_methods(source)) == 1


@pytest.mark.parametrize("path", modules(), ids=module_name)
def test_a_module_imports_only_from_floors_below(path: Path) -> None:
    assert broken_rules(module_name(path), path.read_text()) == []


@pytest.mark.parametrize("path", modules(), ids=module_name)
def test_a_module_runs_no_code_from_data_and_swallows_no_error(path: Path) -> None:
    assert dangerous_calls(path.read_text()) == []


def test_every_package_has_its_floor() -> None:
    assert {package(module_name(path)) for path in modules()} <= LEVEL.keys()


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """Of every module, those that it imports."""
    return imported_modules({module_name(path): path.read_text() for path in modules()})


def test_no_imports_form_a_circle(graph: dict[str, set[str]]) -> None:
    assert circles(graph) == []


def test_the_children_of_every_folder_form_an_order(graph: dict[str, set[str]]) -> None:
    assert knots(graph) == {}


def test_a_knot_of_folders_is_seen_where_no_modules_form_a_circle() -> None:
    sources = {
        "kvshelf.store.disk.a": "from kvshelf.store.redis.b import x",
        "kvshelf.store.redis.b": "",
        "kvshelf.store.redis.c": "def f():\n    from kvshelf.store.disk.d import y",
        "kvshelf.store.disk.d": "",
        "kvshelf.api.e": "import kvshelf.store.disk.a",
    }
    assert circles(imported_modules(sources)) == []
    assert knots(imported_modules(sources)) == {"kvshelf.store": [["kvshelf.store.disk", "kvshelf.store.redis"]]}


def test_a_circle_is_seen_also_through_a_function_and_a_package() -> None:
    sources = {
        "kvshelf.store.a": "def f():\n    from kvshelf.store.b import x",
        "kvshelf.store.b": "from kvshelf.store import c",
        "kvshelf.store.c": "from kvshelf.store.a import y",
        "kvshelf.store.d": "import kvshelf.store.a",
    }
    assert circles(imported_modules(sources)) == [["kvshelf.store.a", "kvshelf.store.b", "kvshelf.store.c"]]


def test_the_engine_has_verbs_and_no_more() -> None:
    """What else it does stands in the objects beside it, a class a file."""
    path = PACKAGE / "engine" / "engine.py"
    source = path.read_text()
    (engine,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    names = {node.name for node in engine.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}
    assert len(names) <= 25  # a property that can be set is one name
    assert len(source.splitlines()) <= 350
    named = {name for path in PACKAGE.rglob("*.py") for name in re.findall(r"\bEngine\.([a-z]\w*)", path.read_text())}
    assert named <= names, "docstrings and messages name methods that Engine has"


def test_a_folder_is_read_at_a_glance() -> None:
    """About 15 files; a catalogue of one method a file may have more."""
    catalogues = {PACKAGE / "methods" / "policies"}
    counts = {path: len(list(path.glob("*.py"))) for path in PACKAGE.rglob("*") if path.is_dir()}
    assert {path: count for path, count in counts.items() if count > 17 and path not in catalogues} == {}


MOST_PARAMETERS = 8
LONG_SIGNATURES = {"kvshelf": 8, "kvshelf_bench": 0}
"""Functions with more parameters: no more than today. What belongs together is a value (`kvshelf.api.options`), or in a
command a group of options (`kvshelf.cli._commands`). The launch signatures of Triton's kernels are pointers and
strides, which nothing can hold together."""


def long_signatures(source: str) -> list[str]:
    """The functions with more than `MOST_PARAMETERS`, besides self and cls, that Triton does not compile."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            long = len(own) - (own[:1] in (["self"], ["cls"])) > MOST_PARAMETERS
            if long and not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                found.append(node.name)
    return found


def test_what_belongs_together_is_one_parameter() -> None:
    for name, most in LONG_SIGNATURES.items():
        found = {
            path: names for path in sorted((ROOT / name).rglob("*.py")) if (names := long_signatures(path.read_text()))
        }
        assert sum(map(len, found.values())) <= most, found


def test_a_long_signature_is_seen() -> None:
    eight = ", ".join("abcdefgh")
    assert long_signatures(f"def f(self, {eight}): ...\nasync def g({eight}, *, i): ...") == ["g"]
    assert long_signatures(f"@triton.jit\ndef f({eight}, i): ...") == []


def test_the_command_line_imports_packages_only_inside_commands() -> None:
    for path in sorted((PACKAGE / "cli").glob("*.py")):
        statements = [s for s in ast.parse(path.read_text()).body if isinstance(s, ast.Import | ast.ImportFrom)]
        packages = {package(name) for s in statements for name in imports(s) if name.startswith("kvshelf")}
        assert packages <= {"", "errors", "atomic", "names", "_extras", "terminal", "cli", "samples"}, path.name


def test_a_test_stands_where_its_module_stands() -> None:
    """A test that is named after a module stands in its folder, one that is named after a folder in it or beside it. In
    `tests/bench` the modules are those of kvshelf_bench."""
    names: dict[tuple[str, str], set[Path]] = {}  # by top folder and name of a module, the folders of tests
    for path in modules():
        root, *folder, file = path.relative_to(ROOT).with_suffix("").parts
        folder = ["bench", *folder] if root == "kvshelf_bench" else folder
        if folder:
            places = {Path(*folder)}
            if file == "__init__":
                file = folder[-1]
                places |= {Path(*folder[:-1])}
            names.setdefault((folder[0], file.strip("_")), set()).update(places)
    tests = ROOT / "tests"
    wrong = {}
    for path in sorted(tests.rglob("test_*.py")):
        here = path.parent.relative_to(tests)
        there = names.get((here.parts[0], path.stem.removeprefix("test_"))) if here.parts else None
        if there and here not in there:
            wrong[path.relative_to(tests).as_posix()] = sorted(folder.as_posix() for folder in there)
    assert wrong == {}


def test_every_folder_of_tests_is_a_folder_of_the_package_or_has_a_name_of_its_own() -> None:
    apart = {
        "attack",
        "deploy",
        "integrations_engines",
        "integrations_vllm",
        "models",
        "oracles",
        "page",
        "real",
        "scripts",
    }
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    inside = [folder for folder in folders if folder.parts and folder.parts[0] not in apart]
    roots = {folder: ROOT / "kvshelf_bench" if folder.parts[0] == "bench" else PACKAGE for folder in inside}
    there = {f: roots[f].joinpath(*(f.parts[1:] if f.parts[0] == "bench" else f.parts)) for f in inside}
    assert [str(folder) for folder, path in there.items() if not path.is_dir()] == []


def texts() -> list[Path]:
    folders = ("kvshelf", "kvshelf_bench", "tests", "scripts", "docs", "deploy", ".ci")
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
        ("kvshelf.store.disk", "from kvshelf.engine.engine import Engine"),
        ("kvshelf.store.disk", "def f():\n    import transformers"),
        ("kvshelf.store.disk", "from kvshelf.client import Client"),
        ("kvshelf.artifact.cache", "from kvshelf.store.base import Store"),
        ("kvshelf.artifact.cache", "import redis"),
        ("kvshelf.kernels.select", "import safetensors"),
        ("kvshelf.kernels.select", "from kvshelf.artifact import cache"),
        ("kvshelf.engine.engine", "import ray"),
        ("kvshelf.engine.engine", "import kvshelf.service.app"),
        ("kvshelf.engine.engine", "from kvshelf.store.base import Store"),
        ("kvshelf.methods.policies.base", "from kvshelf.engine.engine import Engine"),
        ("kvshelf.workers.replica.replica", "import ray"),
        ("kvshelf.workers.replica.replica", "from kvshelf.workers.cluster.remote import RemoteEngine"),
        ("kvshelf.api.strict", "import httpx"),
        ("kvshelf.api", "from kvshelf.kernels import select"),
        ("kvshelf.client._calls", "from kvshelf import Engine"),
        ("kvshelf.client._calls", "from kvshelf.artifact.identity import Layout"),
        ("kvshelf.client._calls", "import torch"),
        ("kvshelf.corpus.run.caller", "import ray"),
        ("kvshelf.corpus.run.run", "from kvshelf.service.settings import Settings"),
        ("kvshelf.service.app", "from kvshelf_bench.quality import tables"),
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


def test_stores_and_callers_of_replicas_need_no_torch() -> None:
    """It takes seconds and 200 MiB, in the front end before Ray starts and in every process that advances a batch."""
    program = """
import sys, kvshelf.client, kvshelf.integrations.mcp
print({"fastapi", "ray", "torch"} & set(sys.modules))
import kvshelf.corpus.run.pipeline, kvshelf.service.jobs.background, kvshelf.store.url
print({"torch", "transformers"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout == "set()\nset()\n"
