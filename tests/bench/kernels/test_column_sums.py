"""The forms that `kvshelf bench column-sums` times beside each other compute the same thing."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from kvshelf.bench.cli import app
from kvshelf.bench.kernels.column_sums import (
    _flash,
    _repeated,
    column_sums_by_attention,
    column_sums_of_whole_weights,
    time_column_sums,
)
from kvshelf.kernels.column_sums import reference


def random(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(ours, theirs):
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_forms_that_are_timed_give_the_same_sums(dtype):
    q, k = random(4, 130, 16, dtype=dtype), random(2, 130, 16, dtype=dtype, seed=1)
    expected, _ = reference.column_sums(q, k, 0.25)
    _, lse = _flash(q, _repeated(k, 4), _repeated(k, 4), 0.25)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]  # bf16 logits in the naive form
    assert error(column_sums_of_whole_weights(q, k, 0.25), expected) < tolerance
    assert error(column_sums_by_attention(q, k, 0.25, lse), expected) < tolerance


def test_times_are_of_all_four():
    times = time_column_sums(num_tokens=64, repeats=1, head_dim=16)
    assert min(times.attention, times.column_sums, times.naive, times.second_attention) > 0


def test_the_command_prints_ratios_for_both_dtypes():
    done = CliRunner().invoke(app, ["column-sums", "--tokens", "128", "--rounds", "1", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert [row["dtype"] for row in report["rows"]] == ["float32", "bfloat16"]
    assert all(row["column_sums"] > 0 and row["attention"] > 0 for row in report["rows"])
