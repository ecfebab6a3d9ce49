"""Use in money: prices of a file, and what use, caches and their lifetimes cost by them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvshelf.api.caches import CacheObject
from kvshelf.api.strict import parse_json
from kvshelf.api.usage import Group, LabelUse, Metered, MoneyCost, TtlUse, UsageReport, UsageRow
from kvshelf.errors import InvalidRequest

DAY_S: Final = 86_400.0
_MONTH_S: Final = 365.25 / 12 * DAY_S
_GB: Final = 1e9
_LIMIT: Final = 1 << 20
_JUDGED: Final = 0.5
"""The share of its lifetime that a cache must have lived before it says something about it."""
_EARLY: Final = 0.95

Price = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]


class _Prices(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelPrices(_Prices):
    """Of one model, in place of those for all."""

    worker_hour: Price | None = None
    input_mtok: Price | None = None


class Prices(_Prices):
    """What things cost, in one currency (ISO 4217: EUR). worker_hour: an hour of a model's thread, on any device.
    gb_month: 1e9 bytes stored for a month. input_mtok: a million tokens that were read from the shelf in place of the
    document; None: they are worth the seconds of prefill that they save."""

    currency: str = Field(pattern=r"^[A-Z]{3}$")
    worker_hour: Price
    gb_month: Price = 0.0
    input_mtok: Price | None = None
    models: Mapping[str, ModelPrices] = Field(default_factory=dict)

    def second(self, model: str | None) -> float:
        """The price of a worker's second."""
        hour = self.models.get(model or "", ModelPrices()).worker_hour
        return (self.worker_hour if hour is None else hour) / 3600

    def saved(self, model: str | None, tokens: float, seconds: float) -> float:
        """The worth of `tokens` that were read from the shelf. seconds: of their prefill."""
        price = self.models.get(model or "", ModelPrices()).input_mtok
        price = self.input_mtok if price is None else price
        return seconds * self.second(model) if price is None else tokens * price / 1e6

    def stored(self, nbytes: float, seconds: float) -> float:
        return nbytes / _GB * self.gb_month * seconds / _MONTH_S


def read_prices(path: Path | str) -> Prices:
    """Prices of a JSON file. Raises `InvalidRequest` that names the field at fault."""
    try:
        with open(path, "rb") as file:
            data = file.read(_LIMIT + 1)
    except OSError as error:
        raise _refused(path, error.strerror or "it cannot be read") from error
    if len(data) > _LIMIT:
        raise _refused(path, f"it has more than {_LIMIT} bytes")
    try:
        return Prices.model_validate(parse_json(data))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(map(str, first["loc"]))
        if name == "currency":
            problem = "prices need a currency, three capitals of ISO 4217: " + '"currency": "EUR"'
        else:
            problem = f"{name or 'the file'}: {first['msg']}"
        raise _refused(path, problem) from error
    except ValueError as error:
        raise _refused(path, f"it is no JSON ({error})") from error


def grouped(rows: Iterable[UsageRow], groups: Sequence[str], prices: Prices | None = None) -> list[UsageRow]:
    """Rows of single days, models and tenants, added up by `groups`, in order. With prices each row names its model."""
    sums: dict[tuple[tuple[bool, str], ...], UsageRow] = {}
    for row in rows:
        group = {name: getattr(row, name) for name in get_args(Group) if name in groups}
        key = tuple((value is not None, str(value)) for value in group.values())  # a label's value may be "None"
        total = sums.get(key, UsageRow())
        cost = None
        if prices is not None:
            saved = prices.saved(row.model, row.cache_read_tokens, row.saved_s)
            worker = row.worker_s * prices.second(row.model)
            cost = (total.cost or MoneyCost()) + MoneyCost(worker=worker, saved=saved)
        amounts = Metered.model_validate(dict(total)) + Metered.model_validate(dict(row))
        share = amounts.cache_read_tokens / max(1, amounts.cache_read_tokens + amounts.prefill_tokens)
        sums[key] = UsageRow.model_validate(dict(amounts) | group | {"cost": cost, "hit_share": round(share, 4)})
    return [sums[key] for key in sorted(sums)]


class Worth(NamedTuple):
    """What one cache costs to make and to keep for a day, and what one answer from it saves, in the currency."""

    made: float
    a_day: float
    an_answer: float

    def answers(self, days: float) -> int | None:
        """How many answers pay back a cache that is kept for `days`; None: no number does."""
        if not self.an_answer:
            return None
        return max(1, math.ceil((self.made + self.a_day * days) / self.an_answer))

    @property
    def most_idle_days(self) -> float:
        """How long keeping it costs less than the answer that follows; infinite where keeping costs nothing."""
        return self.an_answer / self.a_day if self.a_day else math.inf


