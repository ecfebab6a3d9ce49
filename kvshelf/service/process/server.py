"""The service proper: bring up the store, Ray, the workers and the HTTP server, in this order; down in reverse."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import structlog
from opentelemetry.trace import Tracer

from kvshelf.service.access.keyfile import KeyFile
from kvshelf.service.access.keys import LiveKeys
from kvshelf.service.http.server import HttpServer, cut_off_unread
from kvshelf.service.observe import logs
from kvshelf.service.observe.tracing import tracer_to
from kvshelf.service.process.supervisor import Place
from kvshelf.service.settings import Settings
from kvshelf.service.storage import store_config
from kvshelf.store.base import Store
from kvshelf.store.config import StoreConfig
from kvshelf.workers.cluster.connect import prepare_environment, ray_cluster

log = structlog.get_logger("kvshelf.service")


def serve(settings: Settings, place: Place) -> None:
    """Run the service until SIGINT, SIGTERM or until another takes its place, then take down what was started.

    Raises errors of kvshelf when a part does not come up: a store that does not work, an unknown model.
    """
    logs.configure(settings.log_level)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it is meant for the supervisor, whoever else gets it
    place.require(settings.host, settings.port)
    prepare_environment(settings.address)
    shelf = store_config(settings)
    keys = None if settings.api_key_file is None else LiveKeys(KeyFile(settings.api_key_file))
    with (
        _stopped_by_signals(),
        shelf.open() as store,  # before Ray, which takes seconds: what can be refused at once is
        tracer_to(settings.otel_endpoint) as tracer,
    ):
        log.info("starting", models=settings.models, store=settings.redacted()["store"])
        replicas = settings.replicas * len(settings.models)
        with ray_cluster(settings.address, min_cpus=replicas) as local, _stopped_by_signals():
            _serve_on(place, settings, shelf, store, tracer, keys, local=local)


def _serve_on(
    place: Place,
    settings: Settings,
    shelf: StoreConfig,
    store: Store,
    tracer: Tracer,
    keys: LiveKeys | None,
    *,
    local: bool,
) -> None:
    # Imported here because they import ray, which reads the environment prepared above.
    from kvshelf.service.app import create_app
    from kvshelf.service.process.replicas import running_replicas

    with running_replicas(settings, shelf, local=local) as engines:
        cut_off_unread(place.listener, settings.unread_deadline_s)
        app = create_app(settings, engines, store, tracer, keys)
        HttpServer(app, place, grace_s=settings.shutdown_grace_s).run(sockets=[place.listener])


class _Leave(BaseException):
    """A signal asked the service to stop. No `Exception`, so that nothing on the way mistakes it for a failure."""


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Inside the block SIGINT and SIGTERM unwind the stack to its end, so that everything that was started is stopped.

    Nested once more inside Ray, which puts its own handlers.
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
