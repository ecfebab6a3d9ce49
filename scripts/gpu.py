"""Measure and check everything on a GPU in a few minutes, from a checkout alone: see docs/internals/gpu.md.

    python scripts/gpu.py --out FOLDER [--budget SECONDS] [--toy] [--parts NAMES] [--wheels FOLDER]
    python scripts/gpu.py --record

Each part is a process of its own, with a time of its own. What a part has measured when it fails or is killed is kept,
and the next one runs. FOLDER then has gpu.md, gpu.json, rows.jsonl, gpu.log and profile.txt. The exit code is 0 if
every part ran to its end and no check found anything wrong, whatever the goals.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Task:
    """A part of the run: a module of `gpu_parts`, the most seconds that it has, and what is to be reached. Time that a
    part leaves is the next ones'. environment: of its process in a toy run."""

    name: str
    seconds: int
    goal: str
    toy_environment: tuple[tuple[str, str], ...] = ()


_INTERPRETED = (("TRITON_INTERPRET", "1"), ("KVSHELF_KERNELS", "triton"))

TASKS = (
    Task("oracles", 60, "every kernel against its oracle: 0 wrong", _INTERPRETED),
    Task("ceilings", 40, "60 % of the copy rate for gather, pack, window scores and prefix attention"),
    Task("answers", 60, "answers and kept positions as on a CPU, but for named ties"),
    Task(
        "prefill", 60, "compressing over a plain prefill: 1.02 at 8k, 1.01 at 32k; memory of weights, kept, one layer"
    ),
    Task("first_token", 60, "a question's first token at 32k: 50 times from the host, 30 from an int4 file"),
    Task("decode", 90, "32 answers on one document: 5 times the naive way, 60 % of the byte limit"),
    Task("klt", 60, "5e10 symbols a second, bits equal to the C reader"),
    Task("selectors", 40, "a step that reads 1/16 of 128k: 0.3 of a dense one"),
)
"""Cheapest and most telling first: a budget that ends early loses the last ones."""

_TOY_SECONDS = 300
"""Of each part of a toy run, which takes two minutes in all on a quiet machine and may take long on a busy one."""
_BUDGET_S = 480
_GRACE_S = 3.0
"""Seconds between the end that a part knows and its kill, and kept from the budget for the report."""


def main() -> int:
    options = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part under way is killed, too
    if options.record:
        return subprocess.call(
            [sys.executable, "-m", "scripts.gpu_parts.recording"], cwd=ROOT, env=environment_of(None, ())
        )
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    for old in ("rows.jsonl", "gpu.log", "profile.txt"):
        (out / old).unlink(missing_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvshelf-gpu-") as folder:
        site = unpacked(options.wheels, Path(folder))
        report: dict[str, Any] = {"toy": options.toy, "machine": _machine(site, options), "parts": []}
        chosen = [task for task in TASKS if not options.parts or task.name in options.parts]
        for place, task in enumerate(chosen):
            later = sum(_TOY_SECONDS if options.toy else task.seconds for task in chosen[place + 1 :])
            left = options.budget - (time.monotonic() - started) - _GRACE_S
            own = _TOY_SECONDS if options.toy else task.seconds
            # What earlier parts have left is this one's; where time is short, each gives way in proportion.
            seconds = left - later if left >= later + own else left * own / (later + own)
            report["parts"].append(ran(task, out, site, seconds, options))
            report["seconds"] = time.monotonic() - started
            write(out, report)
    print((out / "gpu.md").read_text())
    return 0 if all(part["state"] == "done" for part in report["parts"]) and not what_is_wrong(report) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure and check everything on a GPU; see docs/internals/gpu.md")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of the report")
    parser.add_argument("--budget", type=float, help=f"seconds of everything together, {_BUDGET_S} unless given")
    parser.add_argument("--toy", action="store_true", help="every part on the CPU, small: whether the script runs")
    parser.add_argument("--parts", type=lambda text: text.split(","), help="only these, comma-separated")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".gpu-wheels", help="folder of scripts/gpu_wheels.sh")
    parser.add_argument("--device", default=None, help="cuda:0 unless given")
    parser.add_argument("--commit", default=os.environ.get("KVSHELF_COMMIT", ""), help="where the checkout has no git")
    parser.add_argument("--record", action="store_true", help="record the CPU's results for the part answers")
    options = parser.parse_args()
    options.out = options.out.resolve()
    unknown = set(options.parts or ()) - {task.name for task in TASKS}
    if unknown:
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; there are {', '.join(t.name for t in TASKS)}")
    options.budget = options.budget or (_TOY_SECONDS * len(TASKS) if options.toy else _BUDGET_S)
    options.device = options.device or ("cpu" if options.toy else "cuda:0")
    return options


# Processes