def worth(cache: CacheObject, prices: Prices) -> Worth:
    """The worth of a cache whose making was timed. An imported cache costs nothing here and saves no known time."""
    return Worth(
        made_s(cache) * prices.second(cache.model),
        prices.stored(cache.bytes.stored, DAY_S),
        prices.saved(cache.model, cache.tokens.document, cache.timings.prefill_s),
    )


def made_s(cache: CacheObject) -> float:
    """Seconds of a worker that made it."""
    return cache.timings.prefill_s + cache.timings.compress_s + (cache.quality.probe_s if cache.quality else 0.0)


def by_label(caches: Iterable[CacheObject], tenant: str, label: str, prices: Prices | None) -> list[LabelUse]:
    """What the values of a label have on the shelf, the most bytes first."""
    members: dict[str | None, list[CacheObject]] = {}
    for cache in caches:
        members.setdefault(cache.labels.get(label), []).append(cache)
    rows = [_label_use(tenant, value, labelled, prices) for value, labelled in members.items()]
    return sorted(rows, key=lambda use: (-use.bytes, use.value or ""))


def _label_use(tenant: str, value: str | None, caches: Sequence[CacheObject], prices: Prices | None) -> LabelUse:
    nbytes = sum(cache.bytes.stored for cache in caches)
    priced: dict[str, Any] = {}
    if prices is not None:
        worths = [worth(cache, prices) for cache in caches]
        saved = sum(of_cache.an_answer * cache.uses for of_cache, cache in zip(worths, caches, strict=True))
        cost = MoneyCost(worker=sum(of_cache.made for of_cache in worths), saved=saved)
        priced = {"cost": cost, "month": _month(nbytes, prices)}
    return LabelUse(
        tenant=tenant,
        value=value,
        caches=len(caches),
        bytes=nbytes,
        uses=sum(cache.uses for cache in caches),
        made_s=sum(made_s(cache) for cache in caches),
        saved_s=sum(cache.timings.prefill_s * cache.uses for cache in caches),
        **priced,
    )


def by_ttl(caches: Iterable[CacheObject], tenant: str, prices: Prices, now: float) -> list[TtlUse]:
    """How lifetimes paid, the largest loss first. Those alike in two digits are one row. now: Unix seconds."""
    members: dict[str, list[CacheObject]] = {}
    for cache in caches:
        lifetime = _lifetime_s(cache)
        judged = lifetime is not None and cache.timings.prefill_s and now - cache.created_at >= _JUDGED * lifetime
        if lifetime is not None and judged:
            members.setdefault(f"{lifetime:.1e}", []).append(cache)
    rows = [_ttl_use(tenant, alike, prices) for alike in members.values()]
    return sorted(rows, key=lambda use: (-use.lost, use.ttl_s))


def _lifetime_s(cache: CacheObject) -> float | None:
    if cache.ttl_s is not None:
        return cache.ttl_s
    return None if cache.expires_at is None else cache.expires_at - cache.created_at


def _ttl_use(tenant: str, caches: Sequence[CacheObject], prices: Prices) -> TtlUse:
    gains = []
    for cache in caches:
        value = worth(cache, prices)
        days = ((cache.expires_at or 0) - cache.created_at) / DAY_S
        gains.append(value.an_answer * cache.uses - value.made - value.a_day * days)
    ages = sorted((cache.last_used_at or 0) - cache.created_at for cache in caches if cache.uses)
    return TtlUse(
        tenant=tenant,
        ttl_s=round(median(_lifetime_s(cache) or 0 for cache in caches)),
        caches=len(caches),
        unused=sum(not cache.uses for cache in caches),
        paid_back=sum(gain >= 0 for gain in gains),
        lost=-sum(gain for gain in gains if gain < 0),
        within_s=ages[math.ceil(_EARLY * len(ages)) - 1] if ages else None,
    )


def priced(report: UsageReport, groups: Sequence[str], prices: Prices) -> UsageReport:
    """A report whose rows name their models, in money, and grouped anew."""
    stored = [amount.model_copy(update={"month": _month(amount.bytes, prices)}) for amount in report.stored]
    data = grouped(report.data, groups, prices)
    return report.model_copy(update={"data": data, "stored": stored, "currency": prices.currency})


def _month(nbytes: int, prices: Prices) -> float:
    return prices.stored(nbytes, _MONTH_S)


def _refused(path: Path | str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"the prices of {path} cannot be used: {problem}", param="prices")
