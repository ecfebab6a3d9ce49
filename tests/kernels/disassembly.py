"""The loops of a compiled library that compute with vectors, and which of their vectors the compiler keeps on the stack.

Read from what `objdump` (binutils) shows. A loop is what lies between the target of a jump backwards and that jump, if
no other such loop is in it. Vectors of an array on the stack are reached by an index or a pointer; one at a fixed place
from the stack or frame pointer is a spill.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
_INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*)$")
_TARGET = re.compile(r"^([0-9a-f]+) <")
_COMPUTES = re.compile(r"^v(fn?m(add|sub)|mulp|addp|dpbf16|dpps)|^tdp|^vpand|^vpsrl|^vpsll|^imul|^shl")
"""Products and sums of vectors; the shifts and integer products of decoders."""


@dataclass(frozen=True)
class Loop:
    """`begin`: its first address, as objdump shows it. fused: fused products and sums of vectors in it. spills: its
    instructions that read or write vectors at fixed places of the stack."""

    function: str
    begin: str
    fused: int
    spills: tuple[str, ...]


def loops(library: Path) -> list[Loop]:
    """The innermost loops of all functions that compute."""
    shown = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(library)], capture_output=True, text=True, check=True
    ).stdout
    return [loop for name, lines in _functions(shown) for loop in _loops(name, lines)]


_Line = tuple[int, str, str]  # address, operation, operands


def _functions(shown: str) -> Iterator[tuple[str, list[_Line]]]:
    name, lines = "", list[_Line]()
    for text in shown.splitlines():
        if heading := _FUNCTION.match(text):
            yield name, lines
            name, lines = heading[1], []
        elif line := _INSTRUCTION.match(text):
            lines.append((int(line[1], 16), line[2], line[3]))
    yield name, lines


def _loops(name: str, lines: list[_Line]) -> Iterator[Loop]:
    places = {address: i for i, (address, _, _) in enumerate(lines)}
    back = []
    for i, (_, operation, operands) in enumerate(lines):
        target = _TARGET.match(operands) if operation.startswith("j") else None
        if target and places.get(int(target[1], 16), len(lines)) <= i:
            back.append((places[int(target[1], 16)], i))
    frame = any(operation == "mov" and operands == "%rsp,%rbp" for _, operation, operands in lines)
    spill = re.compile(rf"-?(0x[0-9a-f]+)?\(%r(sp{'|bp' if frame else ''})\)")
    for begin, end in back:
        if any((begin, end) != other and begin <= other[0] and other[1] <= end for other in back):
            continue
        body = lines[begin : end + 1]
        if any(_COMPUTES.match(operation) for _, operation, _ in body):
            yield Loop(
                name,
                f"{body[0][0]:x}",
                sum(re.match(r"vfn?m(add|sub)\w*p|vdpbf16", operation) is not None for _, operation, _ in body),
                tuple(
                    f"{operation} {operands}"
                    for _, operation, operands in body
                    if re.search(r"%[xyz]mm", operands) and spill.search(operands)
                ),
            )
