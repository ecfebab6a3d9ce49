"""The forms that `kvshelf.bench.kernels.rows` times beside each other compute the same thing."""

from __future__ import annotations

import pytest
import torch

from kvshelf.bench.kernels.rows import gather_expanded, plain_dequantize, plain_quantize, time_rows
from kvshelf.kernels.quantize import dequantize_channels, dequantize_tokens
from kvshelf.kernels.select import pack


@pytest.mark.parametrize(("dim", "dequantize"), [(1, dequantize_tokens), (2, dequantize_channels)])
def test_the_plain_form_packs_and_unpacks_as_ours_does(dim, dequantize):
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    stored = plain_quantize(x, dim)
    rows = plain_dequantize(*stored, dim, torch.float32)
    assert torch.equal(rows, dequantize(*stored, 4, 32, 128, torch.float32))
    assert float((rows - x).abs().max()) < 0.3


def test_gathering_is_packing():
    states = torch.randn(2, 50, 8, generator=torch.Generator().manual_seed(0))
    index = torch.tensor([[0, 3, 49], [1, 2, 3]])
    mask = torch.zeros(2, 50, dtype=torch.bool).scatter_(1, index, True)
    assert torch.equal(gather_expanded(states, index).flatten(0, 1), pack(states, states, mask)[0])


def test_every_operation_is_timed():
    times = time_rows(rounds=1, mib=1)
    assert len({row.operation for row in times}) == len(times) == 24
    assert all(row.ours_ms > 0 and row.gain.median > 0 and row.floor.median > 0 for row in times)
