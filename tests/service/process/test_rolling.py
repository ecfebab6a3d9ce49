"""SIGHUP puts another service in the place of the one that runs. Whoever asks meanwhile notices nothing.

No client here repeats anything: every connection that broke and every answer that failed would show.
"""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from kvshelf import Client
from kvshelf.client import Retries
from kvshelf.service.http.place import ServerPlace
from tests.amounts import few
from tests.service.conftest import await_log, created, refused, stopped
from tests.service.jobs.test_batches import begun, closed_window, lines
from tests.service.process.test_supervisor import SUPERVISOR
from tests.store.redis.servers import wait_until

if TYPE_CHECKING:
    from tests.conftest import LiveService

pytestmark = pytest.mark.slow

# The real HTTP server with an application that says which process answers: starting it takes a second.
CHILD = """
import asyncio, os, sys
from kvshelf.service.http.server import ConnectionLimits, HttpServer
from kvshelf.service.http.place import ServerPlace

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(20 if scope["path"] == "/slowly" else 1):
        await asyncio.sleep(0.05 if scope["path"] == "/slowly" else 0)
        await send({"type": "http.response.body", "body": b"%d " % os.getpid(), "more_body": True})
    await send({"type": "http.response.body", "body": b""})

with ServerPlace.inherited(sys.argv[1].removeprefix("--place=")) as place:
    HttpServer(app, place, limits=ConnectionLimits(99, 99, 15), grace_s=20).run(sockets=[place.listener])
"""


class Crowd:
    """Asks in several ways at once, each again and again, until it leaves; `counts` are their answers so far."""

    def __init__(self, ways: Sequence[Callable[[], object]], *, pause_s: float = 0) -> None:
        self.counts = [0] * len(ways)
        self._pause_s = pause_s
        self._stop = threading.Event()
        threads = ThreadPoolExecutor(len(ways))
        self._asking: list[Future[None]] = [threads.submit(self._ask, *each) for each in enumerate(ways)]

    def _ask(self, number: int, way: Callable[[], object]) -> None:
        while not self._stop.wait(self._pause_s):
            way()
            self.counts[number] += 1

    def each_asks_again(self) -> None:
        """Wait until it is so. Raises what one of them met."""
        before = list(self.counts)
        while any(now < then + 2 for now, then in zip(self.counts, before, strict=True)):
            for future in self._asking:
                if future.done():
                    future.result()
            time.sleep(0.05)

    def leave(self) -> None:
        self._stop.set()
        for future in self._asking:
            future.result()


def is_last_on(connection: http.client.HTTPConnection) -> bool:
    """Ask on a connection; whether the answer says that it is the last one there."""
    connection.request("GET", "/")
    response = connection.getresponse()
    assert response.read()
    return response.getheader("connection") == "close"


@contextmanager
def half_sent(url: str) -> Iterator[None]:
    """Before the block a part of a request is sent; the rest follows once the server of then has begun to leave, as it
    says on another connection. It is answered, and told that it was the last.

    The connection has been used before and so looks idle, as each does for a moment whenever a server stops.
    """
    connection, other = (http.client.HTTPConnection(url.removeprefix("http://"), timeout=30) for _ in range(2))
    with closing(connection), closing(other):
        assert not is_last_on(connection)
        assert not is_last_on(other)
        connection.sock.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n")
        yield
        while not is_last_on(other):
            time.sleep(0.05)
        time.sleep(0.3)  # time to close what looks idle, which it must not
        connection.sock.sendall(b"\r\n")
        with http.client.HTTPResponse(connection.sock) as response:
            response.begin()
            assert (response.status, response.getheader("connection")) == (200, "close")


def test_no_request_is_lost_when_one_server_takes_over_from_another(tmp_path: Path, soak: bool) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path / "child.py")]
    answered_by: set[str] = set()

    def get(client: Any, path: str) -> None:
        pids = set(client.get(f"{url}{path}", timeout=60).raise_for_status().text.split())
        assert len(pids) == 1
        answered_by.update(pids)

    with ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(process.terminate)
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        fast, other, slow = (stack.enter_context(httpx.Client()) for _ in range(3))
        ways = [lambda: get(fast, "/"), lambda: get(other, "/"), lambda: get(slow, "/slowly")]
        # Without pauses, clients take the processor from the servers that start. With them there still are requests at
        # every moment of a restart.
        crowd = Crowd([*ways, lambda: get(httpx, "/"), lambda: get(httpx, "/")], pause_s=0 if soak else 0.01)
        stack.callback(crowd.leave)
        for _ in range(50 if soak else 2):
            crowd.each_asks_again()
            with half_sent(url):
                process.send_signal(signal.SIGHUP)
                assert process.stdout.readline().split()[-1] == url
        crowd.each_asks_again()
    assert len(answered_by) == (51 if soak else 3)
    print(f"{sum(crowd.counts)} answers by {len(answered_by)} servers")


