"""The loops of a compiled library that compute, and which of their vectors the compiler keeps on the stack.

Read from what `objdump` (binutils) shows. A loop is what lies between the target of a jump backwards and that jump, if
no other such loop is in it. The vectors of an array on the stack are reached by an index or a pointer; one at a fixed
place from the stack or frame pointer is a spill.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_objdump = pytest.mark.skipif(shutil.which("objdump") is None, reason="there is no objdump (binutils)")

_FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
_INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*)$")
_TARGET = re.compile(r"^([0-9a-f]+) <")
_FUSED = re.compile(r"^vfn?m(add|sub)\d+p|^vdpbf16ps")
_DECODES = re.compile(r"^imul")
_SINGLE = {"vmovss", "vmovsd"}
"""One number, which a call in a loop makes the compiler keep."""


@dataclass(frozen=True)
class Loop:
    """fused: products of vectors that are added in it. decodes: whether it multiplies integers, as decoders do. spills:
    its instructions that read or write vectors at fixed places of the stack."""

    function: str
    fused: int
    decodes: bool
    spills: tuple[str, ...]


def loops(library: Path) -> list[Loop]:
    """The innermost loops of all functions."""
    words = ["objdump", "-d", "--no-show-raw-insn", str(library)]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return [loop for name, lines in _functions(shown) for loop in _loops(name, lines)]


_Line = tuple[int, str, str]
"""Address, operation and operands."""


def _functions(shown: str) -> Iterator[tuple[str, list[_Line]]]:
    name, lines = "", list[_Line]()
    for text in shown.splitlines():
        if heading := _FUNCTION.match(text):
            yield name, lines
            name, lines = heading[1].partition(".")[0], []
        elif line := _INSTRUCTION.match(text):
            lines.append((int(line[1], 16), line[2], line[3]))
    yield name, lines


def _loops(name: str, lines: list[_Line]) -> Iterator[Loop]:
    places = {address: i for i, (address, _, _) in enumerate(lines)}
    jumps = [(i, _TARGET.match(operands)) for i, (_, word, operands) in enumerate(lines) if word.startswith("j")]
    targets = [(places.get(int(target[1], 16), len(lines)), i) for i, target in jumps if target]
    back = [(begin, end) for begin, end in targets if begin <= end]
    framed = any(word == "mov" and operands == "%rsp,%rbp" for _, word, operands in lines)
    fixed = re.compile(rf"(^|,)-?(0x[0-9a-f]+)?\(%r(sp{'|bp' if framed else ''})\)")
    for begin, end in back:
        if any((begin, end) != (first, last) and begin <= first and last <= end for first, last in back):
            continue
        body = [(word, operands) for _, word, operands in lines[begin : end + 1]]
        yield Loop(
            name,
            sum(_FUSED.match(word) is not None for word, _ in body),
            any(_DECODES.match(word) for word, _ in body),
            tuple(
                f"{word} {operands}"
                for word, operands in body
                if "mm" in operands and word not in _SINGLE and fixed.search(operands)
            ),
        )
