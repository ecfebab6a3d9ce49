"""The service itself: starts the store, Ray, the replicas and the HTTP server, and stops them in reverse order.

While Ray starts, the modules that need torch are imported; while the replicas start, the routes.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from importlib import import_module
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, NoReturn

import structlog
from opentelemetry.trace import Tracer

from kvshelf.service.access.keyfile import KeyFile
from kvshelf.service.http import server
from kvshelf.service.http.place import ServerPlace
from kvshelf.service.observe import logs
from kvshelf.service.observe.tracing import tracer_to
from kvshelf.service.process.preflight import require_startable
from kvshelf.service.settings import Settings
from kvshelf.workers.cluster import startup
from kvshelf.workers.cluster.connect import prepare_environment, ray_cluster

if TYPE_CHECKING:
    from kvshelf.service.access.keys import LiveKeys
    from kvshelf.store.base import Store

IMPORTED_ASIDE = "kvshelf.workers.replica.replica"  # torch and transformers, without Ray or FastAPI

log = structlog.get_logger("kvshelf.service")


def serve(settings: Settings, place: ServerPlace) -> None:
    """Run the service until SIGINT, SIGTERM or the supervisor ends it, then stop everything it started.

    Raises a `KvshelfError` if a part does not start, for example if the store fails or a model is unknown.
    """
    startup.begin()
    logs.configure(settings.log_level)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # for the supervisor, even if the process group gets it
    place.require(settings.host, settings.port)
    require_startable(settings)
    prepare_environment(settings.address)
    keys = None
    if settings.api_key_file is not None:
        from kvshelf.service.access.keys import LiveKeys  # here: it imports fastapi, which would delay Ray

        keys = LiveKeys(KeyFile(settings.api_key_file))
    from kvshelf.service.storage import store_config

    log.info("starting; opening the store", models=settings.models, store=settings.redacted()["store"])
    lap = _Laps()
    with (
        _stopped_by_signals(),
        store_config(settings).open() as store,  # before Ray, so that a bad store is refused at once
        tracer_to(settings.otel_endpoint) as tracer,
    ):
        log.info("the store is open; starting Ray", seconds=lap.seconds())
        with (
            _importing(IMPORTED_ASIDE) as imported,
            ray_cluster(settings.address, min_cpus=settings.replica_processes) as local,
            _stopped_by_signals(),
        ):
            log.info("Ray is up; loading the models", seconds=lap.seconds())
            wait([imported])
            _serve_on(place, settings, store, tracer, keys, lap, local=local)


class _Laps:
    """Times the parts of the start, one after the other."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def seconds(self) -> float:
        """Seconds since the part before ended, or since the first began."""
        before, self._began = self._began, time.monotonic()
        return round(self._began - before, 2)


@contextmanager
def _importing(module: str) -> Iterator[Future[ModuleType]]:
    """Imports a module on a thread. If that fails, the statement that needs the module fails too.

    Meanwhile the block must import nothing that the module imports: two threads inside one package whose modules
    import each other can get half a module. (With ray.serve and fastapi on this thread too, 1 start in 40 failed.)
    """
    with ThreadPoolExecutor(1, thread_name_prefix="imports") as thread:
        yield thread.submit(import_module, module)


def _serve_on(
    place: ServerPlace,
    settings: Settings,
    store: Store,
    tracer: Tracer,
    keys: LiveKeys | None,
    lap: _Laps,
    *,
    local: bool,
) -> None:
    # These modules import ray, which must see the environment prepared above.
    from kvshelf.service.process.replicas import deployed_replicas
    from kvshelf.service.storage import store_config
    from kvshelf.workers.cluster.deployment import await_running

    with deployed_replicas(settings, store_config(settings), local=local) as engines:
        from kvshelf.service.app import create_app

        app = create_app(settings, engines, store, tracer, keys)
        await_running(engines.values(), deadline_s=settings.startup_deadline_s)
        log.info("the models are up", seconds=lap.seconds())
        startup.end()
        server.run(app, place, settings)


class _Leave(BaseException):
    """A signal asked the service to stop. Not an `Exception`, so that no handler mistakes it for a failure."""


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Inside the block, SIGINT and SIGTERM unwind the stack to the end of the block, which stops everything started.

    Used a second time inside `ray_cluster`, because Ray installs its own handlers.
    """

    def leave(_number: int, _frame: FrameType | None) -> NoReturn:
        raise _Leave

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except _Leave:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
