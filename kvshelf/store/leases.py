"""Leases of readers, for bytes whose place does not know who reads them."""

from __future__ import annotations

import abc
from typing import Final

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
