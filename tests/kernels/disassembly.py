"""The loops of a compiled library that compute, and which of their vectors the compiler keeps on the stack.

Read from what `objdump` (binutils) shows. A loop is what lies between the target of a jump backwards and that jump, if
no other such loop is in it. The vectors of an array on the stack are reached by an index or a pointer; one at a fixed
place from the stack or frame pointer is a spill.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True)
class Processor:
    """How `objdump` writes the instructions of one kind of processor: patterns of an operation and its operands.

    jump: with the address it goes to. fused: a product of vectors that is added to another. decodes: a product of
    integers. framed: what makes a frame pointer, where the compiler makes one only where it needs it. spill: a vector
    that is read from or written to a fixed place of the stack; framed_spill: also from a frame pointer. One number,
    which a call in a loop makes the compiler keep, is none.
    """

    objdump: str
    jump: str
    fused: str
    decodes: str
    framed: str
    spill: str
    framed_spill: str


_X86_SPILL = r"(?!vmovs[sd] )(?=.*mm).*[ ,]-?(0x[0-9a-f]+)?\(%r{}\)"
_ARM_SPILL = r"(ld|st)u?[rp] q.*\[(sp|x29)[,\]]"

X86: Final = Processor(
    objdump="objdump",
    jump=r"j\w+ ([0-9a-f]+) <",
    fused=r"vfn?m(add|sub)\d+p|vdpbf16ps",
    decodes="imul",
    framed="mov %rsp,%rbp",
    spill=_X86_SPILL.format("sp"),
    framed_spill=_X86_SPILL.format("(sp|bp)"),
)
ARM: Final = Processor(
    objdump="aarch64-linux-gnu-objdump",
    jump=r"(?:b(?:\.\w+)?|cbn?z|tbn?z) (?:.*, )?([0-9a-f]+) <",
    fused=r"fml[as] v\d+\.4s",
    decodes="mul|madd",
    framed="mov x29, sp",
    spill=_ARM_SPILL,
    framed_spill=_ARM_SPILL,
)


@dataclass(frozen=True)
class Loop:
    """fused: products of vectors that are added in it. decodes: whether it multiplies integers, as decoders do. spills:
    its instructions that read or write vectors at fixed places of the stack."""

    function: str
    fused: int
    decodes: bool
    spills: tuple[str, ...]


def loops(library: Path, processor: Processor) -> list[Loop]:
    """The innermost loops of all functions."""
    words = [processor.objdump, "-d", "--no-show-raw-insn", str(library)]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return [loop for name, lines in _functions(shown) for loop in _loops(name, lines, processor)]


_FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
_INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*)$")


def _functions(shown: str) -> Iterator[tuple[str, dict[int, str]]]:
    """Name and instructions by their addresses."""
    name, lines = "", dict[int, str]()
    for text in shown.splitlines():
        if heading := _FUNCTION.match(text):
            yield name, lines
            name, lines = heading[1].partition(".")[0], {}
        elif line := _INSTRUCTION.match(text):
            lines[int(line[1], 16)] = f"{line[2]} {line[3]}"
    yield name, lines


def _loops(name: str, lines: dict[int, str], processor: Processor) -> Iterator[Loop]:
    places = {address: i for i, address in enumerate(lines)}
    code = list(lines.values())
    jumps = [(re.match(processor.jump, line), i) for i, line in enumerate(code)]
    targets = [(places.get(int(jump[1], 16), len(code)), i) for jump, i in jumps if jump]
    back = [(begin, end) for begin, end in targets if begin <= end]
    spill = processor.framed_spill if any(line.startswith(processor.framed) for line in code) else processor.spill
    for begin, end in back:
        if any((begin, end) != (first, last) and begin <= first and last <= end for first, last in back):
            continue
        body = code[begin : end + 1]
        yield Loop(
            name,
            fused=sum(re.match(processor.fused, line) is not None for line in body),
            decodes=any(re.match(processor.decodes, line) for line in body),
            spills=tuple(line for line in body if re.match(spill, line)),
        )
