"""The shared library of the C forms, if one was compiled (`compiling.py`) for this CPU's architecture."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvshelf.errors import InternalError
from kvshelf.kernels.compiling import levels, library_path

TYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The dtypes that the C forms read, and the number of each in C. Torch's own operations compute the other dtypes."""

LANES = 16
"""Numbers of a vector in C."""

FEW_ROWS = 8
"""Query rows that C keeps in registers."""

WIDTHS = range(LANES, 257, LANES)
"""Head sizes that C forms hold in whole vectors."""


LEVEL: Final = "KVSHELF_CPU_LEVEL"
"""Forces the library of one level, avx2 or avx512 on x86, neon on ARM, for every operation of a process."""

_LOG = logging.getLogger(__name__)


def architecture() -> str | None:
    """The architecture that the library for this CPU is compiled for; None if there is none, or if the level that
    `KVSHELF_CPU_LEVEL` forces cannot run here. Raises `InternalError` for a level of another name."""
    known, forced = levels(), os.environ.get(LEVEL, "")
    if forced and known and forced not in known:
        raise InternalError(f"{LEVEL} is {forced!r}; it must be one of {', '.join(known)}, or unset")
    names, highest = list(known), capability()
    if forced and (highest not in known or names.index(forced) < names.index(highest)):
        return None
    return known.get(forced or highest)


def capability() -> str:
    """The highest level that this CPU can run. On x86 it is torch's, which ATEN_CPU_CAPABILITY can lower; a level
    without C forms may have any name. On ARM it is the one that every 64-bit CPU has: torch names its own levels there
    after vectors that the C forms do not use."""
    if platform.machine() == "aarch64":
        return "neon"
    return torch.backends.cpu.get_cpu_capability().lower()


@cache
def library() -> ctypes.CDLL | None:
    """The library, loaded once; None if there is none for this CPU and the present sources."""
    level = architecture()
    if level is None:
        if os.environ.get(LEVEL):
            _LOG.warning("%s is %s, which cannot run where torch finds %s: torch's own operations compute",
                         LEVEL, os.environ[LEVEL], capability())  # fmt: skip
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
    """The library, for C forms: `dispatch` chooses them only if it exists."""
    loaded = library()
    assert loaded is not None, "dispatch looks for it first"
    return loaded


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    """The address of a tensor's numbers. The caller keeps the tensor alive."""
    return ctypes.c_void_p(tensor.data_ptr())


class Bf16Products(IntEnum):
    """How this CPU multiplies bf16: as fp32, by AVX512-BF16 or by AMX. Numbered as in C."""

    FP32 = 0
    PAIRS = 1
    TILES = 2


@cache
def bf16_products() -> Bf16Products:
    """How the compiled library multiplies bf16."""
    return Bf16Products(compiled().kvshelf_bf16_products())


class Part(NamedTuple):
    """A row program or an attention, for `run_parts`: the address of its struct in C, and 0 for the other one.
    references: the objects that the struct points to."""

    program: int
    attention: int
    references: object


def run_parts(parts: Sequence[Part]) -> None:
    """Run them in order, in one call: torch's threads start together once, and not once for each operation."""
    addresses = [address for part in parts for address in (part.program, part.attention)]
    table = (ctypes.c_int64 * len(addresses))(*addresses)
    compiled().kvshelf_run(table, ctypes.c_int64(len(parts)), torch.get_num_threads())


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
