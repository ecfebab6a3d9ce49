"""Whether kvshelf's kernels can be compiled here."""

from __future__ import annotations

import subprocess

import pytest

from kvshelf.kernels.compiling import CannotCompile, compiler, levels


def _why_not() -> str:
    """Empty where there is a compiler that is new enough."""
    if not levels():
        return "there are no C forms for this machine"
    try:
        words = compiler()
    except CannotCompile as exc:
        return str(exc)
    knows = [[*words, f"-march={level}", "-xc", "-fsyntax-only", "-"] for level in levels().values()]
    new_enough = not any(subprocess.run(test, input="", text=True, capture_output=True).returncode for test in knows)
    return "" if new_enough else f"{words[0]} is too old: it takes GCC 11 or Clang"


needs_compiler = pytest.mark.skipif(bool(_why_not()), reason=_why_not())
