"""What counts as a launch, and how many bytes it moves."""

from __future__ import annotations

import pytest
import torch

from kvshelf.kernels.row_norms import row_norms
from scripts.launch_counts import Counts


def test_operations_count_and_views_do_not():
    states = torch.randn(4, 6)
    with Counts() as counts:
        total = (states.T[1:].unsqueeze(0) + 1).sum()
        room = torch.empty(1000)
        total.item()
    assert counts.launches == {"add": 1, "sum": 1}
    assert counts.total == 2
    assert counts.nbytes == 4 * (20 + 20) + 4 * (20 + 1)
    assert room.numel() == 1000


def test_kernels_count_without_what_their_interpreter_copies(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("KVSHELF_KERNELS", "triton")
    states = torch.randn(2, 5, 8).bfloat16()
    row_norms(states)  # imports the kernel
    with Counts() as counts:
        row_norms(states)
    assert counts.launches == {"_row_norms": 1}
    assert counts.nbytes == 2 * 80 + 4 * 10
    row_norms(states)
    assert counts.total == 1, "nothing is counted behind the block"
