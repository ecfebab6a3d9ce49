"""Many clients at once, and processes that are killed under them: each answer is what the same question got alone.

Before the load every question is asked alone. Under it the answers must be the same text, but from a token on that was
as good as another (see `equally_good`); those are counted and printed. 429 and 503 say when to come back, and clients
do; any other error fails the test.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch

from kvshelf import CompressedCache, Engine
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.samples.tasks import make_facts, write_document

if TYPE_CHECKING:
    from tests.conftest import LiveService


pytestmark = pytest.mark.faults

DOCUMENTS = 24
FACTS = 2
MAX_TOKENS = 16
KINDS: list[dict[str, Any]] = [
    {"policy": "full"},
    {"policy": "keydiff", "compression_ratio": 0.5},
    {"policy": "keydiff", "compression_ratio": 0.5, "codec": "int8"},
    {"policy": "ada", "policy_params": {"base": "keydiff"}, "compression_ratio": 0.3},
]
CLOSE = 1e-4
"""Where the two best logits lie closer than this, sums in another order may choose the other token."""


@dataclass(frozen=True)
class Known:
    """A question to one document, with what it was answered alone. `value` is the document's fact that it asks for."""

    cache_id: str
    prompt: str
    value: str
    text: str


@dataclass
class Load:
    """Clients of one service, each asking one thing after the other, and what they got.

    url: where the service is now. breaks: whether connections may break; then what was asked is asked again.
    answered: when each request was made and answered, of `time.monotonic`, with all that was repeated in between.
    other: answers that are not as before. created: the caches whose creation was acknowledged.
    """

    url: str
    known: Sequence[Known]
    breaks: bool = False
    over: bool = False
    answered: list[tuple[float, float]] = field(default_factory=list)
    asked_again: Counter[str] = field(default_factory=Counter)
    other: list[tuple[Known, str]] = field(default_factory=list)
    created: set[str] = field(default_factory=set)

    @asynccontextmanager
    async def by(self, clients: int) -> Any:
        """The load goes on for the time of the block; at its end what is under way is finished."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=120) as self._http, asyncio.TaskGroup() as tasks:
            for number in range(clients):
                tasks.create_task(self._ask(random.Random(number)))
            for number in range(2):
                tasks.create_task(self._create(number))
            yield
            self.over = True

    async def _ask(self, rng: random.Random) -> None:
        ways = (self._plain, self._stream, self._several, self._chat)
        while not self.over:
            known = rng.choice(self.known)
            (way,) = rng.choices(ways, (4, 3, 2, 1))
            began = time.monotonic()
            answers = await way(known)
            self.answered.append((began, time.monotonic()))
            for one, text in answers:
                if text != one.text:
                    self.other.append((one, text))

    async def _plain(self, known: Known) -> list[tuple[Known, str]]:
        answer = await self._post(f"/v1/caches/{known.cache_id}/query", prompt=known.prompt, max_tokens=MAX_TOKENS)
        return [(known, answer["text"])]

    async def _several(self, known: Known) -> list[tuple[Known, str]]:
        all_of_it = [one for one in self.known if one.cache_id == known.cache_id]
        prompts = [one.prompt for one in all_of_it]
        found = await self._post(f"/v1/caches/{known.cache_id}/query", prompt=prompts, max_tokens=MAX_TOKENS)
        return [(one, answer["text"]) for one, answer in zip(all_of_it, found["data"], strict=True)]

    async def _chat(self, known: Known) -> list[tuple[Known, str]]:
        messages = [{"role": "user", "content": known.prompt}]
        body = {"model": "kvshelf-tiny", "messages": messages, "max_tokens": MAX_TOKENS, "cache_id": known.cache_id}
        found = await self._post("/v1/chat/completions", **body)
        return [(known, found["choices"][0]["message"]["content"])]

    async def _stream(self, known: Known) -> list[tuple[Known, str]]:
        body = {"prompt": known.prompt, "max_tokens": MAX_TOKENS, "stream": True}
        *deltas, answer = (await self._post(f"/v1/caches/{known.cache_id}/query", **body))[:-1]
        assert "".join(delta["text"] for delta in deltas) == answer["text"]
        return [(known, answer["text"])]

    async def _create(self, number: int) -> None:
        """New documents, plain and in the background in turn; whatever was acknowledged is noted."""
        while not self.over:
            number += 2
            body = {"document": f"Ship number {number} brings tea. " * 40, "compression_ratio": 0.5}
            cache = await self._post(
                "/v1/caches", headers={} if number % 4 < 2 else {"prefer": "respond-async"}, **body
            )
            if cache["object"] == "cache.request":
                while (cache := await self._get(f"/v1/requests/{cache['id']}?wait_s=20"))["state"] != "done":
                    assert cache["state"] in ("queued", "running"), cache
            self.created.add(cache.get("cache_id") or cache["id"])
            await asyncio.sleep(0.5)

    async def _post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> Any:
        return await self._until_answered(lambda: self._http.post(self.url + path, json=body, headers=headers))

    async def _get(self, path: str) -> Any:
        return await self._until_answered(lambda: self._http.get(self.url + path))

    async def _until_answered(self, send: Callable[[], Any]) -> Any:
        while True:
            try:
                response = await send()
            except httpx.TransportError:
                if not self.breaks:
                    raise
                self.asked_again["connection broke"] += 1
                await asyncio.sleep(1)
                continue
            found = _content(response)
            error = (found[-2] if isinstance(found, list) else found).get("error")
            if error is None:
                return found
            assert response.status_code in (200, 429, 503), (response.status_code, error)
            assert error["code"] in ("queue_full", "no_worker", "worker_crashed"), error
            self.asked_again[error["code"]] += 1
            await asyncio.sleep(float(response.headers["retry-after"]) if response.status_code != 200 else 0.5)

    def report(self, what: str) -> None:
        took = sorted(1000 * (ended - began) for began, ended in self.answered)
        cuts = statistics.quantiles(took, n=100)
        seconds = max(ended for _, ended in self.answered) - min(began for began, _ in self.answered)
        print(
            f"{what}: {len(took)} requests answered, {len(took) / seconds:.0f} per second, p50 {cuts[49]:.0f} ms, "
            f"p99 {cuts[98]:.0f} ms, longest {took[-1]:.0f} ms; asked again {dict(self.asked_again)}; "
            f"{len(self.created)} caches created beside"
        )


def _content(response: httpx.Response) -> Any:
    """A response's JSON, or the list of what a stream told, its end included."""
    if response.headers["content-type"].startswith("application/json"):
        return response.json()
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [*map(json.loads, lines[:-1]), None]


