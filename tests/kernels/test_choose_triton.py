"""The choice by Triton: under the interpreter against the naive form, and compiled for GPUs that are not there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvshelf.kernels.choose import choose
from tests.amounts import pairwise
from tests.kernels.compiling import Variant, require_fits
from tests.kernels.references import choose as reference
from tests.kernels.tensors import random
from tests.kernels.test_choose import choice_of, chosen_by, units


@pytest.mark.usefixtures("forced_triton")
@pairwise(
    {
        "lengths": [[1], [90, 37], [60, 5, 88]],
        "size": [1, 16, 32],
        "width": [5, 48],
        "budget": [64, 70, 200],
        "dtype": [torch.float32, torch.bfloat16],
        "span": [True, False],
        "by_column": [True, False],
        "joined": ["max", "mean"],
        "cut": [True, False],
        "force": [True, False],
        "more": ["nothing", "another", "parents"],
    }
)
def test_chooses_as_the_naive_form(lengths, size, width, budget, dtype, span, by_column, joined, cut, force, more):
    parts = [units(lengths, size, width, dtype=dtype, span=span, by_column=by_column)]
    if more == "parents":
        parts = [replace(parts[0], parents=units(lengths, 2 * size, width, dtype=dtype, seed=20), children=2)]
    if more == "another":  # another prefix, with units of another kind
        parts.append(units([40] * len(lengths), 4, width, seed=7, span=not span, by_column=not by_column))
    most = max(budget, sum(max(part.forced_rows) for part in parts))
    choice = choice_of(parts, most, group=joined, cut=cut, force=force)
    queries = random(3 * len(lengths), width, seed=3)
    assert chosen_by(choose, queries, choice) == chosen_by(reference.choose, queries, choice)


@pytest.mark.usefixtures("forced_triton")
def test_more_units_than_a_program_looks_at_together():
    choice = choice_of([units([2500, 1100], 1, 8, span=False)], 1300)
    queries = random(4, 8, seed=5)
    assert chosen_by(choose, queries, choice) == chosen_by(reference.choose, queries, choice)


@pytest.mark.usefixtures("forced_triton")
def test_equal_units_are_taken_in_order():
    part = replace(units([80], 8, 16, span=False, forced=False), low=torch.ones(10, 16))
    assert chosen_by(choose, random(2, 16), choice_of([part, part], 40)) == [[list(range(40))], [[]]]


@pytest.mark.usefixtures("forced_triton")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_score_that_is_no_number_ranks_first(bad):
    part = units([80], 8, 16, span=False, forced=False)
    part.low[6] = bad
    (rows_of_heads,), best = chosen_by(choose, random(1, 16).abs(), choice_of([part], 16)), set(range(48, 56))
    assert best <= set(rows_of_heads[0])


@pytest.mark.usefixtures("forced_triton")
def test_columns_name_the_channels_of_a_query():
    choice = choice_of([units([64, 64], 8, 4, span=False)], 24, columns=torch.tensor([[3, 1, 0, 7], [6, 2, 5, 4]]))
    queries = random(4, 8, seed=5)
    assert chosen_by(choose, queries, choice) == chosen_by(reference.choose, queries, choice)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_kernel_compiles_and_fits(compile_all, dtype):
    tables = {"scores": "*fp32", "rows": "*i32"}
    places = {"ends": "*i32", "starts": "*i32", **dict.fromkeys(("place", "most", "num_units"), "i32")}
    score = {"members": "*fp32", "low": f"*{dtype}", "span": f"*{dtype}", "forced": "*u8", **tables, **places}
    score |= dict.fromkeys(("low_unit", "low_column", "span_unit", "span_column"), "i32")
    score |= dict.fromkeys(("scale", "linear", "relu"), "fp32")
    variants = [
        Variant(
            "_score",
            score,
            {"GROUP": 4, "WIDTH": width, "BLOCK_WIDTH": width, "BLOCK": 4096 // width, "SPAN": True, "MEAN": mean,
             "FORCE": True},
            8,
        )
        for width, mean in ((8, False), (128, True), (512, False))
    ]  # fmt: skip
    variants.append(Variant("_take", {**tables, "num_units": "i32", "budget": "i32"}, {"CUT": False, "BLOCK": 1024}))
    variants.append(Variant("_fill", {"rows": "*i32", "chosen": "*i32", "counts": "*i32", **places}, {"BLOCK": 1024}))
    require_fits(compile_all("kvshelf.kernels.choose.triton", variants))
