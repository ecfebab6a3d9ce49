"""The reading stage of a run: the rows of a shard one by one, long documents first, questions cache by cache.

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

SORTED_ROWS: Final = 4096
SORTED_CHARS: Final = 8 << 20
"""Within this many consecutive rows the longest go first, so that no long document runs alone at the end; questions are
grouped by their caches."""

_READ_AGAIN_S: Final = 2.0


def read_rows(shard: Shard) -> Iterator[bytes]:
    """The rows of a shard for callers, each as JSON."""
    for row in ordered(_patiently(shard)):
        yield pydantic_core.to_json(row.to_dict())


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


def ordered(rows: Iterator[Row]) -> Iterator[Row]:
    """The rows, sorted within `SORTED_CHARS` by `Row.place`."""
    for group in cut(rows, attrgetter("length"), most=SORTED_ROWS, size=SORTED_CHARS):
        yield from sorted(group, key=attrgetter("place"))