# As a service answers, with its errors and request ids, but never to the end.
UNFINISHED = """
import asyncio, sys
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from kvshelf.service.http import errors
from kvshelf.service.http.server import ConnectionLimits, HttpServer
from kvshelf.service.http.place import ServerPlace

app = FastAPI()
errors.install(app, [])

@app.post("/asked")
async def asked():
    print("asked", flush=True)
    await asyncio.sleep(600)

@app.get("/streamed")
async def streamed():
    async def pieces():
        yield "one"
        await asyncio.sleep(600)
    return StreamingResponse(pieces())

with ServerPlace.inherited(sys.argv[1].removeprefix("--place=")) as place:
    HttpServer(app, place, limits=ConnectionLimits(99, 99, 15), grace_s=1).run(sockets=[place.listener])
"""


def test_a_server_leaves_if_its_supervisor_dies_before_it_reads_that_the_server_is_ready(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener, theirs:
        place = ServerPlace(listener, theirs)
        command = [sys.executable, str(tmp_path / "child.py"), f"--place={place}"]
        numbers = (listener.fileno(), theirs.fileno())
        process = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=numbers)
    with process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            ours.recv(1, socket.MSG_PEEK)  # it is there, and stays unread: the server's next read is a reset
            ours.close()
            assert process.wait(30) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("number", few(1, [signal.SIGHUP, signal.SIGTERM]))
def test_what_takes_longer_than_the_grace_is_refused_as_any_other_error(tmp_path: Path, number: int) -> None:
    """An answer that has begun breaks off, so that nobody takes it for the whole."""
    (tmp_path / "child.py").write_text(UNFINISHED)
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path / "child.py")]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
        ThreadPoolExecutor(1) as thread,
    ):
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        with httpx.stream("GET", f"{url}/streamed", timeout=30) as streamed:
            pieces = streamed.iter_text()
            assert next(pieces) == "one"
            asked = thread.submit(httpx.post, f"{url}/asked", timeout=30)
            assert process.stdout.readline() == "asked\n"
            process.send_signal(number)
            refusal = asked.result()
            with pytest.raises(httpx.RemoteProtocolError):
                next(pieces)
        process.terminate()
        _, log = process.communicate(timeout=30)
    # Not no_worker: clients repeat after that even what must not be done twice.
    error = refused(refusal, 503, "worker_crashed")
    assert (refusal.headers["retry-after"], error["details"]) == ("1", {"retry_after_s": 1.0})
    assert "Traceback" not in log


PROMPT = "Where is the green book?"
LENGTH = 8
LONG = 100


