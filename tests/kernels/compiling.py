"""Compile Triton kernels for GPUs that need not be there, and read what each takes of one.

The interpreter says whether a kernel computes the right numbers; whether it compiles, fits into shared memory and
keeps its values in registers only the compiler can say. It needs no GPU, but a process in which kernels were not
decorated for the interpreter: `python -m tests.kernels.compiling`, which reads a module and its variants a line.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.amounts import amount

ARCHITECTURES = (80, 90)[: amount(1, 2)]
"""A100, which has less shared memory; in a soak also H100 and H200."""

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Most shared memory of a block, from the CUDA programming guide."""


@dataclass(frozen=True)
class Variant:
    """A kernel with its arguments' types ("*bf16", "i32", "fp32", ..., or several) and its compile-time constants."""

    kernel: str
    signature: dict[str, str | Sequence[str]]
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


class Compiler:
    """A process that compiles for every architecture, one request after the other: importing takes it seconds."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.compiling"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "TRITON_INTERPRET": "0"}, cwd=Path(__file__).parents[2],
        )  # fmt: skip

    def __call__(self, module: str, variants: Sequence[Variant]) -> list[Compiled]:
        """Compile each variant for each architecture. Raises with its output if one does not compile."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([module, *map(asdict, variants)]), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline() or '"the process has ended"')
        assert isinstance(answer, list), answer
        return [Compiled(**one) for one in answer]

    def close(self) -> None:
        self._process.communicate()


def require_fits(compiled: Sequence[Compiled]) -> None:
    """Every kernel fits into the card's shared memory and spills nothing."""
    assert compiled
    for one in compiled:
        assert one.spilled == 0, one
        assert one.shared <= SHARED_BYTES[one.arch], one
        assert 0 < one.registers <= 255, one


def _compiled(module_name: str, variants: Sequence[Variant]) -> list[Compiled]:
    from importlib import import_module

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = import_module(module_name)
    results = []
    for variant in variants:
        signature = {**_with_tuples(variant.signature), **dict.fromkeys(variant.constants, "constexpr")}
        kernel = getattr(module, variant.kernel)
        # torch's allocations are aligned, and a launch tells the compiler so: it then loads 16 bytes at a time.
        types = {(i,): signature[name] for i, name in enumerate(kernel.arg_names)}
        types |= {(*at, n): one for at, kind in types.items() if isinstance(kind, tuple) for n, one in enumerate(kind)}
        aligned = {at: [["tt.divisibility", 16]] for at, kind in types.items() if kind[0] == "*"}
        source = ASTSource(kernel, signature=signature, constexprs=_with_tuples(variant.constants), attrs=aligned)
        for arch in ARCHITECTURES:
            options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
            compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
            registers, spilled = _resources(compiled.asm["cubin"])
            results.append(Compiled(variant.kernel, arch, registers, spilled, compiled.metadata.shared))
    return results


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """As it was before it was JSON."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and local bytes a thread, read by the tool that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", shown)
    assert match, shown
    return int(match[1]), int(match[2]) + int(match[3])


if __name__ == "__main__":
    for request in sys.stdin:
        module_name, *variants = json.loads(request)
        try:
            reports: object = [
                asdict(one) for one in _compiled(module_name, [Variant(**fields) for fields in variants])
            ]
        except Exception:
            reports = traceback.format_exc()[-4000:]
        print(json.dumps(reports), flush=True)
