"""Change one token of kvshelf at a time, and see whether the tests of its folder notice.

    python -m scripts.mutate --count 300 --seed 0 [--jobs 2] [--output mutations.jsonl]

Places are drawn over policies, selectors, suffix policies, codecs, the scheduler and the writer, as many of each group
as it has of all places. The change is made in a copy of the checkout, and pytest runs there, without tests that are
slow or start a service. Places that the output file has already are not run again. mutmut and cosmic-ray change a whole
package and run a whole suite each time; here a place costs seconds.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent

GROUPS: Final = {
    "policies": (
        ("methods/policies",),
        (
            "methods/policies",
            "methods/test_catalog.py",
            "engine/test_probed_chunks.py",
            "engine/test_episodes.py",
            "engine/test_one_budget.py",
            "engine/prefill",
        ),
    ),
    "selectors": (
        ("methods/selectors",),
        (
            "methods/selectors",
            "methods/test_catalog.py",
            "engine/test_selecting.py",
            "engine/test_blocks.py",
            "engine/test_sentences.py",
            "training",
        ),
    ),
    "suffixes": (
        ("methods/suffixes",),
        (
            "methods/test_catalog.py",
            "engine/test_suffix_policies.py",
            "engine/test_bounded.py",
            "engine/test_one_budget.py",
        ),
    ),
    "codecs": (("artifact/codecs.py", "artifact/coded.py", "artifact/coder.py"), ("artifact",)),
    "scheduler": (
        ("workers/replica/scheduler.py", "workers/replica/queues.py"),
        ("workers/replica/test_scheduler.py", "workers/replica/test_fairness.py", "workers/replica/test_programs.py"),
    ),
    "writer": (("store/writer.py",), ("store",)),
}
"""Files and folders of kvshelf, and the tests of them, by group."""

_SWAPS: Final = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "in": "not in", "not in": "in",
    "is": "is not", "is not": "is", "+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "**": "*",
    "&": "|", "|": "&", "and": "or", "or": "and",
    "min": "max", "max": "min", "amin": "amax", "amax": "amin", "argmin": "argmax", "argmax": "argmin",
    "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any",
}  # fmt: skip

_LIMIT_S: Final = 120
"""Of one test: a change that makes a loop endless is noticed. A limit of all tests of a place would take a busy machine
for a test that fails."""


@dataclass(frozen=True)
class Mutation:
    """Bytes `start` to `end` of a file, from the checkout's root, replaced. line: where that is."""

    group: str
    file: str
    start: int
    end: int
    old: str
    new: str
    line: int


def mutations(source: bytes) -> Iterator[tuple[int, int, str]]:
    """Every change of one token: first byte, the byte behind the last, and what stands there instead."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def begin(node: ast.expr) -> int:
        return starts[node.lineno - 1] + node.col_offset

    def end(node: ast.expr) -> int:
        return starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)

    def between(left: ast.expr, right: ast.expr) -> Iterator[tuple[int, int, str]]:
        gap = source[end(left) : begin(right)].decode()
        word = " ".join(part for part in gap.strip(" ()\n").split() if not part.startswith("#"))
        if word in _SWAPS and word in gap:
            at = end(left) + gap.index(word)
            yield at, at + len(word), _SWAPS[word]

    for node in _computing(ast.parse(source)):
        if isinstance(node, ast.Compare):
            for pair in pairwise((node.left, *node.comparators)):
                yield from between(*pair)
        elif isinstance(node, ast.BinOp):
            yield from between(node.left, node.right)
        elif isinstance(node, ast.BoolOp):
            for pair in pairwise(node.values):
                yield from between(*pair)
        elif isinstance(node, ast.UnaryOp):
            yield begin(node), begin(node) + (3 if isinstance(node.op, ast.Not) else 1), ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            value = not node.value if isinstance(node.value, bool) else node.value + 1
            yield begin(node), end(node), repr(value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if name in _SWAPS:
                yield end(node.func) - len(name), end(node.func), _SWAPS[name]


def _computing(node: ast.AST) -> Iterator[ast.AST]:
    """What is computed: no annotation, decorator, message of an error or formatted text."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(value, ast.Raise | ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.Raise | ast.JoinedStr):
                yield from _computing(child)


