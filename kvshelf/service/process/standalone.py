"""A batch without a service: replicas of its own for as long as one run takes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import kvshelf
from kvshelf.corpus.row import Journal, Shard
from kvshelf.corpus.run.progress import Progress, RunOptions, Summary
from kvshelf.service.observe import logs
from kvshelf.service.settings import Settings
from kvshelf.service.storage import store_config
from kvshelf.store.artifact.identity import canonical_json, digest
from kvshelf.workers.cluster.connect import prepare_environment, ray_cluster

if TYPE_CHECKING:
    from kvshelf.corpus.run.run import Run
    from kvshelf.workers.cluster.remote import RemoteEngine

TENANT = "default"

_LOOK_S = 0.5
_DESCRIBE_S = 60.0

INTERRUPTED = "interrupted"
"""Why a run was cancelled by a signal."""


def run_standalone(
    settings: Settings,
    shards: Sequence[Shard],
    journal: Journal,
    about: Mapping[str, Any],
    options: Callable[[str], RunOptions],
    show: Callable[[Progress], None],
) -> Summary:
    """Bring up what the settings say, run one batch, and take it down again.

    `about` says which batch this is, as plain JSON values: the same one gets the same id, and so goes on where an
    earlier run ended; `options` are made for that id. `show` gets the progress, twice a second. SIGINT and SIGTERM
    cancel the run; another SIGINT ends it where it stands.
    """
    logs.configure("warning")
    prepare_environment(settings.address)
    shelf = store_config(settings)
    with shelf.open():
        pass  # before Ray, which takes seconds: what can be refused at once is
    replicas = settings.replicas * len(settings.models)
    with ray_cluster(settings.address, min_cpus=replicas) as local:
        # Imported here because they import ray, which reads the environment prepared above.
        from kvshelf.service.process.replicas import await_replicas, deployed_replicas

        with deployed_replicas(settings, shelf, local=local) as engines:
            from kvshelf.corpus.run.run import Run  # while the replicas load their models

            await_replicas(settings, engines)
            batch_id = "batch_" + digest("kvshelf.batch", canonical_json(_made_under(engines, about)))
            run = Run(shards, engines, shelf, journal, options(batch_id))
            run.start()
            with _cancelled_by_signals(run):
                while (summary := run.wait(_LOOK_S)) is None:
                    show(run.progress())
            return summary


def _made_under(engines: Mapping[str, RemoteEngine], about: Mapping[str, Any]) -> dict[str, Any]:
    """What tells a batch from others: with another model or version, rows that are done are not done any more."""

    async def fingerprints() -> list[str]:
        described = [await engine.describe(deadline_s=_DESCRIBE_S) for engine in engines.values()]
        return [each["fingerprint"] for each in described]

    return {**about, "models": asyncio.run(fingerprints()), "version": kvshelf.__version__}


@contextmanager
def _cancelled_by_signals(run: Run) -> Iterator[None]:
    def cancel(number: int, _frame: FrameType | None) -> None:
        run.cancel(INTERRUPTED)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, cancel) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
