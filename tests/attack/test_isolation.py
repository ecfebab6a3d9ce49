"""doctor --isolation: it passes today's service, and alarms where one leaks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from typer.testing import CliRunner, Result

from kvshelf.cli import app
from kvshelf.cli.checks.isolation import lookups, parties, probe
from tests.attack.conftest import Attacked

Change = Callable[[httpx.Response], tuple[int, dict[str, str], bytes]]


def plain(answer: httpx.Response) -> tuple[int, dict[str, str], bytes]:
    kept = {name: value for name, value in answer.headers.items() if name not in ("transfer-encoding", "connection")}
    return answer.status_code, kept, answer.content


@contextmanager
def leaking(url: str, known: set[str], leak: Change) -> Iterator[str]:
    """The URL of a proxy that changes the answers to requests whose path has a known id."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def handle_one(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {
                name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")
            }
            answer = client.request(self.command, self.path, headers=headers, content=body)
            known_id = answer.status_code == 404 and any(id in self.path for id in known)
            status, said, content = (leak if known_id else plain)(answer)
            self.send_response_only(status)
            for name, value in said.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PATCH = do_DELETE = handle_one  # noqa: N815 - as http.server calls them

    with httpx.Client(base_url=url, timeout=60) as client, ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Slower(httpx.HTTPTransport):
    """Answers come 2 ms later where the path has a known id. It is in the client and not in a proxy, whose own times
    on a busy machine would hide ten times as much; a look-up takes 1.5 to 5 ms at load 16 on two processors."""

    def __init__(self, known: set[str]) -> None:
        super().__init__()
        self._known = known

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = super().handle_request(request)
        answer.read()
        if any(id in request.url.path for id in self._known):
            time.sleep(0.002)
        return answer


def other_header(answer: httpx.Response) -> tuple[int, dict[str, str], bytes]:
    status, headers, content = plain(answer)
    return status, {**headers, "x-there": "yes"}, content


def other_word(answer: httpx.Response) -> tuple[int, dict[str, str], bytes]:
    status, headers, content = plain(answer)
    return status, headers, content.replace(b"there is no cache", b"there's no cache ")


def other_status(answer: httpx.Response) -> tuple[int, dict[str, str], bytes]:
    _, headers, content = plain(answer)
    return 403, headers, content


@pytest.mark.parametrize("known", [True, False], ids=["delayed", "as fast"])
def test_a_planted_delay_of_two_milliseconds_is_found(attacked: Attacked, known: bool) -> None:
    with parties(attacked.url, [*attacked.keys.values()]) as (owner, stranger):
        lookup = next(lookups(owner, owner.get("/v1/models")["data"][0]["id"]))
        plainly = stranger.http
        about = {"base_url": plainly.base_url, "headers": plainly.headers, "timeout": plainly.timeout}
        with httpx.Client(**about, transport=Slower({lookup.theirs} if known else set())) as stranger.http:
            # More pairs only where 40 have left it open.
            found = next(
                (found for pairs in (40, 200) if (found := probe(owner, stranger, lookup, pairs)).leaks),
                None,
            )
        stranger.http = plainly
    assert (found is not None) is known, found
    assert found is None or not found.differences


@pytest.mark.parametrize("leak", [other_header, other_word, other_status, plain])
def test_a_planted_leak_is_found(attacked: Attacked, leak: Change) -> None:
    known: set[str] = set()
    with leaking(attacked.url, known, leak) as url, parties(url, [*attacked.keys.values()]) as (owner, stranger):
        model = owner.get("/v1/models")["data"][0]["id"]
        lookup = next(lookups(owner, model))
        assert (lookup.what, lookup.theirs in owner.ids()) == ("show", True)
        known.add(lookup.theirs)
        found = probe(owner, stranger, lookup, 40)
    assert found.leaks is (leak is not plain), found
    assert bool(found.differences) is (leak is not plain)


def doctor(attacked: Attacked, *options: str) -> Result:
    keys = [text for key in attacked.keys.values() for text in ("--key", key)]
    return CliRunner().invoke(app, ["doctor", "--isolation", attacked.url, *keys, *options])


def shelved(attacked: Attacked) -> list[object]:
    lists = ("/v1/caches?limit=1000", "/v1/files")
    found: list[object] = []
    for tenant in attacked.keys:
        with attacked.client(tenant) as client:
            found += [client.get(path).json()["data"] for path in lists]
    return found


@pytest.mark.slow
def test_the_service_passes_and_nothing_is_left(attacked: Attacked, soak: bool) -> None:
    before = shelved(attacked)
    done = doctor(attacked, "--json", "--pairs", "400" if soak else "20")
    findings = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each for each in findings if each["leaks"]] == []
    assert done.exit_code == 0, done.output
    told = {each["what"] for each in findings}
    assert {"show", "query", "blob", "labels", "search", "response", "file", "batch", "listings", "put"} <= told
    assert {each["owner"] for each in findings} == {*attacked.keys}
    assert shelved(attacked) == before
