"""No vector goes to the stack in a loop that takes time: as in products for AVX2, which took four times as long."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from kvshelf.kernels.compiling import FOLDER, compile_all, compiler, levels, library_path
from tests.compilers import needs_compiler
from tests.kernels.disassembly import ARM, X86, Processor, loops

ARM_COMPILER = "aarch64-linux-gnu-gcc"


def needs(processor: Processor) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(processor.objdump) is None, reason=f"there is no {processor.objdump}")


PRODUCTS = {"add_floats", "add_bytes", "add_halves"}

ATTENTION = {"attend", "attend_many", "raise_logits", "cap_logits", "weigh"}
COLUMN_SUMS = {"multiply", "multiply_pairs", "sum_rows", "sum_columns", "add_to_row"}
QUANTIZATION = {"copy_rows", "dequantize"}
ANS = {"channel", "channels", "decode_group"}


@needs(X86)
@pytest.mark.parametrize("level", levels())
def test_loops_keep_their_vectors_in_registers(level):
    path = library_path(levels()[level])
    if not path.exists():
        pytest.skip("no library was compiled: python -m kvshelf.kernels.compiling")
    require_registers(path, X86)


@pytest.mark.slow
@needs(ARM)
@pytest.mark.skipif(shutil.which(ARM_COMPILER) is None, reason=f"there is no {ARM_COMPILER}")
def test_loops_for_arm_keep_their_vectors_in_registers(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setenv("CC", ARM_COMPILER)
    (path,) = compile_all(tmp_path)
    require_registers(path, ARM)


def require_registers(path: Path, processor: Processor) -> None:
    products = PRODUCTS | ({"add_pairs"} if "v4" in path.name else set())
    own = [loop for loop in loops(path, processor) if loop.fused or (loop.decodes and loop.function in ANS)]
    for names in (products, ATTENTION, COLUMN_SUMS, QUANTIZATION, ANS):
        kind = [loop for loop in own if loop.function in names]
        assert names != products or {loop.function for loop in kind} == names
        assert kind, f"no loops of {names}: has a function another name?"
        assert not [(loop.function, loop.spills) for loop in kind if loop.spills]


SPILLING = """
#include "native.h"
EXPORT void many(const float *x, float *y, int64_t count) {
    Floats sums[40] = {{0}};
    for (int64_t k = 0; k < count; k++)
#pragma GCC unroll 40
        for (int i = 0; i < 40; i++) sums[i] += load(x, 40 * k + i, FP32) * spread(x[k + i]);
    memcpy(y, sums, sizeof sums);
}
"""


@needs_compiler
@needs(X86)
@pytest.mark.parametrize("level", levels())
def test_what_spills_is_seen(level, tmp_path):
    """More sums than either level has registers."""
    source, made = tmp_path / "many.c", tmp_path / "many.so"
    source.write_text(SPILLING)
    flags = ["-O2", "-fPIC", "-shared", "-Wno-psabi", f"-march={levels()[level]}", f"-I{FOLDER}"]
    subprocess.run([*compiler(), *flags, str(source), "-o", str(made)], check=True)
    (loop,) = [loop for loop in loops(made, X86) if loop.fused]
    assert loop.function == "many"
    assert len(loop.spills) > 40
