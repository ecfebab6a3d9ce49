"""Compile Triton kernels for GPUs that need not be there, and read what each takes of one.

The interpreter says whether a kernel computes the right numbers; whether it compiles, fits into shared memory and
keeps its values in registers only the compiler can say. It needs no GPU, but a process in which kernels were not
decorated for the interpreter:

    python -m tests.kernels.compiling kvshelf.kernels.merge.triton < variants.json
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ARCHITECTURES = (80, 90)
"""A100; H100 and H200."""

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Most shared memory of a block, from the CUDA programming guide."""


@dataclass(frozen=True)
class Variant:
    """A kernel with its arguments' types ("*bf16", "i32", "fp32", ...) and its compile-time constants."""

    kernel: str
    signature: dict[str, str]
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class Compiled:
    """What the compiled kernel takes: registers a thread, bytes of local memory (spills) a thread, shared bytes a
    block."""

    kernel: str
    arch: int
    registers: int
    spilled: int
    shared: int


def compile_all(module: str, variants: Sequence[Variant]) -> list[Compiled]:
    """Compile each variant for each architecture in a fresh process. Raises with its output if one does not compile."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling", module],
        input=json.dumps([asdict(variant) for variant in variants]),
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [Compiled(**one) for one in json.loads(done.stdout)]


def require_fits(compiled: Sequence[Compiled]) -> None:
    """Every kernel fits into the card's shared memory and spills nothing."""
    assert compiled
    for one in compiled:
        assert one.spilled == 0, one
        assert one.shared <= SHARED_BYTES[one.arch], one
        assert 0 < one.registers <= 255, one


def _main(module_name: str) -> None:
    from importlib import import_module

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = import_module(module_name)
    results = []
    for given in json.load(sys.stdin):
        variant = Variant(**given)
        signature = {**variant.signature, **dict.fromkeys(variant.constants, "constexpr")}
        kernel = getattr(module, variant.kernel)
        # torch's allocations are aligned, and a launch tells the compiler so: it then loads 16 bytes at a time.
        pointers = [i for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*")]
        aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
        source = ASTSource(kernel, signature=signature, constexprs=variant.constants, attrs=aligned)
        for arch in ARCHITECTURES:
            options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
            compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
            registers, spilled = _resources(compiled.asm["cubin"])
            results.append(asdict(Compiled(variant.kernel, arch, registers, spilled, compiled.metadata.shared)))
    json.dump(results, sys.stdout)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and local bytes a thread, read by the tool that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", shown)
    assert found, shown
    return int(found[1]), int(found[2]) + int(found[3])


if __name__ == "__main__":
    _main(sys.argv[1])