@contextmanager
def asking(url: str, cache_id: str) -> Iterator[list[Callable[[], str | None]]]:
    """Eight ways to put one question, each with its own connections; the last has a long answer."""
    path = f"/v1/caches/{cache_id}/query"
    body = {"prompt": PROMPT, "max_tokens": LENGTH}
    chat: dict[str, Any] = {"model": "random-tiny", "messages": [{"role": "user", "content": PROMPT}]}
    chat |= {"max_tokens": LENGTH, "extra_body": {"cache_id": cache_id}}
    with ExitStack() as stack:
        plain, streaming = (stack.enter_context(Client(url, retries=Retries(max_retries=0))) for _ in range(2))
        kept, slow = (stack.enter_context(httpx.Client(base_url=url, timeout=60)) for _ in range(2))
        theirs, their_streams = (
            stack.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)) for _ in range(2)
        )

        def stream(length: int) -> str:
            with streaming.caches.stream(cache_id, prompt=PROMPT, max_tokens=length) as pieces:
                return "".join(pieces)

        def fresh() -> str:
            return str(httpx.post(url + path, json=body, timeout=60).raise_for_status().json()["text"])

        def keeping(client: httpx.Client, pause_s: float) -> str:
            time.sleep(pause_s)
            return str(client.post(path, json=body).raise_for_status().json()["text"])

        def their_stream() -> str:
            chunks = their_streams.chat.completions.create(**chat, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

        yield [
            lambda: plain.caches.query(cache_id, prompt=PROMPT, max_tokens=LENGTH).text,
            lambda: stream(LENGTH),
            fresh,
            lambda: keeping(kept, 0),
            lambda: keeping(slow, 1.5),  # its connection is idle when the service is replaced
            lambda: theirs.chat.completions.create(**chat).choices[0].message.content,
            their_stream,
            lambda: stream(LONG),  # it is open when the service is replaced
        ]


def same_again(way: Callable[[], str | None]) -> Callable[[], None]:
    """The same way, whose answers must be what it is now."""
    expected = way()
    assert expected

    def ask() -> None:
        assert way() == expected

    return ask


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def open_requests(client: httpx.Client) -> int:
    return int(client.get("/v1/limits").json()["tenant"]["open_requests"]["used"])


def followed(client: httpx.Client, batch_id: str) -> list[str]:
    """All lines of the events of a batch."""
    with client.stream("GET", f"/v1/batches/{batch_id}/events") as response:
        return list(response.iter_lines())


def submit(client: httpx.Client, number: int) -> str:
    """A creation that is accepted and done later, by whichever of two services."""
    body = {"document": f"Ship number {number} leaves at noon. " * 50}
    accepted = client.post("/v1/caches", json=body, headers={"prefer": "respond-async"})
    assert accepted.status_code == 202, accepted.text
    return str(accepted.json()["id"])


@pytest.mark.faults
@pytest.mark.timeout(500)
def test_a_restart_without_a_failed_query(
    start_service: Callable[..., AbstractContextManager[LiveService]], tiny_folder: Path, tmp_path: Path, soak: bool
) -> None:
    """First one that fails, for a cause found early or (with all counts) late; then those that change a setting. In the
    end the service is stopped, and who waits for a creation or a batch hears how far it is."""
    model, keys, env_file = tmp_path / tiny_folder.name, tmp_path / "keys", tmp_path / "env"
    model.symlink_to(tiny_folder)
    keys.write_text("ab" * 32)
    keys.chmod(0o600)
    env_file.write_text("KVSHELF_MAX_QUEUED_REQUESTS=100\n")
    settings = {"env_file": env_file, "encryption_key_file": keys, "shutdown_grace_s": 60}
    with ExitStack() as stack:
        service = stack.enter_context(start_service(tmp_path / "home", model, **settings))
        ours = stack.enter_context(httpx.Client(base_url=service.url, timeout=60))
        cache = created(ours, document="The harbour master keeps the tide tables in a green book. " * 9)
        ways = stack.enter_context(asking(service.url, cache["id"]))
        # The pauses leave time for the start beside them.
        crowd = Crowd([same_again(way) for way in ways], pause_s=0 if soak else 1.0)
        stack.callback(crowd.leave)

        lost = model if soak else keys
        lost.rename(tmp_path / "aside")
        service.process.send_signal(signal.SIGHUP)
        await_log(service, "the restart failed")
        crowd.each_asks_again()
        assert ours.get("/v1/limits").json()["max_queued_requests"] == 100
        (tmp_path / "aside").rename(lost)

        for restart in range(1, 6 if soak else 2):
            old = [service.front_end_pid(), *service.replica_pids()]
            env_file.write_text(f"KVSHELF_MAX_QUEUED_REQUESTS={100 + restart}\n")
            service.process.send_signal(signal.SIGHUP)
            accepted: list[str] = []
            while f'"max_queued_requests":{100 + restart}' not in ours.get("/v1/limits").text:
                assert service.log.read_text().count("the restart failed") == 1
                accepted.append(submit(ours, len(accepted) + 1000 * restart))
                time.sleep(2)
            await_log(service, '"event": "restarted"', restart)
            while not all(map(gone, old)):
                time.sleep(0.1)
            crowd.each_asks_again()
            for request in accepted:
                assert ours.get(f"/v1/requests/{request}", params={"wait_s": 30}).json()["state"] == "done"
        print(f"answered by one service or the other, by client: {crowd.counts}")
        crowd.leave()
        (replica,) = service.replica_pids()
        with stopped(replica), ThreadPoolExecutor(2) as threads:
            path = f"/v1/requests/{submit(ours, 0)}"
            asked = threads.submit(ours.get, path, params={"wait_s": 50})
            batch = begun(ours, lines({"document": "Nobody begins with it."}), window=closed_window())
            watched = threads.submit(followed, ours, batch["id"])
            wait_until(lambda: open_requests(ours) == 3, "both are there, beside the question for their number")
            service.process.terminate()
            assert asked.result(timeout=20).json()["state"] in ("queued", "running")
            assert watched.result(timeout=20)[-2:] == ["data: [DONE]", ""]
