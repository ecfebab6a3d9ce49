"""The reading stage of a run: the rows of a shard in small pieces, long documents first.

It runs in processes of its own, which import neither torch nor the model's side of kvshelf.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

import pyarrow as pa
import structlog

from kvshelf.corpus.input.rows import Row
from kvshelf.corpus.input.sources import Shard
from kvshelf.errors import StoreError

log = structlog.get_logger("kvshelf.corpus")

PIECE_ROWS: Final = 16
PIECE_CHARS: Final = 256 << 10
"""What one task of a caller gets at most, but always one row: little, so that the last ones keep every replica busy."""

SORTED_ROWS: Final = 4096
SORTED_CHARS: Final = 8 << 20
"""Of so many consecutive rows the longest come first: so no long document is left for the end alone."""

_READ_AGAIN_S: Final = 2.0


def reader(shard: Shard) -> Callable[[], Iterator[pa.Table]]:
    """A function that gives the rows of a shard as they go to callers, in tables of one line.

    It has a name, unlike a partial one: of a shard that is large itself, Ray tells the function's name in a warning.
    """

    def read_shard() -> Iterator[pa.Table]:
        for rows in packed(_patiently(shard)):
            yield pa.table({"rows": pa.array([[row.to_json() for row in rows]], pa.list_(pa.large_binary()))})

    return read_shard


def _patiently(shard: Shard) -> Iterator[Row]:
    """The rows of a shard, whatever becomes of the store meanwhile: a shard may lie there."""
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
    """The rows in pieces; of each `SORTED_CHARS` of them the longest first."""
    for group in _cut(rows, max_rows=SORTED_ROWS, max_chars=SORTED_CHARS):
        group.sort(key=lambda row: row.length, reverse=True)
        yield from _cut(iter(group), max_rows=PIECE_ROWS, max_chars=PIECE_CHARS)


def _cut(rows: Iterator[Row], *, max_rows: int, max_chars: int) -> Iterator[list[Row]]:
    """Runs of rows that stay within both limits; one row alone may be beyond."""
    piece: list[Row] = []
    chars = 0
    for row in rows:
        if piece and (len(piece) >= max_rows or chars + row.length > max_chars):
            yield piece
            piece, chars = [], 0
        piece.append(row)
        chars += row.length
    if piece:
        yield piece
