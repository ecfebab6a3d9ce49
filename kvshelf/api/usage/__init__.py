"""The types of GET /v1/usage: what tenants have used, by day, model, tenant and label, and what it costs (`prices`)."""

from __future__ import annotations

import datetime
import re
from typing import Annotated, Final, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from kvshelf.api.strict import QueryString, ResponseBody, misuse

Group = Literal["day", "model", "tenant", "conversation", "guard_group"]

KEEP_DAYS: Final = 400
"""How long the use of a day is kept, and the longest window that can be asked for."""

_DEFAULT_DAYS: Final = 30

MOST_PARTS: Final = 500
"""Conversations of a tenant and day that are told apart, and groups of the guard for each model, the first ones of
each: their use is rewritten with every addition."""


def _day(value: object) -> object:
    if isinstance(value, datetime.date) or (isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\d", value)):
        return value
    raise ValueError("a day of UTC is needed, as 2026-01-31")


Day = Annotated[datetime.date, BeforeValidator(_day)]


def today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()


class Metered(ResponseBody):
    """What was used. `prefill_tokens`: of documents and questions that went through the model. `worker_s`: seconds that
    workers spent on this, `quality_s` of them on measuring quality. `saved_s`: seconds of prefill that answers did not
    spend, because their documents were on the shelf. `guarded`: answers that were asked again of the full cache, of
    which `guard_differed` differ, in `guard_s` of `worker_s`; of several caches together `guarded_joint`, of which
    `guard_joint_differed` differ from one prefill of their documents. `recoded`: caches that the ladder coded smaller,
    by `recoded_bytes` together; it measured their quality anew in `recoded_s` of `worker_s`."""

    answers: int = 0
    caches_created: int = 0
    cache_read_tokens: int = 0
    prefill_tokens: int = 0
    completion_tokens: int = 0
    worker_s: float = 0.0
    quality_s: float = 0.0
    saved_s: float = 0.0
    guarded: int = 0
    guard_differed: int = 0
    guarded_joint: int = 0
    guard_joint_differed: int = 0
    guard_s: float = 0.0
    recoded: int = 0
    recoded_bytes: int = 0
    recoded_s: float = 0.0

    def __add__(self, other: Metered) -> Metered:
        return Metered(**{name: getattr(self, name) + getattr(other, name) for name in Metered.model_fields})

    def __sub__(self, part: Metered) -> Metered:
        return Metered(**{name: max(0, getattr(self, name) - getattr(part, name)) for name in Metered.model_fields})


class MoneyCost(ResponseBody):
    """In the currency of the prices. worker: the cost of workers' seconds. saved: what the tokens that answers read
    from the shelf would have cost without it."""

    worker: float = 0.0
    saved: float = 0.0

    def __add__(self, other: MoneyCost) -> MoneyCost:
        return MoneyCost(worker=self.worker + other.worker, saved=self.saved + other.saved)


class UsageRow(Metered):
    """One group. Fields that the answer is not grouped by are null, as is the cost of an answer without prices."""

    day: datetime.date | None = None
    model: str | None = None
    tenant: str | None = None
    conversation: str | None = Field(None, description="that questions named; the rest of the use has a row without")
    guard_group: str | None = Field(None, description="of answers asked again; the rest of the use has a row without")
    hit_share: float | None = Field(None, description="of all tokens read or prefilled, those read from the shelf")
    cost: MoneyCost | None = None


class TenantStored(ResponseBody):
    """What a tenant has on the shelf now."""

    tenant: str
    caches: int
    bytes: int
    month: float | None = Field(None, description="what these bytes cost a month, in the currency of the prices")


class LabelUse(ResponseBody):
    """The caches on the shelf whose label has one value; null: those without it. Over their whole lives, whatever the
    window: `uses` answers, `made_s` seconds of workers that made them, `saved_s` of prefill that answers did not spend.
    `month`: what their bytes cost a month."""

    tenant: str
    value: str | None
    caches: int
    bytes: int
    uses: int
    made_s: float
    saved_s: float
    cost: MoneyCost | None = None
    month: float | None = None


class TtlUse(ResponseBody):
    """The caches with one lifetime that have lived half of it or more, ended ones with a kept source among them.
    `paid_back`: those whose answers saved more than making and keeping them costs; `lost`: what the others cost beyond
    what they saved. `within_s`: the age at which 95 of 100 of those that were asked had their last answer; null: none
    was asked."""

    tenant: str
    ttl_s: float
    caches: int
    unused: int
    paid_back: int
    lost: float
    within_s: float | None = None


class UsageReport(ResponseBody):
    """The answer to GET /v1/usage: a row for each group with any use, in order, and what the tenants store now.
    `labels`: if a label was asked for. `currency` and `ttls`: if the cost was."""

    object: Literal["usage"] = "usage"
    first_day: datetime.date
    last_day: datetime.date
    data: list[UsageRow]
    stored: list[TenantStored]
    labels: list[LabelUse] = Field(default_factory=list)
    ttls: list[TtlUse] = Field(default_factory=list)
    currency: str | None = None


class UsageQuery(QueryString):
    """GET /v1/usage: which days, and how they are grouped. Days are of UTC, as 2026-01-31, and both are included."""

    from_: Day | None = Field(None, alias="from", description="the first day; default: 29 days before the last")
    to: Day | None = Field(None, description="the last day; default: today")
    group_by: str = Field(
        "",
        description="day, model, tenant, conversation, guard_group, or several with commas; default: one row for all",
    )
    all_tenants: bool = Field(False, description="of all tenants, which needs the scope admin; default: the caller's")
    label: str | None = Field(
        None, min_length=1, max_length=256, description="a label's name: also what is on the shelf by its values"
    )
    cost: bool = Field(False, description="also in money, by the prices of the service (`KVSHELF_PRICES_FILE`)")

    @property
    def last_day(self) -> datetime.date:
        return self.to or today()

    @property
    def first_day(self) -> datetime.date:
        if self.from_ is not None:
            return self.from_
        return datetime.date.fromordinal(max(1, self.last_day.toordinal() - _DEFAULT_DAYS + 1))  # no day is before 1

    @property
    def groups(self) -> list[str]:
        return [name.strip() for name in self.group_by.split(",")] if self.group_by else []

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        days = (self.last_day - self.first_day).days + 1
        if days < 1:
            raise misuse("from", f"from, {self.first_day}, is after to, {self.last_day}; exchange them")
        if days > KEEP_DAYS:
            raise misuse("from", f"{days} days are asked for, and {KEEP_DAYS} is the most; ask for fewer at once")
        for name in self.groups:
            if name not in get_args(Group):
                raise misuse("group_by", f"{name!r:.80} is no group; give some of {', '.join(get_args(Group))}")
        if self.labels:
            raise misuse("labels", "usage is not filtered by labels; `label=NAME` groups what is stored by one")
        return self