def drawn(count: int, seed: int) -> list[Mutation]:
    """So many places of all, in the order of their drawing."""
    places = []
    for group, (sources, _) in GROUPS.items():
        for source in sources:
            path = ROOT / "kvshelf" / source
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                text = file.read_bytes()
                places += [
                    Mutation(group, str(file.relative_to(ROOT)), start, end, text[start:end].decode(), new,
                             text[:start].count(b"\n") + 1)
                    for start, end, new in mutations(text)
                ]  # fmt: skip
    return random.Random(seed).sample(places, min(count, len(places)))


def is_noticed(mutation: Mutation, checkout: Path) -> bool:
    """Whether a test of its group fails, or never ends, in a copy of the checkout with the mutation. A file of the
    module's own name comes first, then those that name it: most changes are noticed there, in seconds."""
    file = checkout / mutation.file
    source, stem = file.read_bytes(), file.stem
    places = [checkout / "tests" / place for place in GROUPS[mutation.group][1]]
    files = [path for place in places for path in ([place] if place.is_file() else sorted(place.rglob("test_*.py")))]
    named = {path for path in files if re.search(rf"\b{stem}\b", path.read_text())}
    tests = sorted(files, key=lambda path: (path.name != f"test_{stem}.py", path not in named))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["--timeout", str(_LIMIT_S), "--timeout-method", "thread"]
    command += ["-m", "not slow and not faults and not real and not service", *map(str, tests)]
    file.write_bytes(source[: mutation.start] + mutation.new.encode() + source[mutation.end :])
    try:
        environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True)
    finally:
        file.write_bytes(source)
    if done.returncode not in (0, 1, 2, 4):  # passed, failed, interrupted by an import that fails
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout.decode()[-2000:]}")
    return done.returncode != 0


def results(chosen: Sequence[Mutation], jobs: int) -> Iterator[tuple[Mutation, bool]]:
    """Each mutation, and whether it was noticed, in order; `jobs` copies of the checkout work at a time."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    compiled = (str(path.relative_to(ROOT)) for path in (ROOT / "kvshelf" / "kernels").glob("compiled-*.so"))
    copies = SimpleQueue[Path]()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        for job in range(jobs):
            for name in [*filter(None, names.split("\0")), *compiled]:
                to = Path(folder, str(job), name)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, to, follow_symlinks=False)
            copies.put(Path(folder, str(job)))

        def run(mutation: Mutation) -> tuple[Mutation, bool]:
            copy = copies.get()
            try:
                return mutation, is_noticed(mutation, copy)
            finally:
                copies.put(copy)

        yield from pool.map(run, chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path, help="a line of JSON for each place")
    options = parser.parse_args()
    places = drawn(options.count, options.seed)
    earlier = _earlier(options.output, places) if options.output else {}
    noticed = sum(earlier.values())
    for mutation, seen in results([place for place in places if place not in earlier], options.jobs):
        noticed += seen
        if not seen:
            print(f"not noticed: {mutation.file}:{mutation.line}: {mutation.old!r} -> {mutation.new!r}", flush=True)
        if options.output:
            with options.output.open("a") as lines:
                lines.write(json.dumps(asdict(mutation) | {"noticed": seen}) + "\n")
    print(f"{noticed} of {len(places)} noticed ({noticed / max(len(places), 1):.0%})")


def _earlier(output: Path, places: Sequence[Mutation]) -> dict[Mutation, bool]:
    """Those of the places that the file has, and whether they were noticed."""
    rows = map(json.loads, output.read_text().splitlines()) if output.exists() else ()
    noticed = {Mutation(**{field.name: row[field.name] for field in fields(Mutation)}): row["noticed"] for row in rows}
    return {place: noticed[place] for place in places if place in noticed}


if __name__ == "__main__":
    main()
