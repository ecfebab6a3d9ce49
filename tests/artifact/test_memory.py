"""Memory to read into: fresh, or what the last reader let go of."""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvshelf.artifact import memory
from kvshelf.artifact.blob.body import as_tensor
from kvshelf.artifact.memory import sparse_memory, used_memory

MB = 1 << 20
HUGE = 2 * MB


@pytest.fixture(autouse=True)
def nothing_spare() -> Iterator[None]:
    memory.spare.clear()
    yield
    memory.spare.clear()


def address(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data


@pytest.mark.parametrize("size", [1, 300_000, HUGE, 3 * HUGE + 7])
def test_memory_that_is_let_go_of_is_used_again(size: int) -> None:
    memory = used_memory(size)
    assert (len(memory), memory.readonly, address(memory) % HUGE) == (size, False, 0)
    first = address(memory)
    memory[:] = b"x" * size
    del memory
    again = used_memory(size)
    assert (len(again), again.readonly, address(again)) == (size, False, first)


def test_sparse_memory_takes_the_pages_that_are_written_and_no_others() -> None:
    def held() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = held()
    memory = sparse_memory(1 << 30)
    for start in range(0, 1 << 30, 4 * HUGE):
        assert memory[start] == 0
        memory[start : start + 10] = b"x" * 10
    assert held() - before < 2 * MB, "128 small pages"


def test_memory_is_not_used_again_while_a_tensor_lies_in_it() -> None:
    memory = used_memory(5 * MB)
    tensor = as_tensor(memory)[MB : MB + 10].view(-1)
    tensor.fill_(7)
    del memory
    others = [used_memory(5 * MB) for _ in range(2)]
    for other in others:
        other[:] = bytes(5 * MB)
    assert tensor.tolist() == [7] * 10


def test_larger_memory_is_used_and_smaller_is_left_for_later() -> None:
    memory = used_memory(9 * MB)
    first = address(memory)
    del memory
    larger = used_memory(9 * MB + HUGE)
    assert address(larger) != first
    assert address(used_memory(MB)) == first


def test_only_the_last_is_kept_and_none_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = used_memory(MB), used_memory(3 * MB)
    del one, two
    assert [len(block) for block in memory.spare] == [3 * MB + 2 * HUGE]
    monkeypatch.setattr(memory, "_SPARE_BYTES", 8 * MB)
    large = used_memory(5 * MB)
    del large
    assert [len(block) for block in memory.spare] == [3 * MB + 2 * HUGE]


MEASURED = """
import sys
from kvshelf.artifact.memory import sparse_memory, used_memory

MB = 1 << 20

def resident():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))

memory = used_memory(256 * MB)
before = resident()
memory[:] = b"x" * len(memory)
print("full", (resident() - before) / MB)
del memory
small = used_memory(10 * MB)
small[:] = b"y" * len(small)
print("small", (resident() - before) / MB)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is measured as Linux tells it")
def test_a_small_cache_in_large_memory_holds_only_what_it_needs() -> None:
    lines = subprocess.run([sys.executable, "-c", MEASURED], check=True, capture_output=True, text=True).stdout.split()
    taken = dict(zip(lines[::2], map(float, lines[1::2]), strict=True))
    assert 250 < taken["full"] < 520  # the bytes it is filled from may be counted too
    assert taken["small"] < 24


def test_threads_never_share_memory() -> None:
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(40):
            memory = used_memory(MB)
            memory[:: MB // 8] = bytes([mark]) * 8
            if bytes(memory[:: MB // 8]) != bytes([mark]) * 8:
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
