"""Every test of a kernel runs with poisoned memory, and Triton's kernels run under its interpreter."""

from __future__ import annotations

import os

import pytest
import torch

# Read when a kernel is decorated, so before the first import of one. Compilation is tested in processes of its own.
os.environ["TRITON_INTERPRET"] = "1"


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
