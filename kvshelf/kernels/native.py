"""The shared library of the C forms, if one was compiled (`compiling.py`) for this CPU's architecture."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kvshelf.kernels.compiling import levels, library_path

TYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The dtypes that the C forms read, and the number of each in C. Torch's own operations compute the other dtypes."""

LANES = 16
"""How many numbers a vector in C holds."""

FEW_ROWS = 8
"""Query rows that C keeps in registers."""

WIDTHS = range(LANES, 257, LANES)
"""Head sizes that C forms hold in whole vectors."""


def architecture() -> str | None:
    """The architecture that libraries for this CPU are compiled for; None if there are none for it."""
    # The capability that torch found, which ATEN_CPU_CAPABILITY can lower.
    return levels().get(torch.backends.cpu.get_cpu_capability())


@cache
def library() -> ctypes.CDLL | None:
    """The library, loaded once; None if there is none for this CPU and the present sources."""
    level = architecture()
    if level is None:
        return None
    try:
        loaded = ctypes.CDLL(str(library_path(level)))
    except OSError:  # no such file, or the system refuses it: another libc, or a file system mounted noexec
        return None
    threads = _parallel()
    if threads is not None:
        loaded.kvshelf_use_threads(threads)
    return loaded


def compiled() -> ctypes.CDLL:
    """The library, for C forms: dispatch chooses them only if it exists."""
    loaded = library()
    assert loaded is not None, "dispatch looks for it first"
    return loaded


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    """Where a tensor's numbers begin. The caller keeps the tensor alive."""
    return ctypes.c_void_p(tensor.data_ptr())


class Part(NamedTuple):
    """A row program or an attention, as `run_parts` takes it: the address of its struct in C, 0 for the other one, and
    what the struct points to."""

    program: int
    attention: int
    held: object


def run_parts(parts: Sequence[Part]) -> None:
    """Run them in order, in one call: torch's threads start together once, and not once for each operation."""
    words = [word for part in parts for word in (part.program, part.attention)]
    given = (ctypes.c_int64 * len(words))(*words)
    compiled().kvshelf_run(given, ctypes.c_int64(len(parts)), torch.get_num_threads())


def row_sizes(states: Tensor) -> ctypes.Array[ctypes.c_int64]:
    """Heads, rows and channels of states `[heads, N, D]`, and bytes from head to head and from row to row: the sizes
    of a `States` in `rows.h`."""
    return (ctypes.c_int64 * 5)(*states.shape, *(stride * states.itemsize for stride in states.stride()[:2]))


def _parallel() -> ctypes.c_void_p | None:
    """The function by which torch's OpenMP starts its threads; None without OpenMP, or in one without this entry."""
    torch_cpu = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # The lookup also searches the libraries that torch_cpu links to, whatever the OpenMP library's file is called.
        return ctypes.cast(ctypes.CDLL(str(torch_cpu)).GOMP_parallel, ctypes.c_void_p)
    except (OSError, AttributeError):
        return None
