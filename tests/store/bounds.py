"""How much memory something takes, as the kernel counts it. Linux only."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def memory_bounded(nbytes: int) -> Iterator[None]:
    """Inside the block this process may take `nbytes` of memory more than it has, and map as many. For children, as the
    limit is one for all threads."""
    ctypes.CDLL(None).malloc_trim(0)  # or memory that was freed before would be taken unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
    before = _memory("VmRSS")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        taken = _memory("VmHWM") - before
        assert taken <= nbytes, f"{taken} bytes of memory were taken where {nbytes} are allowed"


def _memory(name: str) -> int:
    """Bytes, as the kernel counts them for this process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
