"""The forms that `kvshelf bench column-sums` times beside each other compute the same thing."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from kvshelf_bench.cli import app
from kvshelf_bench.kernels.baselines import column_sums_by_attention, column_sums_of_whole_weights, flash, repeated
from kvshelf_bench.kernels.kernels import column_sum_times
from tests.kernels.references import column_sums as reference


def random(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(ours, theirs):
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_forms_that_are_timed_give_the_same_sums(dtype):
    q, k = random(4, 130, 16, dtype=dtype), random(2, 130, 16, dtype=dtype, seed=1)
    expected, _ = reference.column_sums(q, k, 0.25)
    _, lse = flash(q, repeated(k, 4), repeated(k, 4), 0.25)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]  # bf16 logits in the naive form
    assert error(column_sums_of_whole_weights(q, k, 0.25), expected) < tolerance
    assert error(column_sums_by_attention(q, k, 0.25, lse), expected) < tolerance


def test_times_are_of_all_four():
    times = column_sum_times(64, torch.float32, rounds=1)
    assert set(times) == {"attention", "column_sums", "naive", "second_attention"}
    assert min(times.values()) > 0


def test_the_command_prints_ratios_for_both_dtypes():
    done = CliRunner().invoke(app, ["column-sums", "--tokens", "128", "--rounds", "1", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert [row["dtype"] for row in report["rows"]] == ["float32", "bfloat16"]
    assert all(row["column_sums"] > 0 and row["attention"] > 0 for row in report["rows"])
