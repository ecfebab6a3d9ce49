"""Negative cache: levels that missed their `min_quality`, so that they are not compressed again to miss it again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from kvshelf.api import Tried
from kvshelf.errors import QualityBelowFloor

CAPACITY: Final = 4096
"""Levels to remember, each of less than a kilobyte."""


class NegativeCache:
    """The levels of the newest refusals, by the ids that their caches would have.

    In memory: a refusal stores no cache to write it to, and an entry that saves one prefill is not worth a table. It
    needs no expiry, because an id covers everything that a quality depends on, the tenant included.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._tried: OrderedDict[str, Tried] = OrderedDict()
        self._capacity = capacity

    def remember(self, ids: Sequence[str], refusal: QualityBelowFloor) -> None:
        """Keep the outcome of each level of a selection; `ids` are in the order of its levels."""
        # A refusal ends with the levels that were dropped before any work; they have no ids.
        for cache_id, told in zip(ids, refusal.details["tried"], strict=False):
            self._tried[cache_id] = Tried.model_validate(told)
            self._tried.move_to_end(cache_id)
        while len(self._tried) > self._capacity:
            self._tried.popitem(last=False)

    def of(self, ids: Sequence[str]) -> dict[str, Tried]:
        """The levels remembered for these ids."""
        return {cache_id: self._tried[cache_id] for cache_id in ids if cache_id in self._tried}
