"""The entries on the last, unfinished page of caches that were read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch import Tensor

Rows = tuple[Tensor, Tensor]
"""Keys and values `[entries, heads, D]` of a layer."""

_LIMIT: Final = 256 << 20


class Tails:
    """vLLM shares full pages between requests, not the last one, so without these every further question would read its
    whole cache for a few entries. At most 256 MiB, the least recently asked go first."""

    def __init__(self) -> None:
        self._kept: dict[str, Mapping[str, Rows]] = {}
        self._nbytes = 0

    def find(self, cache_id: str) -> Mapping[str, Rows] | None:
        """The rows behind the last full page, of each layer by name."""
        rows = self._kept.pop(cache_id, None)
        if rows is not None:
            self._kept[cache_id] = rows
        return rows

    def keep(self, cache_id: str, rows: Mapping[str, Rows]) -> None:
        if cache_id not in self._kept:
            self._kept[cache_id] = rows
            self._nbytes += _nbytes(rows)
        while self._nbytes > _LIMIT:
            self._nbytes -= _nbytes(self._kept.pop(next(iter(self._kept))))


def _nbytes(rows: Mapping[str, Rows]) -> int:
    return sum(keys.nbytes + values.nbytes for keys, values in rows.values())
