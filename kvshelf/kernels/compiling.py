"""Compiles the C forms of operations into one shared library, if there is a C compiler.

`hatch_build.py` does so when kvshelf is installed, and `python -m kvshelf.kernels.compiling` at any later time. Without
a compiler only speed on a CPU is lost: `dispatch` takes torch's own operations.

The library links to libc alone, so it fits any torch and any Python. Its name has the digest of its sources, so that a
library of other sources is never loaded. Only the standard library is imported here, because a wheel is built without
torch.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent

_LEVELS = {"x86_64": {"avx512": "x86-64-v4", "avx2": "x86-64-v3"}, "aarch64": {"neon": "armv8-a"}}
"""The highest first."""

_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno",
          "-fno-trapping-math", "-Wno-psabi")  # fmt: skip
"""No flag that lets the compiler assume that there is no NaN: a bad score must stay one. -O2, because -O3 takes three
times as long and the loops are written out as vectors."""


class CannotCompile(Exception):
    """There is no compiler, or it failed. The message's first line gives the reason; the compiler's output follows."""


def levels() -> dict[str, str]:
    """Map the name of a level to the architecture of its library, the highest first; empty on machines without C forms.

    A wheel has a library for each architecture, because it may run on another machine than it was built on.
    """
    return _LEVELS.get(platform.machine(), {}) if sys.platform == "linux" else {}


def sources() -> list[Path]:
    """The C files, sorted."""
    return sorted(FOLDER.glob("**/*.c"))


def library_path(architecture: str) -> Path:
    """Where the library for this architecture lies, if it was compiled."""
    digest = hashlib.sha256("\0".join(_FLAGS).encode())
    for path in (*sources(), *sorted(FOLDER.glob("**/*.h"))):
        digest.update(path.read_bytes())
    return FOLDER / f"compiled-{architecture}-{digest.hexdigest()[:16]}.so"


def compile_all(folder: Path = FOLDER) -> list[Path]:
    """Compile for each architecture of this machine into `folder`, and delete the libraries of other sources there.

    Raises `CannotCompile`. Several processes may compile at once; one that has loaded a replaced library keeps it.
    """
    architectures = sorted(set(levels().values()))
    if not architectures:
        raise CannotCompile(f"there are no compiled kernels for {platform.machine()} under {sys.platform}")
    command = compiler()
    try:
        # Compiled in a temporary folder, then moved: a library appears whole or not at all.
        with tempfile.TemporaryDirectory(prefix="compiled-", dir=folder) as temporary, ThreadPoolExecutor() as pool:
            parts = list(pool.map(lambda architecture: _compile(command, architecture, Path(temporary)), architectures))
            libraries = [part.replace(folder / part.name) for part in parts]
        for old in set(folder.glob("compiled-*.so")) - set(libraries):
            old.unlink(missing_ok=True)
    except OSError as exc:
        raise CannotCompile(f"kernels cannot be compiled into {folder}: {exc}") from exc
    return libraries


def compiler() -> list[str]:
    """The command of the C compiler: that of CC, or a usual one. Raises `CannotCompile` if there is none."""
    variable = os.environ.get("CC", "")
    try:
        words = shlex.split(variable) or [next(filter(shutil.which, ("cc", "gcc", "clang")), "cc")]
    except ValueError as exc:
        raise CannotCompile(f"CC is {variable!r}, which is no command: {exc}") from exc
    if shutil.which(words[0]) is None:
        raise CannotCompile(f"there is no C compiler {words[0]!r}")
    return words


def _compile(command: list[str], architecture: str, folder: Path) -> Path:
    path = folder / library_path(architecture).name
    wide = ["-mprefer-vector-width=512"] if architecture == "x86-64-v4" else []
    files = [str(source) for source in sources()]
    words = [*command, *_FLAGS, f"-march={architecture}", *wide, f"-I{FOLDER}", *files, "-lm", "-o", str(path)]
    environment = os.environ | {"LC_ALL": "C"}  # `_reason` parses the compiler's English messages
    process = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", env=environment
    )
    if process.returncode or not path.exists():
        reason = _reason(process.stderr) or f"exit code {process.returncode}, and no library"
        raise CannotCompile(f"{shlex.join(command)} failed: {reason}\n{shlex.join(words)}\n{process.stderr}".strip())
    return path


def _reason(output: str) -> str:
    """The first error in a compiler's output."""
    lines = output.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "")


if __name__ == "__main__":
    try:
        for path in compile_all():
            print(path.name)
    except CannotCompile as exc:
        sys.exit(f"{exc}\nkvshelf goes on with torch's own operations")
