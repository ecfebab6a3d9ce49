"""A batch without a service: starts replicas for one run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import kvshelf
from kvshelf.artifact.identity import canonical_json, digest
from kvshelf.corpus.row import Shard
from kvshelf.corpus.run.journal import Journal
from kvshelf.corpus.run.progress import INTERRUPTED, Progress, RunOptions, Summary
from kvshelf.service.observe import logs
from kvshelf.service.process.preflight import require_startable
from kvshelf.service.settings import Settings
from kvshelf.service.storage import store_config
from kvshelf.workers.cluster.connect import prepare_environment, ray_cluster

if TYPE_CHECKING:
    from kvshelf.corpus.run.run import BatchRun
    from kvshelf.workers.cluster.remote import RemoteEngine

TENANT = "default"

_LOOK_S = 0.5
_DESCRIBE_S = 60.0


def run_standalone(
    settings: Settings,
    shards: Sequence[Shard],
    journal: Journal,
    about: Mapping[str, Any],
    options: Callable[[str], RunOptions],
    show: Callable[[Progress], None],
) -> Summary:
    """Start the replicas that the settings ask for, run one batch, and stop the replicas.

    `about` identifies the batch in JSON values: an equal `about` gives the same batch id, so the run resumes an earlier
    one. `options` makes the options for that id. `show` gets the progress twice a second. SIGINT and SIGTERM cancel the
    run; a second SIGINT ends it at once.
    """
    logs.configure("warning")
    require_startable(settings)
    prepare_environment(settings.address)
    shelf = store_config(settings)
    with shelf.open():
        pass  # Ray takes seconds to start, so an unusable store is reported first
    with ray_cluster(settings.address, min_cpus=settings.replica_processes) as local:
        # These modules import ray, which must see the environment prepared above.
        from kvshelf.service.process.replicas import deployed_replicas
        from kvshelf.workers.cluster.deployment import await_running

        with deployed_replicas(settings, shelf, local=local) as engines:
            from kvshelf.corpus.run.run import BatchRun  # while the replicas load their models

            await_running(engines.values(), deadline_s=settings.startup_deadline_s)
            batch_id = "batch_" + digest("kvshelf.batch", canonical_json(_made_under(engines, about)))
            run = BatchRun(shards, engines, shelf, journal, options(batch_id))
            run.start()
            with _cancelled_by_signals(run):
                while (summary := run.wait(_LOOK_S)) is None:
                    show(run.progress())
            return summary


def _made_under(engines: Mapping[str, RemoteEngine], about: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of a batch. It includes models and version, because rows done under other ones must be redone."""

    async def fingerprints() -> list[str]:
        described = [await engine.described(limit_s=_DESCRIBE_S) for engine in engines.values()]
        return [model["fingerprint"] for model in described]

    return {**about, "models": asyncio.run(fingerprints()), "version": kvshelf.__version__}


@contextmanager
def _cancelled_by_signals(run: BatchRun) -> Iterator[None]:
    def cancel(number: int, _frame: FrameType | None) -> None:
        run.cancel(INTERRUPTED if number == signal.SIGINT else "terminated")
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, cancel) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
