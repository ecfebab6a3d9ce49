"""`kvshelf advise`: which measured rows serve a scenario, and why the others do not."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from kvshelf.api import Certificate, GroupBound, Way, WayResult
from kvshelf.cli import app
from kvshelf.corpus import advice
from kvshelf.corpus.advice import SCENARIOS, advise, options
from kvshelf.corpus.plan import BUILT_IN, shape_of
from kvshelf.errors import InvalidRequest
from kvshelf.methods.catalog import catalog
from kvshelf.methods.info import packaged_rows, suffix_rows
from kvshelf.methods.method import SUFFIX_POLICY

LLAMA = BUILT_IN["llama-3.1-8b"].shape()
TOKENS = 32_000
FULL = LLAMA.full_bytes(TOKENS)
ROOM = 2 * FULL
ROWS = packaged_rows("rows")


def lines(scenario, memory=ROOM, **options):
    return advise(scenario, LLAMA, TOKENS, memory, **options).lines


def test_the_scenarios_are_the_survey_s_seven_in_its_order():
    """Of its sections 5.1 to 5.7."""
    assert list(SCENARIOS) == ["one-long", "unmodified", "throughput", "edge", "multi-turn", "prefill", "accuracy"]
    with pytest.raises(InvalidRequest, match="one of one-long, unmodified, throughput"):
        advise("winning", LLAMA, TOKENS, ROOM)


def test_every_measured_row_is_weighed():
    rows = list(options(LLAMA, TOKENS))
    assert len(rows) == len(packaged_rows("rows")) + len(packaged_rows("selected"))
    assert {option.policy for option in rows if option.selector == "infllm"} == {"infllm"}
    assert {option.policy for option in rows if option.selector == "quest"} == {"full"}


def test_bytes_are_those_of_the_model_and_length():
    by_row = {
        (option.policy, option.removed, option.codec, option.selector): option for option in options(LLAMA, TOKENS)
    }
    plain = by_row["full", 0.0, "none", None]
    assert plain.stored_bytes == pytest.approx(FULL, rel=0.02)
    assert plain.peak_bytes == FULL
    coded = by_row["full", 0.0, "klt", None]
    assert (coded.held_bytes, coded.stored_bytes < FULL / 10) == (FULL, True), "it is decoded before it is asked"
    assert by_row["full", 0.0, "int4", None].held_bytes == pytest.approx(FULL * 0.31, rel=0.05)
    half = by_row["keydiff", 0.5, "none", None]  # one full layer, and half of all others
    assert half.peak_bytes == pytest.approx(FULL * (1 / 32 + 0.5), rel=0.01)
    shared = by_row["kvzip", 0.5, "none", None]
    assert shared.peak_bytes == pytest.approx(FULL * (1 / 32 + 1.125 * 0.5), rel=0.01)
    read = next(option for option in options(LLAMA, TOKENS) if option.selector == "fasa" and option.share == 0.125)
    assert read.step_bytes == pytest.approx(read.held_bytes / 8, rel=0.01)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_line_fits_and_is_good_enough_and_the_best_is_first(scenario):
    advice = advise(scenario, LLAMA, TOKENS, ROOM)
    best = max(row["exact"] for row in packaged_rows("rows") if row["policy"] == "full")
    assert advice.lines
    for line in advice.lines:
        assert line.needed_bytes <= ROOM
        assert line.needed_bytes >= max(line.option.peak_bytes, line.option.held_bytes)
        assert line.option.exact >= 0.9 * best
        assert not any(rule.refuses(line.option) for rule in SCENARIOS[scenario].rules)
    ranks = [SCENARIOS[scenario].order(line.option) for line in advice.lines]
    assert ranks == sorted(ranks)
    names = [line.option.name for line in advice.lines]
    assert len(set(names)) == len(names)
    assert not set(names) & set(advice.refused)
    assert {*names, *advice.refused} == {option.name for option in options(LLAMA, TOKENS)}


def test_each_scenario_refuses_what_does_not_serve_it():
    refused = {name: advise(name, LLAMA, TOKENS, ROOM).refused for name in SCENARIOS}
    assert "25%" in refused["one-long"]["kvzip"]  # four prefills more, for one request
    assert "kvzip" not in refused["throughput"]
    assert "reads a part" in refused["throughput"]["full + quest"]
    assert "not kept as a turn" in refused["multi-turn"]["full + quest"]
    assert "evicts" in refused["accuracy"]["kvzip"]
    trained = {info.name for info in catalog() if "gates" in info.parameters} & {row["policy"] for row in ROWS}
    assert {name for name, why in refused["unmodified"].items() if "trained" in why} == trained != set()
    costly = {row["policy"] for row in ROWS} - {row["policy"] for row in ROWS if row["compress_share"] <= 0.1}
    assert (
        {name for name, why in refused["prefill"].items() if "10%" in why} >= costly >= {"kvzip", "expected_attention"}
    )
    assert "90% of the full cache's" in refused["edge"]["snapkv"]
    assert all(line.suffix is None for name in ("multi-turn", "accuracy") for line in lines(name))


def test_what_cannot_fit_is_refused_by_name_with_what_it_needs():
    advice = advise("one-long", LLAMA, TOKENS, FULL - 1)
    assert advice.refused["full"] == f"needs {FULL:,} bytes of memory"
    assert all(line.option.removed for line in advice.lines)
    with pytest.raises(InvalidRequest, match=r"nearest is .* bytes of memory\. Give more --memory") as refused:
        advise("one-long", LLAMA, TOKENS, FULL // 100)
    assert refused.value.param == "--memory"


def test_with_a_lower_quality_smaller_caches_serve():
    strict, lax = (lines("edge", quality=quality)[0].option for quality in (0.95, 0.3))
    assert lax.stored_bytes < strict.stored_bytes
    assert lax.exact < strict.exact


def test_advice_follows_the_measured_rows_and_no_name(monkeypatch):
    """Were `snapkv` measured as the most exact, it would be advised."""
    rows = packaged_rows("rows")
    better = [row | {"exact": 0.99} if row["policy"] == "snapkv" and row["removed"] == 0.9375 else row for row in rows]
    monkeypatch.setattr(advice, "packaged_rows", lambda which: better if which == "rows" else [])
    assert lines("throughput")[0].option.policy == "snapkv"
    assert lines("one-long")[0].option.policy == "snapkv"


def test_a_suffix_policy_is_advised_where_an_answer_does_not_fit():
    token = LLAMA.full_bytes(1)
    whole, *bounded = suffix_rows()
    unmeasured = {"trimkv", "d2o", "arkv"}  # without gates for answers in the model of the rows; newer than the rows
    assert {row["policy"] for row in bounded} == {info.name for info in catalog(SUFFIX_POLICY)} - unmeasured
    (line,) = (line for line in lines("one-long") if line.option.name == "full + fasa")
    assert (line.suffix, line.tier) == (None, "memory")
    # Long answers behind a short document: the answer is what takes the memory.
    short = next(option for option in options(LLAMA, 512) if option.policy == "full" and option.codec == "int4")
    memory = short.held_bytes + (whole["stored"] - 1) * token
    by_name = {line.option.name: line for line in advise("throughput", LLAMA, 512, memory).lines}
    best = max(bounded, key=lambda row: (row["behind"], -row["token_s"]))
    assert by_name["full"].suffix == best["policy"]
    assert f"{whole['stored']:,} tokens do not fit" in by_name["full"].reason
    with pytest.raises(InvalidRequest):  # nothing of an answer that must be right may go
        advise("accuracy", LLAMA, 512, memory)


def test_caches_that_fit_together_are_kept_in_ram():
    (one,) = (line.option for line in lines("throughput") if line.option.name == "full")
    for fit, tier in ((1.5, "disk"), (2.5, "ram")):
        memory = max(one.peak_bytes, int(fit * one.held_bytes))
        (line,) = (line for line in lines("throughput", memory, quality=0.9) if line.option.name == "full")
        assert line.tier == ("ram" if memory >= 2 * one.held_bytes else tier)
    assert {line.tier for line in lines("edge")} == {"disk"}


def test_the_command_says_where_its_numbers_are_from():
    arguments = ["advise", "--scenario", "edge", "--tokens", "32000", "--memory", "8e9"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.splitlines()[0].split() == [
        "POLICY", "CODEC", "SELECTOR", "SUFFIX", "TIER", "EXACT", "STORED", "MEMORY", "WHY",
    ]  # fmt: skip
    assert "measured on kvshelf-tiny" in shown.stderr
    assert "refused: " in shown.stderr
    assert "need what `kvshelf calibrate` makes" in shown.stderr
    answer = json.loads(CliRunner().invoke(app, [*arguments, "--json", "--top", "2"]).stdout)
    assert (answer["measured_on"], answer["memory_bytes"], len(answer["lines"])) == (
        "kvshelf-tiny",
        8_000_000_000,
        2,
    )
    assert answer["lines"][0]["option"]["policy"] == lines("edge", 8_000_000_000)[0].option.policy
    assert answer["refused"]["snapkv"]
    for wrong, named in (("--memory", "2e3"), ("--scenario", "chess"), ("--model", "no-such-model")):
        refused = CliRunner().invoke(app, [*arguments, wrong, named])
        assert refused.exit_code in (1, 2), refused.output
        assert refused.stdout == ""


def test_a_model_s_own_configuration_counts():
    tiny = shape_of("kvshelf-tiny")
    assert advise("edge", tiny, 2048, 10**9).lines[0].option.stored_bytes < 2048 * 4096
    with_window = replace(LLAMA, layers=16)
    assert advise("edge", with_window, TOKENS, ROOM).lines[0].option.stored_bytes < lines("edge")[0].option.stored_bytes


def test_a_certificate_ranks_by_its_own_questions():
    losses = {("full", None, "int8"): 0.0, ("full", None, "klt:step=1"): 0.02, ("keydiff", 0.5, "klt"): 0.6}

    def advised(losses):
        ways = [Way(policy=policy, compression_ratio=ratio, codec=codec) for policy, ratio, codec in losses]
        results = [WayResult(share=0.5, loss=loss) for loss in losses.values()]
        group = {"questions": 9, "limit": 1.0, "tokens": (1, 9), "share": 0.5, "loss": 0.0, "ways": results}
        groups = {"a": GroupBound(documents=30, **group), "b": GroupBound(documents=10, **group)}
        texts = dict.fromkeys(("name", "model", "weights", "tokenizer", "fingerprint", "data", "date"), "x")
        certificate = Certificate(alpha=0.1, reference="full", quality_version=3, ways=ways, groups=groups, **texts)
        return lines("throughput", certificate=certificate)

    assert {line.option.policy for line in advised(losses)} == {"full"}
    kept = losses | {("keydiff", 0.5, "klt"): 0.01}
    assert "keydiff" in {line.option.policy for line in advised(kept)}
    assert next(line for line in advised(kept) if line.option.policy == "keydiff").option.exact == pytest.approx(0.99)
