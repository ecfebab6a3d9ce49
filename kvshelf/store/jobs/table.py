"""What a home writes down of jobs: uploaded files, and batches with their journals. It knows the meaning of neither.

An item is a text under an id. It is changed by comparing versions, so that of two who saw the same only one succeeds.
A lease says who works on an item; its term is the fence: a holder whose lease ran out and was taken over holds an old
term and can do nothing with it.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvshelf.errors import InvalidRequest, StateConflict

Kind = Literal["file", "batch"]


@dataclass(frozen=True)
class Item:
    """One item of one tenant. `text` is its JSON.

    version: counts its changes. open: somebody has to work on it. due: when it is to be removed (Unix seconds), None:
    never.
    """

    kind: Kind
    id: str
    tenant: str
    text: str
    version: int = 0
    open: bool = False
    due: float | None = None


class Docket(abc.ABC):
    """The items of one home. Every method is one atomic step, whoever else works on the home; durable when it returns,
    where nothing else is said. Leases are on the clock that all of the home's users share.

    Methods raise `StoreUnavailable` and `StorageFull` when the home does not work.
    """

    @abc.abstractmethod
    def add(self, item: Item, *, hold: str | None = None) -> None:
        """Write a new item down.

        hold: the name of a write in progress (`Index.begin`) whose bytes belong to the item. Its lease has no end from
        now on, and so its bytes stay and count for the tenant. Raises `StoreUnavailable` if the lease has run out.
        """

    @abc.abstractmethod
    def find(self, item_id: str, tenant: str) -> Item | None:
        """The item of an id, if it is this tenant's."""

    @abc.abstractmethod
    def listing(self, kind: Kind, tenant: str, after: str | None, limit: int) -> list[Item]:
        """A tenant's items, newest first, behind the one with the id `after`; none if that is not there."""

    @abc.abstractmethod
    def change(self, item: Item, *, term: int | None = None) -> bool:
        """Put another text, `open` and `due` in the place of the version that the item has; it gets the next one.

        False, and nothing done: it was changed or removed since, or `term` is given and not the newest.
        """

    @abc.abstractmethod
    def remove(self, item_id: str, *, held: str | None = None) -> bool:
        """Forget an item with its journal. False if there is none. The lease of `held` has run out then: its bytes are
        among the abandoned ones of the index."""

    @abc.abstractmethod
    def due(self, kind: Kind, now: float, limit: int) -> list[Item]:
        """Items that are to be removed by now."""

    @abc.abstractmethod
    def open_items(self) -> list[Item]:
        """Those that somebody has to work on, of all tenants, oldest first."""

    # Leases

    @abc.abstractmethod
    def take(self, item_id: str, *, lease_s: float) -> int | None:
        """Take the lease of an item; returns the term. None while another holder's lease lives, or it is gone."""

    @abc.abstractmethod
    def renew(self, item_id: str, term: int, *, lease_s: float) -> None:
        """Extend the lease from now. Raises `StateConflict` when the term is not the newest."""

    @abc.abstractmethod
    def release(self, item_id: str, term: int) -> None:
        """Let others take the item at once. Nothing happens if the term is not the newest."""

    # Journals

    @abc.abstractmethod
    def append(self, item_id: str, term: int, lines: Sequence[bytes]) -> None:
        """Add lines to the end of an item's journal. Raises `StateConflict` as `renew` does.

        No line is torn, but after an error the first ones may be there.
        """

    @abc.abstractmethod
    def lines(self, item_id: str, start: int, limit: int) -> list[bytes]:
        """Lines of a journal, from number `start` (counted from 0)."""


def require_after(docket: Docket, tenant: str, after: str | None) -> None:
    """Raise `InvalidRequest` where a listing cannot go on behind `after`: it would end there, and look complete."""
    if after is not None and docket.find(after, tenant) is None:
        raise InvalidRequest(f"after: there is no {after[:80]!r} to continue from", param="after")


def overtaken(item_id: str, term: int) -> StateConflict:
    return StateConflict(f"{item_id} is gone, or worked on by another process by now; term {term} is over")
