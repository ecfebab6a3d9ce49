"""What fell short of a floor once, so that it is not compressed again to fall short again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from kvshelf.api import Tried
from kvshelf.errors import QualityBelowFloor

CAPACITY: Final = 4096
"""Levels that are remembered, of less than a kilobyte each."""


class NegativeCache:
    """The levels of the newest refusals, by the ids that their caches would have.

    In the memory of one worker and not on the shelf: nothing was stored there to write it to, and what is worth one
    prefill needs neither a table nor an expiry. An id says all that a quality depends on, the tenant included, so what
    is remembered stays true for as long as the process lives.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._tried: OrderedDict[str, Tried] = OrderedDict()
        self._capacity = capacity

    def remember(self, ids: Sequence[str], refusal: QualityBelowFloor) -> None:
        """Keep what came of each level of a selection; `ids` are in the order of its levels."""
        # Behind its levels a refusal has the ways that were dropped before any work, and they have no ids.
        for cache_id, told in zip(ids, refusal.details["tried"], strict=False):
            self._tried[cache_id] = Tried.model_validate(told)
            self._tried.move_to_end(cache_id)
        while len(self._tried) > self._capacity:
            self._tried.popitem(last=False)

    def of(self, ids: Sequence[str]) -> dict[str, Tried]:
        """What is remembered of these ids."""
        return {cache_id: self._tried[cache_id] for cache_id in ids if cache_id in self._tried}
