"""GET /v1/usage: what tenants have used."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter, Request, Response

from kvshelf.api.usage import Metered, TenantStored, UsageQuery, UsageReport, UsageRow
from kvshelf.service.access.keys import AnyCaller
from kvshelf.service.http import openapi
from kvshelf.service.http.body import read_query
from kvshelf.service.service import InService, written
from kvshelf.store.base import Store
from kvshelf.store.jobs.metering import DayUsed

router = APIRouter(tags=["service"], responses=openapi.ERRORS)


@router.get("/v1/usage", response_model=UsageReport, openapi_extra=openapi.query_of(UsageQuery))
async def usage(request: Request, service: InService, caller: AnyCaller) -> Response:
    """What the caller's tenant has used, by day of UTC, model and tenant, and what it has on the shelf now. With
    `all_tenants`, which needs the scope `admin`, of each tenant that has used anything in the window.

    Workers add what they have counted every two seconds. The use of a day is kept for 400 days.
    """
    wanted = read_query(request, UsageQuery)
    caller.require("admin" if wanted.all_tenants else "read")
    return await service.listing.run(_report, service.store, wanted, None if wanted.all_tenants else caller.tenant)


def _report(store: Store, wanted: UsageQuery, tenant: str | None) -> Response:
    used = store.metering.days(wanted.first_day, wanted.last_day, tenant=tenant)
    tenants = sorted({amount.tenant for amount in used}) if tenant is None else [tenant]
    stored = {name: store.usage(tenant=name) for name in tenants}
    report = UsageReport(
        first_day=wanted.first_day,
        last_day=wanted.last_day,
        data=_rows(used, wanted.groups),
        stored=[TenantStored(tenant=name, caches=amount.caches, bytes=amount.bytes) for name, amount in stored.items()],
    )
    return written(report)


def _rows(used: Iterable[DayUsed], groups: list[str]) -> list[UsageRow]:
    sums: dict[tuple[str, ...], UsageRow] = {}
    for record in used:
        for model, amounts in record.by_model.items():
            about = {"day": record.day, "model": model, "tenant": record.tenant}
            group = {name: value for name, value in about.items() if name in groups}
            key = tuple(map(str, group.values()))
            sums[key] = UsageRow.model_validate(dict(sums.get(key, Metered()) + amounts) | group)
    return [sums[key] for key in sorted(sums)]
