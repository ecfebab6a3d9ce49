"""One batch from its first row to its last: started, watched, paused and ended from any thread."""

from __future__ import annotations

from collections.abc import Mapping

from kvshelf.corpus.progress import Progress, RunOptions, Summary
from kvshelf.corpus.results import Journal
from kvshelf.corpus.sources import Source
from kvshelf.store.config import StoreConfig
from kvshelf.workers.remote import RemoteEngine


class Run:
    """A batch at work. `start` it once; Ray must be connected. Every method may be called from any thread.

    engines: by the name a row's `model` gives; the first one is for rows that name none. store: how every process
    opens the shelf that the engines write to.
    """

    def __init__(
        self,
        source: Source,
        engines: Mapping[str, RemoteEngine],
        store: StoreConfig,
        journal: Journal,
        options: RunOptions,
    ) -> None:
        self._source = source
        self._engines = engines
        self._store = store
        self._journal = journal
        self._options = options

    def start(self) -> None:
        """Begin on a thread of its own."""
        raise NotImplementedError

    def pause(self) -> None:
        """Begin no more rows; those at work are finished."""
        raise NotImplementedError

    def resume(self) -> None:
        """Go on after `pause`."""
        raise NotImplementedError

    def cancel(self, reason: str = "") -> None:
        """End within a layer of the model. What is done stays done."""
        raise NotImplementedError

    def progress(self) -> Progress:
        """Where it stands. Cheap."""
        raise NotImplementedError

    def wait(self, timeout: float | None = None) -> Summary | None:
        """How it ended, or None if it has not within `timeout` seconds. Raises nothing: a failure is a state."""
        raise NotImplementedError
