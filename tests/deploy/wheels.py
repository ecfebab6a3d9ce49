"""The package as a wheel, built as the Dockerfile builds it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.files import DOCKERFILE, ROOT, copies

_COMMAND = "python -m pip wheel --no-cache-dir --no-deps --wheel-dir"


def built_wheel(source: Path, target: Path, **environment: str) -> Path:
    """Built from `source`, where everything is put that the Dockerfile copies and nothing else."""
    for name, _ in copies("installed-cpu"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    assert f"RUN {_COMMAND} /wheels ." in DOCKERFILE.read_text()
    words = [sys.executable, *_COMMAND.split()[1:], str(target), "."]
    done = subprocess.run(words, cwd=source, env=os.environ | environment, capture_output=True, text=True, timeout=240)
    if "No matching distribution found for hatchling" in done.stderr:
        pytest.skip("hatchling cannot be had: there is no package index")
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = target.glob("kvshelf-*.whl")
    return found
