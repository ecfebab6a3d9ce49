"""Every test of a kernel runs with poisoned memory."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory():
    """`torch.empty` gives NaN: an operation that reads what it never wrote fails its comparison."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def forced_triton(monkeypatch):
    """Dispatch to Triton's kernels, which the interpreter runs on the CPU."""
    pytest.importorskip("triton")
    monkeypatch.setenv("KVSHELF_KERNELS", "triton")
