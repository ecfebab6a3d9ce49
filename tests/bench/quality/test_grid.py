"""The grid of the quality bench: the units it plans, and the options it refuses."""

from __future__ import annotations

import pytest

from kvshelf.errors import InvalidRequest
from kvshelf.methods.policies import POLICIES
from kvshelf_bench.quality.grid import SIZES, Block, Changes, Grid, Row, Variant, make_grid, make_rows

FULL = Row(Variant("full"), 0.0)


def test_every_policy_ratio_and_cell_is_planned_and_the_baseline_in_every_cell():
    grid = make_grid("default")
    rows = grid.rows()
    assert {row.variant.policy for row in rows} == set(POLICIES)
    for block in grid.blocks:
        assert FULL in block.rows(export=False)
    assert {(unit.cell, row) for unit in grid.units() for row in unit.rows} >= {(cell, FULL) for cell in grid.cells()}
    assert {row.removed for row in rows if row.variant.policy == "keydiff"} == {0.5, 0.75, 0.875, 0.9375}


def test_a_prefill_is_planned_once_for_all_codecs_and_blocks():
    block = Block(("multikey",), ("prose",), (1024,), 2, ("keydiff",), (0.5,), ("none", "int4"))
    wider = Block(
        ("multikey",),
        ("prose",),
        (1024,),
        3,
        ("keydiff",),
        (0.5,),
        ("none", "int2"),
    )
    units = Grid((block, wider)).units()
    assert len(units) == len({(unit.cell, unit.document, *unit.rows[0].kept) for unit in units}) == 3 * 2
    first = next(unit for unit in units if unit.variant.policy == "keydiff")
    assert sorted(row.codec for row in first.rows) == ["int2", "int4", "none"]
    last = [unit for unit in units if unit.document == 2 and unit.variant.policy == "keydiff"]
    assert [sorted(row.codec for row in unit.rows) for unit in last] == [["int2", "none"]]


def test_given_options_replace_those_of_the_size():
    grid = make_grid(
        "small", Changes(tasks=["vt"], lengths=[512], policies=["lagkv:lag=64,sink=8"], ratios=[0.25], documents=3)
    )
    assert {cell.task for cell in grid.cells()} == {"vt"}
    assert [(row.variant.label, row.removed) for row in grid.rows()] == [("full", 0.0), ("lagkv:lag=64,sink=8", 0.25)]
    assert max(unit.document for unit in grid.units()) == 2
    core = make_grid("core", Changes(lengths=[512, 4096]))
    assert [(cell.tokens, cell.task, cell.haystack) for cell in core.cells()] == [
        (tokens, *cell)
        for cells in ([("multikey", "filler"), ("multikey", "prose"), ("multikey", "dense")], [("digits32", "dense")])
        for tokens in (512, 4096)
        for cell in cells
    ] + [(tokens, "digits64", "prose") for tokens in (512, 4096)]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tasks": ["chess"]}, "tasks"),
        ({"haystacks": ["hay"]}, "haystacks"),
        ({"lengths": [0]}, "lengths"),
        ({"ratios": [1.0]}, "ratios"),
        ({"documents": 0}, "documents"),
        ({"codecs": ["int3"]}, "codec"),
        ({"policies": ["magic"]}, "policy"),
        ({"policies": ["lagkv:leg=3"]}, "policy_params.leg"),
        ({"policies": ["lagkv:lag"]}, "policies"),
        ({"tasks": ["cwe"], "haystacks": ["prose"]}, "haystacks"),
    ],
)
def test_bad_choices_are_refused_before_any_work(given, param):
    with pytest.raises(InvalidRequest) as refusal:
        make_grid("small", Changes(**given))
    assert refusal.value.param == param


def test_unknown_sizes_are_refused():
    with pytest.raises(InvalidRequest, match="small, core, default, large"):
        make_grid("huge")
    assert set(SIZES) == {"small", "core", "default", "large"}


def test_ways_are_rows_behind_the_full_cache():
    rows = make_rows(["full/int4", "keydiff@0.75/int8", "lagkv:lag=64,sink=8", "keydiff@0.5", "keydiff@0.75"])
    assert [row.label for row in rows] == [
        "full", "full/int4", "keydiff@0.75/int8", "keydiff@0.75", "lagkv:lag=64,sink=8@0.5", "keydiff@0.5",
    ]  # fmt: skip
    assert make_rows([row.label for row in rows]) == rows
    assert rows[0] == FULL
    assert rows[4] == Row(Variant("lagkv", (("lag", 64), ("sink", 8))), 0.5)


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("full@0.5", "keeps everything"),
        ("keydiff@1", "from 0 to below 1"),
        ("keydiff@half", "from 0 to below 1"),
        ("keydiff@nan", "from 0 to below 1"),
        ("nothing@0.5", "unknown policy"),
        ("keydiff/int3", "codec"),
        ("lagkv:lag@0.5", "name=value"),
    ],
)
def test_a_way_that_is_none_is_refused(way, reason):
    with pytest.raises(InvalidRequest, match=reason):
        make_rows([way])


def test_budgets_stand_beside_ratios_or_in_their_place():
    both = make_grid("small", Changes(policies=["keydiff"], ratios=[0.5], budgets=[64]))
    assert [row.label for row in both.rows()] == ["full", "keydiff@64", "keydiff@0.5"]
    alone = make_grid("small", Changes(policies=["keydiff"], budgets=[64, 128]))
    assert [row.label for row in alone.rows()] == ["full", "keydiff@64", "keydiff@128"]
    row = Row.parse("lagkv:lag=64@96/int8")
    assert (row.budget, row.codec, row.label) == (96, "int8", "lagkv:lag=64@96/int8")
    assert row.sizes == {"policy": "lagkv", "policy_params": {"lag": 64}, "budget_tokens": 96}
    assert Row.parse("full").sizes == {"policy": "full", "policy_params": {}}
    own = Row.parse("lagkv:r=0.5/int8")  # whose parameters say its size
    assert own.sizes == {"policy": "lagkv", "policy_params": {"r": 0.5}}
    assert Row.parse("keydiff@0.5").sizes["compression_ratio"] == 0.5
    assert row.settings != Row.parse("lagkv:lag=64@0.0/int8").settings
    assert "budget" not in Row.parse("keydiff@0.5").settings, "results of ratios stay found"
    with pytest.raises(InvalidRequest, match="entries kept, a whole number"):
        Row.parse("keydiff@1.5")
