"""Which documents of a corpus are worth keeping: by lengths, questions and prices."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvshelf.api.usage.prices import Prices
from kvshelf.cli import app
from kvshelf.corpus.keeping import Demand, KeepingAdvice, advise_keeping
from kvshelf.corpus.plan import BUILT_IN, PlannedWork, Speed
from kvshelf.errors import InvalidRequest
from kvshelf.methods.catalog import policy_info

LLAMA = BUILT_IN["llama-3.1-8b"].shape()
WORK = PlannedWork(policy="full", codec="int8")
SPEED = Speed(1000.0, "given", 1000.0)
PRICES = Prices(currency="EUR", worker_hour=3.6, gb_month=0.03)  # a second is 0.001, a token 1e-6
LENGTHS = ((1_000, 10), (100_000, 2))


def advice(questions: int, prices: Prices = PRICES, **demand: Any) -> KeepingAdvice:
    how = replace(Demand(questions, days=0.0, passages=2_000), **demand)
    return advise_keeping(LENGTHS, LLAMA, WORK, SPEED, how, prices, "llama-3.1-8b")


def test_costs_are_those_of_the_prices() -> None:
    short, long = advice(30).lengths
    assert (short.made, long.made) == (pytest.approx(1e-3), pytest.approx(0.1))
    assert (short.passages, long.passages) == (pytest.approx(1e-3), pytest.approx(2e-3))
    assert (short.pays_from, long.pays_from) == (1, 50), "of a short one the passages are all it has"
    month = advice(30, days=365.25 / 12).lengths[1]
    assert month.stored == pytest.approx(WORK.stored_bytes(LLAMA, 100_000) / 1e9 * 0.03)
    assert month.pays_from == -(-(100 + 1000 * month.stored) // 2)


def test_each_length_goes_the_cheaper_way() -> None:
    mixed = advice(30)
    assert (mixed.all_kept, mixed.all_retrieved) == (pytest.approx(0.21), pytest.approx(0.3 + 0.12))
    assert (mixed.kept, mixed.cheaper) == (10, pytest.approx(0.01 + 0.12))
    assert (advice(0).kept, advice(0).cheaper) == (0, 0.0)
    often = advice(50)
    assert (often.kept, often.cheaper) == (12, often.all_kept)


@pytest.mark.parametrize("questions", [0, 1, 7, 49, 50, 5000])
def test_the_mix_costs_no_more_than_either(questions: int) -> None:
    for days in (0.0, 30.0, 3000.0):
        made = advice(questions, days=days)
        assert made.cheaper <= min(made.all_kept, made.all_retrieved) * (1 + 1e-9)


def test_a_price_of_tokens_stands_for_the_seconds_of_passages() -> None:
    dear = advice(30, PRICES.model_copy(update={"input_mtok": 10.0}))
    assert dear.lengths[1].passages == pytest.approx(0.02)
    assert dear.lengths[1].pays_from == 5
    assert advice(30, PRICES.model_copy(update={"input_mtok": 0.0})).lengths[0].pays_from is None


@pytest.mark.parametrize("by", ["assumed", "given", "measured"])
def test_what_a_policy_adds_is_paid_by_what_is_kept_alone(by: str, tmp_path: Path) -> None:
    """A search prefills its passages without the policy: so a slower one never pays sooner at the same bytes."""

    def pays_from(policy: str) -> int:
        share = policy_info(policy).compress_share
        assert share is not None
        row = {"policy": policy, "plain_s": {"median": 2.0}, "whole": {"median": 1 + share}, "tokens": 2000}
        machine = {"gpu": "one", "processor": ""}
        report = {"compression": [{"rows": [row]}], "model": "m", "dtype": "float32", "machine": machine}
        (rates := tmp_path / "rates.json").write_text(json.dumps(report))
        tokens_per_s = 1000 / (1 + share) if by == "given" else None
        speed = Speed.of(LLAMA, policy, tokens_per_s, rates if by == "measured" else None)
        assert speed.prefill_per_s == pytest.approx(speed.tokens_per_s * (1 + share))
        how = Demand(1, days=0.0, passages=1_000)
        (cost,) = advise_keeping(((100_000, 1),), LLAMA, WORK, speed, how, PRICES, "llama-3.1-8b").lengths
        assert cost.made == pytest.approx(100_000 / speed.tokens_per_s * PRICES.second("llama-3.1-8b"))
        assert cost.passages == pytest.approx(1_000 / speed.prefill_per_s * PRICES.second("llama-3.1-8b"))
        assert cost.pays_from == math.ceil(round(100 * (1 + share), 6))
        return cost.pays_from

    assert 100 <= pays_from("full") < pays_from("ems") < pays_from("kvzip") < pays_from("kvcues")


def test_passages_and_bytes_have_prices_of_their_own() -> None:
    free = PRICES.model_copy(update={"worker_hour": 0.0})
    assert advice(30, free, days=30.0).lengths[0].pays_from is None
    assert advice(30, free.model_copy(update={"input_mtok": 2.0}), days=30.0).lengths[1].pays_from is not None


def test_prices_by_which_nothing_costs_anything_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="worker_hour"):
        advice(30, Prices(currency="EUR", worker_hour=0.0))


def test_the_command_adds_it_to_a_plan(tmp_path: Path) -> None:
    (lengths := tmp_path / "lengths").write_text("100000 2\n1000 10\n")
    (prices := tmp_path / "prices.json").write_text(PRICES.model_dump_json(exclude_none=True))
    command = ["plan", "--policy", "full", "--tokens-per-s", "1000", "--lengths", str(lengths), "--days", "0"]
    priced = [*command, "--questions", "30", "--passages", "2000", "--prices", str(prices)]
    said = json.loads(CliRunner().invoke(app, [*priced, "--json"]).output)["keeping"]
    assert (said["kept"], [cost["pays_from"] for cost in said["lengths"]]) == (10, [2, 51])
    shown = CliRunner().invoke(app, priced).output
    assert "kept 10 of 12" in shown
    assert "51 questions" in shown
    refused = CliRunner().invoke(app, [*command, "--questions", "30"])
    assert (refused.exit_code, "--prices" in refused.output) == (2, True)
    wrong = {
        "--days": [*priced, "--days", "1e305"],
        "--questions": [*priced, "--questions", "1" + "0" * 330],
        "--passages": ["plan", "--passages", "100"],
        "--prices": ["plan", "--prices", "absent.json"],
    }
    for option, arguments in wrong.items():
        refused = CliRunner().invoke(app, arguments)
        assert (refused.exit_code, option in refused.output) == (2, True), refused.output
    command = command[:-2]
    assert "keeping" not in json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
