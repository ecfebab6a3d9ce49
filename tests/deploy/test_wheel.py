"""What a wheel has of the compiled kernels, built where a C compiler is and where none is."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvshelf.kernels.compiling import compiler, levels, library_path
from kvshelf.kernels.native import architecture
from tests.compilers import needs_compiler
from tests.deploy.wheels import built_wheel

pytestmark = pytest.mark.slow


def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def form_in(folder: Path) -> str:
    """What the kernels of the package in `folder` are for a CPU."""
    code = "import kvshelf.kernels.dispatch as it; print(it.__file__); print(it.cpu_form())"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSHELF_")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=clean, capture_output=True, text=True, check=True, timeout=120
    )
    file, form = done.stdout.splitlines()
    assert Path(file).is_relative_to(folder)
    return form


@needs_compiler
def test_with_a_compiler_it_is_one_of_its_platform_and_its_library_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    # The last level of optimization counts, and the usual one takes twice as long; what it makes is tested elsewhere.
    quick = tmp_path / "cc"
    quick.write_text(f'#!/bin/sh\nexec {shlex.join(compiler())} "$@" -O0\n')
    quick.chmod(0o755)
    wheel = built_wheel(tmp_path / "src", tmp_path / "wheels", CC=str(quick))
    assert "-py3-none-linux_" in wheel.name
    expected = {f"kvshelf/kernels/{library_path(architecture).name}" for architecture in levels().values()}
    assert {name for name in names(wheel) if name.endswith(".so")} == expected
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    form = "eager" if architecture() is None else f"native ({architecture()})"
    assert form_in(tmp_path / "installed") == form


def test_without_one_it_is_pure_and_has_what_can_be_compiled_later(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    wheel = built_wheel(tmp_path / "src", tmp_path / "wheels", CC="no-such-compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    inside = names(wheel)
    assert not [name for name in inside if name.endswith(".so")], "libraries of the checkout must not come along"
    needed = {
        "kvshelf/kernels/native.c",
        "kvshelf/kernels/native.h",
        "kvshelf/kernels/compiling.py",
        "kvshelf_bench/cli.py",
    }
    assert needed <= inside
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    assert form_in(tmp_path / "installed") == "eager"
