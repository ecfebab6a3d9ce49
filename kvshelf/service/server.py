"""The service proper: bring up the store, Ray, the workers and the HTTP server, in this order; down in reverse."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import NoReturn

import structlog
import uvicorn
from opentelemetry.trace import Tracer

from kvshelf.service import logs
from kvshelf.service.keyfile import KeyFile
from kvshelf.service.keys import LiveKeys
from kvshelf.service.settings import Settings
from kvshelf.service.supervisor import Place
from kvshelf.service.tracing import tracer_to
from kvshelf.store.base import Store
from kvshelf.store.config import StoreConfig
from kvshelf.workers.cluster import prepare_environment, ray_cluster

READY = "kvshelf is ready at "
"""Begins the one line on standard output that says where the service listens."""

log = structlog.get_logger("kvshelf.service")


def serve(settings: Settings, place: Place) -> None:
    """Run the service until SIGINT, SIGTERM or until another takes its place, then take down what was started.

    Raises errors of kvshelf when a part does not come up: a store that does not work, an unknown model.
    """
    logs.configure(settings.log_level)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it is meant for the supervisor, whoever else gets it
    place.require(settings.host, settings.port)
    prepare_environment(settings.address)
    shelf = _store_config(settings)
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
    from kvshelf.workers import deployment
    from kvshelf.workers.residents import ResidentLimits
    from kvshelf.workers.scheduler import SchedulerLimits

    threads = settings.threads or _share_of_cpus(settings) if local else settings.threads
    configs = [
        deployment.ReplicaConfig(
            model=model,
            store=shelf,
            device=settings.device,
            dtype=settings.dtype,
            threads=threads,
            limits=SchedulerLimits(
                max_open=settings.max_open_generations,
                max_suffix_bytes=settings.max_suffix_bytes,
                batch_share=settings.batch_share,
            ),
            residents=ResidentLimits(settings.resident_bytes, settings.resident_idle_s),
            begin=partial(logs.configure, settings.log_level),
        )
        for model in settings.models
    ]
    limits = deployment.DeploymentLimits(settings.replicas, settings.max_ongoing_requests, settings.max_queued_requests)
    engines = deployment.deploy(configs, limits)
    try:
        deployment.await_running(engines.values(), deadline_s=settings.startup_deadline_s)
        _cut_off_unread(place.listener, settings.unread_deadline_s)
        _HttpServer(create_app(settings, engines, store, tracer, keys), settings, place).run(sockets=[place.listener])
    finally:
        if not local:  # a cluster of one's own goes down as a whole
            deployment.undeploy(engines.values())


def _store_config(settings: Settings) -> StoreConfig:
    """How this process and every replica open the store."""
    return StoreConfig(
        url=settings.store,
        default_ttl_s=settings.default_ttl_s,
        max_ttl_s=settings.max_ttl_s,
        tenant_max_caches=settings.tenant_max_caches,
        tenant_max_bytes=settings.tenant_max_bytes,
        encryption_key_file=settings.encryption_key_file,
    )


class _HttpServer(uvicorn.Server):
    """uvicorn, which tells world and supervisor once it listens, and leaves when the supervisor's line ends."""

    def __init__(self, app: object, settings: Settings, place: Place) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]  # FastAPI is an ASGI application, uvicorn's own type is a union of Any
                loop="asyncio",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(settings.shutdown_grace_s),
            )
        )
        self._line = place.line
        self._grace_s = settings.shutdown_grace_s
        self._following: asyncio.Task[None] | None = None
        self._replaced = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            print(f"{READY}http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
            with suppress(BrokenPipeError):  # then the line has ended, which is noticed next
                self._line.send(b".")
            self._following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        await asyncio.get_running_loop().sock_recv(self._line, 1)
        self._replaced = self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._following is not None:
            self._following.cancel()
        if self._replaced:
            await self._drain()
        await super().shutdown(sockets)

    async def _drain(self) -> None:
        """Accept no more, finish what is open, and close no connection on which a request may be on its way.

        uvicorn would close those at once on which it has answered everything, while another request comes in. Here
        they get their answer, which says that it is the last; those that stay silent, uvicorn closes after 5 s as ever.
        """
        for server in self.servers:
            server.close()
        self.server_state.default_headers = [*self.server_state.default_headers, (b"connection", b"close")]
        end = time.monotonic() + self._grace_s
        while self.server_state.connections and not self.force_exit and time.monotonic() < end:
            await asyncio.sleep(0.1)
        self.config.timeout_graceful_shutdown = 1  # what is open now has had its time


def _cut_off_unread(listener: socket.socket, deadline_s: float) -> None:
    """Connections that will be accepted, and whose other side takes nothing for so long, are cut off."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        # Nothing above TCP can end a connection whose reader has stopped: closing it waits for what is unsent.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(deadline_s * 1000))


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


def _share_of_cpus(settings: Settings) -> int:
    return max(1, (os.cpu_count() or 1) // (settings.replicas * len(settings.models)))
