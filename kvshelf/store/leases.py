"""Leases of readers, for bytes whose place does not know who reads them."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Final

from kvshelf.errors import InvalidRequest
from kvshelf.store.blobs import Blobs
from kvshelf.store.index import Index

READ_LEASE_S: Final = 60.0
"""How long a removed name stays readable for a reader that has gone silent."""

TAKEN_S: Final = 3600.0
"""How long a taken name takes no readers. Its bytes are removed long before."""

TAKEN: Final = "taken"
"""Stands in place of a reader's token in a name that is taken."""


class Leases(abc.ABC):
    """Which names in `Blobs` are being read, in all processes of a home. Every method is one atomic step.

    A lease ends by itself after `READ_LEASE_S`, so a reader that dies blocks nothing for long. Methods raise
    `StoreUnavailable` when the home does not work.
    """

    @abc.abstractmethod
    def hold(self, name: str, token: str) -> bool:
        """Begin or renew the lease of a reader. False: the name is taken, and its bytes are going."""

    @abc.abstractmethod
    def release(self, name: str, token: str) -> None:
        """End a lease. Ignores an unknown one."""

    @abc.abstractmethod
    def held(self, name: str) -> bool:
        """Whether any reader has a lease."""

    @abc.abstractmethod
    def take(self, name: str) -> bool:
        """Take a name in order to remove its bytes: it gets no new readers. False: a reader has a lease still, and
        nothing was done."""


MakeBlobs = Callable[[Index, Leases], Blobs]
"""Opens the place of a home's blobs, where that is not beside its index."""


def where(blobs: MakeBlobs | None) -> str:
    """How an index remembers where its blobs lie: "beside" it, or in "objects"."""
    return "beside" if blobs is None else "objects"


def require_place(home: str, recorded: str, blobs: MakeBlobs | None) -> None:
    """Raises `InvalidRequest` if a home is opened with its blobs in another kind of place than they were written to:
    every cache would seem to have lost its bytes."""
    if recorded == where(blobs):
        return
    said = "has no blobs=" if blobs is None else "has blobs="
    lie = "in object storage" if recorded == "objects" else "beside its index"
    raise InvalidRequest(f"the blobs of {home} lie {lie}, and the URL of the store {said}", param="store")