def equally_good(engine: Engine, http: httpx.Client, known: Known, text: str) -> bool:
    """Whether an answer leaves the one given alone at a token that another one equalled."""
    cache = CompressedCache.from_bytes(http.get(f"/v1/caches/{known.cache_id}/blob").content)
    query = engine.encode_query(cache, known.prompt)
    ids = engine.answer(cache, known.prompt, max_new_tokens=MAX_TOKENS).token_ids
    with engine.attached(cache) as past, torch.no_grad():
        logits = engine.model(torch.tensor([query + ids[:-1]]), **{CACHE_ARGUMENT: past}).logits[0]
    best = logits[len(query) - 1 :].float().topk(2).values.tolist()
    close = [step for step, (first, second) in enumerate(best) if first - second < CLOSE]
    told = [engine.encoder.require_text("prompt").decode(ids[:step]).strip() for step in range(len(ids) + 1)]
    leaves_at = max(step for step, same in enumerate(told) if text.startswith(same))
    return leaves_at in close


def require_as_alone(load: Load, engine: Engine, http: httpx.Client) -> None:
    assert len(load.answered) > len(load.known)
    assert all(equally_good(engine, http, known, text) for known, text in load.other), load.other
    print(f"answers that differ from those given alone, where two tokens were equally good: {len(load.other)}")


@dataclass(frozen=True)
class Prepared:
    """A service with documents on its shelf, and questions whose answers are known."""

    service: LiveService
    known: list[Known]
    clients: int
    seconds: float


