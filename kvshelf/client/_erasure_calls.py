"""The call of `client.erasures`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict, Unpack

from kvshelf.api.caches import CreateErasure, Erasure
from kvshelf.client._calls import checked
from kvshelf.client._exchange import HttpCall, parse_as


class ErasureFields(TypedDict, total=False):
    """Whose things are to go; None means absent."""

    labels: Mapping[str, str] | None
    name: str | None
    tenant: str | None
    dry_run: bool | None


def create_erasure(**fields: Unpack[ErasureFields]) -> HttpCall[Erasure]:
    """Erase everything that has all of `labels`, and the `name`, and what is derived from it; returns the receipt.

    With `tenant` alone, your own: everything that it has. `dry_run`: say what would go, and leave it. While the receipt
    says `in_progress`, send the same again for the rest. Raises `InvalidRequest`, `StateConflict` while another caller
    erases the same.
    """
    return HttpCall("POST", "/v1/erasures", parse_as(Erasure), body={"json": checked(CreateErasure, fields)})
