"""Use in money: what a price list may say, and what rows, caches and lifetimes cost by it."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Any

import pytest

from kvshelf.api import CacheObject
from kvshelf.api.usage import UsageRow
from kvshelf.api.usage.prices import DAY_S, Prices, by_label, by_ttl, grouped, read_prices, worth
from kvshelf.errors import InvalidRequest

PRICES = Prices(currency="EUR", worker_hour=3600, gb_month=30.4375)  # a second costs 1, a GB and day 1
NOW = 100 * DAY_S


def cache(**fields: Any) -> CacheObject:
    """One that took 10 s and 2 s more, of 1 GB, made on day 0."""
    own = {
        "id": "kvs_1",
        "document_id": "doc_1",
        "model": "m",
        "layout": "plain",
        "policy": "full",
        "policy_params": {},
        "compression_ratio": 0.0,
        "codec": "none",
        "tokens": {"document": 1000, "kept": 1000},
        "bytes": {"full": 2**30, "full_16bit": 2**30, "stored": 10**9},
        "timings": {"prefill_s": 10.0, "compress_s": 2.0},
        "created_at": 0.0,
    }
    return CacheObject.model_validate(own | fields)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"worker_hour": 1}, "prices need a currency, three capitals of ISO 4217"),
        ({"currency": "euro", "worker_hour": 1}, "prices need a currency"),
        ({"currency": None, "worker_hour": 1}, "prices need a currency"),
        ({"currency": "EUR"}, "worker_hour: Field required"),
        ({"currency": "EUR", "worker_hour": -1}, "worker_hour: Input should be greater than or equal to 0"),
        ({"currency": "EUR", "worker_hour": 1, "gb_mont": 1}, "gb_mont: Extra inputs"),
        ({"currency": "EUR", "worker_hour": 1, "models": {"m": {"hour": 1}}}, "models.m.hour: Extra inputs"),
        ([], "the file: Input should be a valid dictionary"),
        ("{", "it is no JSON"),
        ('{"currency": "EUR", "worker_hour": NaN}', "it is no JSON"),
        ('{"currency": "EUR", "worker_hour": 1e999}', "it is no JSON"),
        (None, "No such file"),
        (" " * (1 << 20) + "{}", "it has more than 1048576 bytes"),
    ],
)
def test_prices_that_cannot_be_used_are_refused_by_name(tmp_path: Path, content: Any, named: str) -> None:
    path = tmp_path / "prices.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InvalidRequest) as refused:
        read_prices(path)
    assert named in refused.value.message
    assert refused.value.param == "prices"


def test_rows_cost_what_their_models_do_and_add_up() -> None:
    day = datetime.date(2026, 11, 28)
    rows = [
        UsageRow(day=day, model="m", tenant="a", worker_s=5, saved_s=7, cache_read_tokens=2_000_000),
        UsageRow(day=day, model="small", tenant="a", worker_s=5, saved_s=7, cache_read_tokens=2_000_000),
        UsageRow(day=day, model="m", tenant="b", answers=1),
    ]
    prices = Prices.model_validate(PRICES.model_dump() | {"models": {"small": {"worker_hour": 360.0}}})
    first, second = grouped(rows, ["tenant"], prices)
    assert (first.tenant, first.model, first.day, first.worker_s) == ("a", None, None, 10)
    assert first.cost is not None
    assert (first.cost.worker, first.cost.saved) == pytest.approx((5.5, 7.7))
    assert (second.tenant, second.answers, second.cost and second.cost.worker) == ("b", 1, 0)
    by_token = prices.model_copy(update={"input_mtok": 3.0})
    (whole,) = grouped(rows, [], by_token)
    assert whole.cost is not None
    assert (whole.cost.worker, whole.cost.saved) == pytest.approx((5.5, 12.0)), "tokens have a price of their own"
    (plain,) = grouped(rows, [])
    assert plain.cost is None


def test_a_group_named_none_is_not_the_rest() -> None:
    rows = [UsageRow(guard_group=name, guarded=number) for name, number in (("None", 1), (None, 2), ("None", 4))]
    assert [(row.guard_group, row.guarded) for row in grouped(rows, ["guard_group"])] == [(None, 2), ("None", 5)]


def test_a_cache_pays_back_after_so_many_answers() -> None:
    one = worth(cache(), PRICES)
    assert one == pytest.approx((12.0, 1.0, 10.0))
    assert [one.answers(days) for days in (0, 7, 30)] == [2, 2, 5]
    assert one.most_idle_days == pytest.approx(10)
    probed = {"agreement": 1, "low": 1, "high": 1, "worst": None, "cues": 0, "kl": 0, "probe_s": 30, "version": 1}
    assert worth(cache(quality=probed), PRICES).made == pytest.approx(42)
    imported = worth(cache(timings={}), PRICES)
    assert imported.answers(1) is None
    assert worth(cache(), PRICES.model_copy(update={"gb_month": 0.0})).most_idle_days == math.inf


def test_labels_add_up_by_value() -> None:
    found = by_label(
        [cache(labels={"team": "law"}, uses=3), cache(labels={"team": "law"}), cache(labels={"team": "it"}), cache()],
        "a",
        "team",
        PRICES,
    )
    assert [(use.value, use.caches, use.uses) for use in found] == [("law", 2, 3), (None, 1, 0), ("it", 1, 0)]
    law = found[0]
    assert law.cost is not None
    assert (law.cost.worker, law.cost.saved, law.month) == pytest.approx((24, 30, 2 * 30.4375))
    assert by_label([cache()], "a", "team", None)[0].cost is None


def test_lifetimes_that_do_not_pay_back_are_told_with_what_they_lose() -> None:
    week, hour = 7 * DAY_S, 3600.0
    idle = [cache(expires_at=week) for _ in range(3)]
    asked = [cache(expires_at=week, uses=2, last_used_at=age * hour) for age in (1, 2)]
    young = cache(created_at=NOW - DAY_S, expires_at=NOW + 6 * DAY_S)
    short = cache(expires_at=hour, uses=2, last_used_at=60.0)
    renewed = cache(expires_at=100 * DAY_S, ttl_s=30 * DAY_S, uses=40, last_used_at=70 * DAY_S)
    others = [cache(), cache(expires_at=week, timings={})]  # without an end, imported
    found = by_ttl([*idle, *asked, young, short, renewed, *others], "a", PRICES, NOW)
    assert [use.ttl_s for use in found] == [week, hour, 30 * DAY_S]
    long = found[0]
    assert (long.caches, long.unused, long.paid_back, long.within_s) == (5, 3, 2, 2 * hour)
    assert long.lost == pytest.approx(3 * (12 + 7))
    assert [(use.paid_back, use.lost) for use in found[1:]] == [(1, 0), (1, 0)]
