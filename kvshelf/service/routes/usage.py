"""GET /v1/usage: what tenants have used, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Final

from fastapi import APIRouter, Request, Response

from kvshelf.api import CacheObject
from kvshelf.api.usage import Metered, TenantStored, TtlUse, UsageQuery, UsageReport, UsageRow
from kvshelf.api.usage.prices import Prices, by_label, by_ttl, grouped, priced, read_prices
from kvshelf.errors import InvalidRequest
from kvshelf.service.access.keys import AnyCaller
from kvshelf.service.http import openapi
from kvshelf.service.http.body import read_query
from kvshelf.service.service import InService, cache_object, written
from kvshelf.store.base import Store
from kvshelf.store.jobs.metering import DayUsed

router = APIRouter(tags=["service"], responses=openapi.ERRORS)

MOST_CACHES: Final = 50_000
"""Caches that one answer reads, for labels and lifetimes."""

_PAGE: Final = 1000


@router.get("/v1/usage", response_model=UsageReport, openapi_extra=openapi.query_of(UsageQuery))
async def usage(request: Request, service: InService, caller: AnyCaller) -> Response:
    """What the caller's tenant has used, by day of UTC, model, tenant, conversation and group of the guard, and what it
    has on the shelf now. With `all_tenants`, which needs the scope `admin`, of each tenant that has used anything in
    the window.

    `label` names a label, by whose values the caches on the shelf are added up. `cost` says all of it in money, by the
    prices of the service, and which lifetimes of caches paid.

    Workers add what they have counted every two seconds. The use of a day is kept for 400 days.
    """
    query = read_query(request, UsageQuery)
    caller.require("admin" if query.all_tenants else "read")
    tenant = None if query.all_tenants else caller.tenant
    return await service.listing.run(_report, service.store, query, tenant, service.settings.prices_file)


def _report(store: Store, query: UsageQuery, tenant: str | None, prices_file: str | None) -> Response:
    if query.cost and prices_file is None:
        raise InvalidRequest(
            "this service has no prices; name a file of them in KVSHELF_PRICES_FILE, or take `kvshelf usage --prices`",
            param="cost",
        )
    prices = read_prices(prices_file) if query.cost and prices_file is not None else None
    used = store.metering.days(query.first_day, query.last_day, tenant=tenant)
    tenants = sorted({amount.tenant for amount in used}) if tenant is None else [tenant]
    stored = {name: store.usage(tenant=name) for name in tenants}
    count = sum(amount.caches for amount in stored.values())
    if (query.label or query.cost) and count > MOST_CACHES:
        raise InvalidRequest(
            f"labels and lifetimes are read cache by cache, at most {MOST_CACHES:,} at once, and {count:,} are stored; "
            "leave label and cost out, or ask for one tenant alone",
            param="label" if query.label else "cost",
        )
    rows = [row for record in used for row in _rows(record, query.groups)]
    report = UsageReport(
        first_day=query.first_day,
        last_day=query.last_day,
        data=grouped(rows, query.groups) if prices is None else rows,
        stored=[TenantStored(tenant=name, caches=amount.caches, bytes=amount.bytes) for name, amount in stored.items()],
        labels=[
            use for name in tenants if query.label for use in by_label(_caches(store, name), name, query.label, prices)
        ],
        ttls=[use for name in tenants for use in _ttls(store, name, prices)],
    )
    return written(report if prices is None else priced(report, query.groups, prices))


def _ttls(store: Store, tenant: str, prices: Prices | None) -> list[TtlUse]:
    if prices is None:
        return []
    caches = (cache for ended in (False, True) for cache in _caches(store, tenant, ended=ended))
    return by_ttl(caches, tenant, prices, time.time())


def _caches(store: Store, tenant: str, *, ended: bool = False) -> Iterator[CacheObject]:
    after = None
    for _ in range(MOST_CACHES // _PAGE):
        page = store.list(tenant=tenant, ended=ended, limit=_PAGE, after=after)
        yield from map(cache_object, page.data)
        if not page.has_more:
            return
        after = page.data[-1].id


def _rows(used: DayUsed, groups: Sequence[str]) -> Iterator[UsageRow]:
    """Of each model; and of each of its conversations and groups of the guard, where these are told apart, the rest in
    a row without one. No use is of both."""
    for model, amounts in used.by_model.items():
        about = {"day": used.day, "model": model, "tenant": used.tenant}
        parts = {
            "conversation": {name: models[model] for name, models in used.conversations.items() if model in models},
            "guard_group": amounts.guard_groups,
        }
        uses = [({kind: name}, use) for kind in parts.keys() & set(groups) for name, use in parts[kind].items()]
        for part, use in uses:
            yield UsageRow.model_validate(dict(use) | about | part)
        yield UsageRow.model_validate(dict(amounts - sum((use for _, use in uses), Metered())) | about)
