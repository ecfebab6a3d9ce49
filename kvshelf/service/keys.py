"""Who asks: the tenant and the scopes of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from fastapi import Depends

Scope = Literal["read", "write", "admin"]

SCOPES: Final[tuple[Scope, ...]] = ("read", "write", "admin")
"""`read`: list, show, download, ask. `write`: create, change, delete, import, verify. `admin`: the service itself."""


@dataclass(frozen=True)
class Caller:
    """Whose shelf a request is about, and what it may do there."""

    tenant: str
    scopes: frozenset[Scope]
    key_id: str | None


ANYONE: Final = Caller("default", frozenset(SCOPES), None)
"""Every caller of a service without keys: there is one tenant, and an Authorization header says nothing."""


def _caller() -> Caller:
    return ANYONE


Reader = Annotated[Caller, Depends(_caller)]
"""The caller of a route that needs the scope `read`."""

Writer = Annotated[Caller, Depends(_caller)]
"""The caller of a route that needs the scope `write`."""

Admin = Annotated[Caller, Depends(_caller)]
"""The caller of a route that needs the scope `admin`."""
