"""The reading stage of a run: the rows of a shard in small pieces, long documents first, questions cache by cache.

It runs in its own processes, which import neither torch nor kvshelf's model side.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter
from typing import Final

import pydantic_core
import structlog

from kvshelf.corpus.row import Row, Shard, cut
from kvshelf.errors import StoreError

log = structlog.get_logger("kvshelf.corpus")

PIECE_ROWS: Final = 16
PIECE_CHARS: Final = 256 << 10
"""Limits of the piece that one caller task gets (at least one row). Small, to keep all replicas busy until the end."""

SORTED_ROWS: Final = 4096
SORTED_CHARS: Final = 8 << 20
"""Within this many consecutive rows the longest go first, so that no long document runs alone at the end; questions are
grouped by their caches."""

_READ_AGAIN_S: Final = 2.0


def read_pieces(shard: Shard) -> Iterator[bytes]:
    """The rows of a shard in pieces for callers, each a JSON list."""
    for rows in packed(_patiently(shard)):
        yield pydantic_core.to_json([row.to_dict() for row in rows])


def _patiently(shard: Shard) -> Iterator[Row]:
    """The rows of a shard. Waits out outages of the store, which may hold the shard."""
    done = 0
    while True:
        try:
            for row in islice(shard.read(), done, None):
                yield row
                done += 1
            return
        except StoreError as error:
            log.warning("a shard cannot be read on now", code=error.code, message=error.message)
            time.sleep(_READ_AGAIN_S)


def packed(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """The rows in pieces, sorted within `SORTED_CHARS` by `Row.place`."""
    length = attrgetter("length")
    for group in cut(rows, length, most=SORTED_ROWS, size=SORTED_CHARS):
        yield from cut(sorted(group, key=attrgetter("place")), length, most=PIECE_ROWS, size=PIECE_CHARS)