@pytest.fixture(scope="module")
def prepared(
    start_service: Callable[..., AbstractContextManager[LiveService]],
    tmp_path_factory: pytest.TempPathFactory,
    tiny: Engine,
    soak: bool,
) -> Iterator[Prepared]:
    # Few caches fit into the replica's memory: most are read from the shelf, and memory that grows is a leak.
    settings = {"resident_bytes": 4 << 20, "resident_idle_s": 5}
    with start_service(tmp_path_factory.mktemp("load"), "kvshelf-tiny", **settings) as service:
        with httpx.Client(base_url=service.url, timeout=120) as http:
            known = list(_known(http, tiny, DOCUMENTS if soak else DOCUMENTS // 2))
        yield Prepared(service, known, *((200, 60.0) if soak else (32, 5.0)))


def _known(http: httpx.Client, engine: Engine, documents: int) -> Iterator[Known]:
    rng = random.Random(7)
    facts = make_facts(rng, [6] * (documents * FACTS))
    for number in range(documents):
        own = facts[number * FACTS :][:FACTS]
        document = write_document(rng, own, "prose", 256, engine.encoder.require_text("document").count_tokens)
        cache = http.post("/v1/caches", json={"document": document.text} | KINDS[number % len(KINDS)]).json()
        for question in document.questions:
            query = {"prompt": question.text, "max_tokens": MAX_TOKENS}
            text = http.post(f"/v1/caches/{cache['id']}/query", json=query).json()["text"]
            assert not any(fact.value in text for fact in facts if fact not in own)
            yield Known(cache["id"], question.text, question.answer, text)


def memory_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) / 1024


@pytest.mark.timeout(600)
def test_many_clients_at_once(prepared: Prepared, tiny: Engine, soak: bool) -> None:
    right = sum(known.value in known.text for known in prepared.known)
    assert right > len(prepared.known) / 2, "answers that are wrong alone prove nothing"
    service = prepared.service
    pids = [service.front_end_pid(), *service.replica_pids()]
    load = Load(service.url, prepared.known)

    samples = 40

    async def run() -> list[list[float]]:
        async with load.by(prepared.clients):
            taken = []
            for _ in range(samples):
                await asyncio.sleep(prepared.seconds / samples)
                taken.append([memory_mib(pid) for pid in pids])
            while len(load.answered) <= len(load.known):  # else it would prove little
                await asyncio.sleep(0.05)
            return taken

    taken = asyncio.run(run())
    load.report(f"{prepared.clients} clients for {prepared.seconds:.0f} s")
    print(f"{right} of {len(prepared.known)} answers are right")
    # Medians, because a replica's memory goes up and down by 50 MiB with what it reads and drops.
    for what, memory in zip(("front end", "replica"), zip(*taken, strict=True), strict=True):
        before, after = (statistics.median(memory[quarter * samples // 4 :][: samples // 4]) for quarter in (1, 3))
        print(f"{what}: {before:.0f} MiB in the second quarter, {after:.0f} MiB in the last one")
        assert after - before < (0.08 * before if soak else 100)
    assert not load.asked_again
    with httpx.Client(base_url=service.url, timeout=60) as http:
        require_as_alone(load, tiny, http)


@pytest.mark.timeout(600)
def test_the_replica_is_killed_under_load(prepared: Prepared, tiny: Engine) -> None:
    service = prepared.service
    load = Load(service.url, prepared.known)

    async def run() -> float:
        async with load.by(prepared.clients):
            while len(load.answered) < 2 * prepared.clients:
                await asyncio.sleep(0.05)
            (pid,) = service.replica_pids()
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            while not any(began > killed for began, _ in load.answered):
                await asyncio.sleep(0.05)
            recovered = min(ended for began, ended in load.answered if began > killed) - killed
            await asyncio.sleep(prepared.seconds / 2)
            return recovered

    recovered_s = asyncio.run(run())
    load.report("with a kill of the replica")
    print(f"the first answer came {recovered_s:.1f} s after the kill")
    assert load.asked_again
    with httpx.Client(base_url=service.url, timeout=60) as http:
        require_as_alone(load, tiny, http)


@pytest.mark.timeout(900)
def test_the_front_end_is_killed_under_load(
    prepared: Prepared, tiny: Engine, start_service: Callable[..., AbstractContextManager[LiveService]]
) -> None:
    """The last test of this file: afterwards its service is dead. What it acknowledged is there at the next start."""
    service = prepared.service
    load = Load(service.url, prepared.known, breaks=True)

    async def run(restart: Callable[[], LiveService]) -> float:
        async with load.by(prepared.clients):
            while len(load.answered) < 2 * prepared.clients:
                await asyncio.sleep(0.05)
            os.kill(service.front_end_pid(), signal.SIGKILL)
            killed = time.monotonic()
            await asyncio.to_thread(service.process.wait, 60)
            load.url = (await asyncio.to_thread(restart)).url
            while not any(began > killed for began, _ in load.answered):
                await asyncio.sleep(0.05)
            recovered = min(ended for began, ended in load.answered if began > killed) - killed
            await asyncio.sleep(prepared.seconds / 2)
            return recovered

    again = start_service(service.home, "kvshelf-tiny")
    try:
        recovered_s = asyncio.run(run(again.__enter__))
        load.report("with a kill of the front end")
        print(f"the first answer came {recovered_s:.1f} s after the kill, the start of a service included")
        with httpx.Client(base_url=load.url, timeout=60) as http:
            for cache_id in load.created | {known.cache_id for known in load.known}:
                query = {"prompt": "What does the ship bring?", "max_tokens": 2}
                assert http.post(f"/v1/caches/{cache_id}/query", json=query).status_code == 200
            require_as_alone(load, tiny, http)
    finally:
        again.__exit__(None, None, None)
