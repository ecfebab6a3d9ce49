"""kvshelf's own methods as if they were those of another package: copies of their files, named by entry points.

Bases and helpers stay kvshelf's, as they do for any plug-in. The plug-in of pytest empties kvshelf's list of its own
methods, and gives tests, which import some by their modules, the copies. kvshelf itself keeps its own classes, so what
asks for one of them finds that no method is one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from kvshelf.methods.bundled import BUNDLED

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "strange_methods"

PLUGIN = """
import builtins

from kvshelf.methods.bundled import BUNDLED

OWN = {value.partition(":")[0] for own in BUNDLED.values() for value in own.values()}
for own in BUNDLED.values():
    own.clear()
plain = builtins.__import__


def imported(name, globals=None, locals=None, fromlist=(), level=0):
    if name in OWN and str((globals or {}).get("__name__")).startswith("tests."):
        name = name.replace("kvshelf.methods", "strange_methods")
    return plain(name, globals, locals, fromlist, level)


builtins.__import__ = imported
"""


def write(folder: Path) -> None:
    """Write the package, what pip would say of it, and the plug-in of pytest."""
    modules = sorted({value.partition(":")[0] for own in BUNDLED.values() for value in own.values()})
    named = re.compile("|".join(rf"(?<=from ){re.escape(module)}(?= import)" for module in modules))
    for module in modules:
        file = folder / PACKAGE / Path(*module.split(".")[2:]).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        source = (ROOT / Path(*module.split(".")).with_suffix(".py")).read_text()
        file.write_text(named.sub(lambda match: match[0].replace("kvshelf.methods", PACKAGE), source))
    (folder / "bundled_by_strangers.py").write_text(PLUGIN)
    metadata = folder / "strangers-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: strangers\nVersion: 0.1\n")
    lines = []
    for kind, own in BUNDLED.items():
        lines.append(f"[kvshelf.{kind}]")
        lines += [f"{name} = {value.replace('kvshelf.methods', PACKAGE)}" for name, value in own.items()]
    (metadata / "entry_points.txt").write_text("\n".join([*lines, ""]))


def run(folder: Path, *tests: str, timeout: float = 280) -> str:
    """Run tests with the methods of the package in place of kvshelf's. Returns the last lines of the report."""
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-p", "bundled_by_strangers", "-p", "no:cacheprovider", "-q", "-x"]
    done = subprocess.run(
        [*command, *tests],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    report = done.stdout[-3000:] + done.stderr[-2000:]
    assert done.returncode == 0, report
    return done.stdout[-500:]
