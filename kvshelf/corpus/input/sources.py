"""Where rows come from: a source is cut into shards, and each shard is read as a stream, wherever there is room."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence

from kvshelf.corpus.input.rows import Row


class Shard(abc.ABC):
    """A part of a source that is read in one go. It travels to the process that reads it, so it must be picklable.

    nbytes: about how much there is to read; rows: how many rows it has, None where nobody knows before it is read.
    """

    nbytes: int
    rows: int | None = None

    @abc.abstractmethod
    def read(self) -> Iterator[Row]:
        """Its rows, the same ones in the same order each time, with bounded memory.

        It never raises for what is wrong with the input: that is an error row. It may raise errors of kvshelf that say
        that nothing can be read now, such as `StoreUnavailable`.
        """


class Source(abc.ABC):
    """The input of one batch.

    several: whether results must say which file they come from. local: only the machine that cut it can read it.
    """

    several: bool = False
    local: bool = False

    @abc.abstractmethod
    def shards(self) -> Sequence[Shard]:
        """Cut it. Raises `InvalidRequest` where there is nothing to read at all, before any work."""
