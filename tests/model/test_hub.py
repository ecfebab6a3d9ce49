"""Models of the hub that cannot be had are refused in seconds, and nothing else is."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from kvshelf.errors import InvalidRequest
from kvshelf.model import hub, loading
from kvshelf.model.hub import require_available

NAME = "some-org/some-model"


def pointed_to(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    template = f"http://127.0.0.1:{port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of a hub at which nothing listens."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pointed_to(listener.getsockname()[1], monkeypatch)
    return tmp_path / "hub"


Answer = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answer], list[str]]]:
    """Starts a hub that answers so; gives the list of the paths that it is asked for."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Answer) -> list[str]:
        paths: list[str] = []

        class Hub(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                paths.append(self.path)
                answer(self)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        pointed_to(server.server_port, monkeypatch)
        return paths

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def status(code: int, **headers: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(code)
        for name, value in ({"content-length": "0"} | headers).items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()

    return answer


def kept(cache: Path, *files: str) -> None:
    snapshot = cache / "models--some-org--some-model" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True, exist_ok=True)
    for name in files:
        (snapshot / name).touch()


@pytest.mark.parametrize(
    "load", [lambda: loading.load(NAME, device="cpu", dtype="auto"), lambda: loading.skeleton(NAME)]
)
def test_a_hub_that_cannot_be_reached_is_named_in_seconds(load: Callable[[], object]) -> None:
    began = time.monotonic()
    with pytest.raises(InvalidRequest) as caught:
        load()
    assert time.monotonic() - began < 10
    for words in (NAME, f"{constants.ENDPOINT} cannot be reached", "check the name", "./NAME", "HF_HUB_OFFLINE=1"):
        assert words in caught.value.message


def test_a_hub_that_never_answers_is_waited_for_no_longer_than_the_limit(
    answering: Callable[[Answer], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    done = threading.Event()

    def silent(_: object) -> None:
        done.wait(20)

    answering(silent)
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match="cannot be reached"):
        require_available(NAME)
    assert time.monotonic() - began < 3
    done.set()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (status(404, X_Error_Code="RepoNotFound"), ("has no such model", "check the name", "HF_TOKEN", "./NAME")),
        (status(403, X_Error_Code="GatedRepo"), ("it is gated", "HF_TOKEN")),
    ],
    ids=["no such name", "gated"],
)
def test_what_the_hub_does_not_give_is_refused_with_the_way_out(
    answering: Callable[[Answer], list[str]], answer: Answer, words: tuple[str, ...]
) -> None:
    paths = answering(answer)
    with pytest.raises(InvalidRequest) as caught:
        require_available(NAME)
    assert caught.value.param == "model"
    assert all(words in caught.value.message for words in (NAME, *words)), caught.value.message
    assert paths == [f"/{NAME}/resolve/main/config.json"]


@pytest.mark.parametrize(
    "answer",
    [status(200, X_Repo_Commit="0123abcd", ETag='"1"'), status(503), status(404, X_Error_Code="EntryNotFound")],
    ids=["there", "busy", "no configuration"],
)
def test_what_transformers_may_still_load_is_not_refused(
    answering: Callable[[Answer], list[str]], answer: Answer
) -> None:
    paths = answering(answer)
    require_available(NAME)
    assert len(paths) == 1


def test_a_network_that_comes_up_late_is_waited_for(
    answering: Callable[[Answer], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_PAUSES_S", (0.01, 0.01))
    there = status(200, X_Repo_Commit="0123abcd", ETag='"1"')
    paths = answering(lambda request: there(request) if len(paths) == 3 else request.connection.close())
    require_available(NAME)
    assert len(paths) == 3


def test_for_a_model_in_the_cache_the_hub_is_not_asked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_request", lambda *_: pytest.fail("the hub was asked"))
    kept(cache, "config.json")
    require_available(NAME, weights=False)
    kept(cache, "model-00001-of-00002.safetensors")
    require_available(NAME)
    require_available(str(cache))  # a folder


def test_a_part_of_a_model_in_the_cache_is_not_the_model(cache: Path) -> None:
    kept(cache, "config.json")
    with pytest.raises(InvalidRequest, match="cannot be reached"):
        require_available(NAME)


def test_without_leave_to_ask_the_hub_only_the_cache_counts(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidRequest, match=r"not in the hub's cache.*HF_HUB_OFFLINE"):
        require_available(NAME)
    kept(cache, "config.json", "model.safetensors")
    require_available(NAME)


def test_a_name_that_the_hub_cannot_have_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no folder here, and no name"):
        require_available("some/folder/here")