def unpacked(wheels: Path, folder: Path) -> Path | None:
    """A folder with what the wheels hold that fit this Python; None without any. A wheel is an archive of what belongs
    on the path, so neither pip nor a network is needed."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    kinds = (f"-{tag}-", "-abi3-", "-none-any")  # for this version, for any from one on, without compiled code
    fitting = [path for path in sorted(wheels.glob("*.whl")) if any(kind in path.name for kind in kinds)]
    for path in fitting:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder)
    return folder if fitting else None


def environment_of(site: Path | None, more: Sequence[tuple[str, str]]) -> dict[str, str]:
    path = [str(ROOT), *([str(site)] if site is not None else []), os.environ.get("PYTHONPATH", "")]
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(filter(None, path)), **dict(more)}


def ran(task: Task, out: Path, site: Path | None, seconds: float, options: argparse.Namespace) -> dict[str, Any]:
    """Run one part and tell how it ended. It is killed with all its children when its time is over."""
    words = [sys.executable, "-m", "scripts.gpu_parts", task.name, "--out", str(out), "--seconds", f"{seconds:.1f}"]
    words += ["--device", options.device, *(["--toy"] if options.toy else [])]
    environment = environment_of(site, task.toy_environment if options.toy else ())
    started = time.monotonic()
    print(f"{task.name}: at most {seconds:.0f} s ...", flush=True)
    with (out / "gpu.log").open("a") as log:
        log.write(f"==== {task.name}\n")
        log.flush()
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code: int | None = process.wait(max(1.0, seconds + _GRACE_S / 2))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # What it started goes with it, also where it ended by itself.
            _kill(process)
    state = "out of time" if code is None else "done" if code == 0 else f"failed with code {code}"
    spent = time.monotonic() - started
    print(f"{task.name}: {state} after {spent:.0f} s", flush=True)
    return {"name": task.name, "goal": task.goal, "state": state, "seconds": spent, "most_s": seconds}


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


# The machine


def _machine(site: Path | None, options: argparse.Namespace) -> dict[str, Any]:
    """The card, the versions and the commit. Nothing here may fail: each is asked by itself."""
    about = (
        "import json, torch\n"
        "def version(name):\n"
        "    try: return __import__('importlib.metadata').metadata.version(name)\n"
        "    except Exception as error: return None\n"
        "told = {name: version(name) for name in ('torch', 'triton', 'transformers', 'numpy')}\n"
        "told['cuda'] = torch.version.cuda\n"
        "if torch.cuda.is_available():\n"
        "    card = torch.cuda.get_device_properties(0)\n"
        "    told |= {'card': card.name, 'card_bytes': card.total_memory, 'l2_bytes': card.L2_cache_size,\n"
        "             'multiprocessors': card.multi_processor_count, 'capability': [card.major, card.minor]}\n"
        "print(json.dumps(told))\n"
    )
    facts = _output([sys.executable, "-c", about], environment_of(site, ()))
    machine = json.loads(facts.splitlines()[-1]) if facts else {}
    driver = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], None)
    return {
        "card": None, **machine,
        "driver": driver.splitlines()[0] if driver else None,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "wheels": sorted(path.name for path in options.wheels.glob("*.whl")),
        "commit": options.commit or _output(["git", "-c", "safe.directory=*", "rev-parse", "HEAD"], None) or None,
        "sources": _sources(),
    }  # fmt: skip


def _output(words: Sequence[str], environment: dict[str, str] | None) -> str:
    """What a program prints; "" where it cannot be run, fails or hangs."""
    try:
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _sources() -> str:
    """A digest of the sources that are measured: a checkout may have no git, or changes that are in no commit."""
    hasher = hashlib.sha256()
    for path in sorted([*(ROOT / "kvshelf").rglob("*.py"), *(ROOT / "scripts" / "gpu_parts").glob("*.py")]):
        hasher.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return hasher.hexdigest()[:16]


# The report


def write(out: Path, report: dict[str, Any]) -> None:
    rows = _rows(out / "rows.jsonl")
    report["rows"] = rows
    for name, text in (("gpu.json", json.dumps(report, indent=1)), ("gpu.md", _markdown(report))):
        fresh = out / f".{name}"
        fresh.write_text(text + "\n")
        fresh.replace(out / name)


def _rows(path: Path) -> list[dict[str, Any]]:
    """Those that are whole: a killed part may have written half of one."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            rows.append({"part": "?", "name": "half a row", "error": line[:200]})
    return rows


def what_is_wrong(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows that could not be measured, and checks (goals of "at most 0") that found something."""
    return [row for row in report["rows"] if "error" in row or (row["goal"] == 0 and not row["met"])]


def _markdown(report: dict[str, Any]) -> str:
    machine, rows = report["machine"], report["rows"]
    short = [row for row in rows if row.get("met") is False]
    errors = [row for row in rows if "error" in row]
    unfinished = [part for part in report["parts"] if part["state"] != "done"]
    lines = [f"# kvshelf on {machine['card'] or 'a CPU'}{', a toy run' if report['toy'] else ''}", ""]
    facts = {
        name: machine.get(name) for name in ("driver", "cuda", "torch", "triton", "transformers", "python", "commit")
    }
    lines += [", ".join(f"{name} {value or 'unknown'}" for name, value in facts.items())]
    lines += [f"sources {machine['sources']}, {len(report['parts'])} parts in {report['seconds']:.0f} s", ""]
    lines += ["## Fell short", ""]
    if not (short or errors or unfinished):
        lines += ["Nothing.", ""]
    if short:
        lines += [*_table(short, with_part=True), ""]
    lines += [f"- {part['name']}: {part['state']} after {part['seconds']:.0f} s" for part in unfinished]
    lines += [f"- {row['part']}, {row['name']}: {row['error']}" for row in errors]
    for part in report["parts"]:
        of_part = [row for row in rows if row["part"] == part["name"] and "error" not in row]
        lines += ["", f"## {part['name']}", "", f"Goal: {part['goal']}. {part['state'].capitalize()}.", ""]
        lines += _table(of_part, with_part=False) if of_part else ["No row."]
    return "\n".join(lines)


def _table(rows: Sequence[dict[str, Any]], *, with_part: bool) -> list[str]:
    head = [*(["part"] if with_part else []), "what", "measured", "goal", "of the goal", "note"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        goal = "" if row["goal"] is None else f"{row['bound']} {_number(row['goal'])}"
        share = "" if row["share"] is None else f"{row['share']:.2f}"
        measured = "not measured" if row["measured"] is None else f"{_number(row['measured'])} {row['unit']}".strip()
        cells = [*([row["part"]] if with_part else []), row["name"], measured, goal, share, row["note"]]
        lines.append(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |")
    return lines


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e7 else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
