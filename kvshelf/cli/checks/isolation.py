"""doctor --isolation: two tenants of a running service see nothing of each other, by what it answers and when.

Each tenant in turn is the owner: it stores a cache with its source, a file, a batch, a response and a request in the
background. The other one, the stranger, asks for each of them and for one that nobody has, in pairs, in random order.
Of the answers status, body and headers must be equal. Of the times Mann and Whitney's U (1947) must tell nothing: AUC
is the probability that a look-up of what the owner has takes longer than one of what nobody has, ties as halves.
"""

from __future__ import annotations

import json
import math
import random
import re
import secrets
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from kvshelf.api import Certificate, GroupBound
from kvshelf.errors import InvalidRequest, NoWorker

if TYPE_CHECKING:
    import httpx

PAIRS: Final = 400
MOST_AUC: Final = 0.55

ROUNDS: Final = 3
"""With 400 pairs the AUC of equal times has a standard deviation of 0.02, so one in 70 leaves 0.45 to 0.55. A leak is
what leaves it on the same side in each of three rounds: by chance one probe in a million."""

_UNEQUAL: Final = re.compile(r"date|x-request-id|request-id|.*ratelimit.*|x-kvshelf-.*-ms|server-timing", re.IGNORECASE)
"""Headers that differ between any two answers."""

_REQUEST: Final = re.compile(r"req_[0-9A-Za-z_-]{8,}")
_BUSY: Final = (429, 503)
_PATIENCE_S: Final = 120.0
_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class Lookup:
    """A request. `{}` in the path and in the texts of the body stands for an id or another value that is looked up,
    `theirs` the owner's. alike: whether both answers must be equal; False where a stranger's own caches are in it."""

    what: str
    method: str
    path: str
    theirs: str
    body: Any = None
    timed: bool = True
    alike: bool = True


@dataclass
class LookupProbe:
    """What a probe found. differences: between the two answers. aucs: one per round; the last ones only where the
    first was beyond the limit. pairs: of each round. ms: the median time of what nobody has."""

    what: str
    owner: str
    differences: list[str] = field(default_factory=list)
    aucs: list[float] = field(default_factory=list)
    pairs: int = PAIRS
    ms: float = 0.0

    @property
    def leaks(self) -> bool:
        return bool(self.differences) or is_leak(self.aucs, self.pairs)


def auc(owners: Sequence[float], nothing: Sequence[float]) -> float:
    """The probability that one of `owners` is above one of `nothing`; equal ones count half."""
    ordered = sorted(nothing)
    wins = sum(bisect_left(ordered, value) + bisect_right(ordered, value) for value in owners)
    return wins / (2 * len(owners) * len(nothing))


def most_auc(pairs: int) -> float:
    """The limit for so many pairs: of fewer than 400, chance spreads the AUC further."""
    return 0.5 + (MOST_AUC - 0.5) * math.sqrt(max(1.0, PAIRS / pairs))


def is_beyond(value: float, pairs: int) -> bool:
    return abs(value - 0.5) > most_auc(pairs) - 0.5


def is_leak(aucs: Sequence[float], pairs: int = PAIRS) -> bool:
    """Whether every round found the limit exceeded, on the same side."""
    above = [value > 0.5 for value in aucs]
    beyond = all(is_beyond(value, pairs) for value in aucs)
    return len(aucs) >= ROUNDS and beyond and (all(above) or not any(above))


class Party:
    """One tenant's key at the service, and what it made there."""

    def __init__(self, url: str, key: str) -> None:
        import httpx

        headers = {"authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S, trust_env=False)
        self.tenant = ""
        self.created: list[str] = []

    def send(self, method: str, path: str, body: Any = None) -> tuple[httpx.Response, float]:
        """An answer, and the seconds that it took. A tenant that asked too much waits."""
        ends_at = time.monotonic() + _PATIENCE_S
        while True:
            request = self.http.build_request(method, path, json=body)
            began = time.perf_counter()
            answer = self.http.send(request)
            took_s = time.perf_counter() - began
            if answer.status_code not in _BUSY or time.monotonic() > ends_at:
                return answer, took_s
            time.sleep(min(float(answer.headers.get("retry-after", 1)), 30.0))

    def get(self, path: str) -> Any:
        return _require_success(self.send("GET", path)[0]).json()

    def post(self, path: str, body: Any) -> Any:
        return _require_success(self.send("POST", path, body)[0]).json()

    def make(self, path: str, body: Any) -> dict[str, Any]:
        """What a creation answers; it is removed in the end."""
        created: dict[str, Any] = self.post(path, body)
        self.created.append(f"{path}/{created['id']}")
        return created

    def ids(self) -> list[str]:
        return [path.rpartition("/")[2] for path in self.created]

    def clean(self) -> list[str]:
        """Remove what was made, the last first; returns what is left, which is all the rest once nobody answers."""
        import httpx

        not_removed: list[str] = []
        try:
            while self.created:
                if self.send("DELETE", self.created[-1])[0].status_code not in (200, 404):
                    not_removed.append(self.created[-1])
                self.created.pop()
        except httpx.HTTPError as error:
            not_removed += [f"{path} ({error})" for path in reversed(self.created)]
        return not_removed


def _require_success(answer: httpx.Response) -> httpx.Response:
    if answer.is_success:
        return answer
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.text[:200]
    raise NoWorker(f"{answer.request.method} {answer.request.url.path}: {answer.status_code}, {message}")


@contextmanager
def parties(url: str, keys: Sequence[str]) -> Iterator[tuple[Party, Party]]:
    """The two tenants. Raises `InvalidRequest` for keys that prove nothing."""
    import httpx

    if keys[0] == keys[1]:
        raise InvalidRequest("--key is given the same key twice; give keys of two tenants", param="--key")
    one, other = (Party(url, key) for key in keys)

    try:
        if httpx.get(f"{url}/v1/models", timeout=_TIMEOUT_S, trust_env=False).status_code != 401:
            raise InvalidRequest(f"{url} asks for no keys: all its callers are one tenant", param="--isolation")
        for party in (one, other):
            party.tenant = party.get("/v1/usage")["stored"][0]["tenant"]
            scopes = party.get("/v1/limits")["scopes"]
            if not {"read", "write"} <= {*scopes}:
                message = f"the key of tenant {party.tenant} may {', '.join(scopes)}; give keys that may read and write"
                raise InvalidRequest(message, param="--key")
        if one.tenant == other.tenant:
            raise InvalidRequest(f"both keys are of tenant {one.tenant}: give keys of two tenants", param="--key")
        yield one, other
    except httpx.HTTPError as error:
        raise NoWorker(f"{url} does not answer: {error}") from error
    finally:
        not_removed: list[str] = []
        for party in (one, other):
            not_removed += party.clean()
            party.http.close()
        if not_removed:
            raise NoWorker(f"not removed: {', '.join(not_removed)}")


_WORDS: Final = ["harbour", "tide", "lantern", "granite", "orchard", "meadow", "violin", "copper", "saffron", "glacier"]


def _document(mark: str) -> str:
    """A short document that holds a word of its own; all of them are of one length."""
    return f"The word of the day is {mark}. " + " ".join(random.Random(mark).choices(_WORDS, k=40))


def _mark() -> str:
    return secrets.token_hex(8)


def nobodys(id: str) -> str:
    """An id of the same form that nobody has."""
    return re.sub(r"[0-9a-f]{8,}", lambda match: secrets.token_hex(len(match[0]))[: len(match[0])], id)


def lookups(owner: Party, model: str) -> Iterator[Lookup]:
    """What a stranger can look up. The owner makes it all."""
    mark = _mark()
    cache = owner.make(
        "/v1/caches",
        {"document": _document(mark), "model": model, "name": mark, "labels": {"mark": mark}, "keep_source": True},
    )
    id = cache["id"]
    yield Lookup("show", "GET", "/v1/caches/{}", id)
    yield Lookup("kept entries", "GET", "/v1/caches/{}/kept", id)
    yield Lookup("turns", "GET", "/v1/caches/{}/turns", id)
    yield Lookup("blob", "GET", "/v1/caches/{}/blob", id)
    yield Lookup("export", "GET", "/v1/caches/{}/export?to=mlx", id)
    yield Lookup("query", "POST", "/v1/caches/{}/query", id, {"prompt": "What is the word?", "max_tokens": 1})
    yield Lookup("prompt", "POST", "/v1/caches/{}/prompt", id, {"prompt": "What is the word?"})
    yield Lookup("append", "POST", "/v1/caches/{}/append", id, {"document": " And so on."})
    yield Lookup("extensions", "GET", "/v1/caches?parent_id={}", id)
    yield Lookup("next page", "GET", "/v1/caches?after={}", id)
    yield Lookup("verify", "POST", "/v1/caches/{}/verify", id, timed=False)
    yield Lookup("change", "PATCH", "/v1/caches/{}", id, {"name": "a stranger's"}, timed=False)
    yield Lookup("delete", "DELETE", "/v1/caches/{}", id, timed=False)
    yield Lookup("warm", "POST", "/v1/caches/warm", id, {"cache_ids": ["{}"]}, timed=False)
    yield Lookup("warm labels", "POST", "/v1/caches/warm", mark, {"labels": {"mark": "{}"}}, timed=False)
    yield Lookup("documents", "GET", "/v1/caches?document_id={}", cache["document_id"])
    yield Lookup("names", "GET", "/v1/caches?name={}", mark)
    yield Lookup("labels", "GET", "/v1/caches?label.mark={}", mark)
    yield Lookup("short ids", "GET", "/v1/caches?id_prefix={}", id[:12])
    query = {"query": "the word {}", "model": model}
    yield Lookup("search", "POST", "/v1/caches/search", mark, {**query, "labels": {"mark": mark}})
    yield Lookup("search of all", "POST", "/v1/caches/search", mark, query, timed=False, alike=False)

    yield from _named(owner, model, id, mark)

    row = _mark()
    rows = json.dumps({"custom_id": "1", "document": _document(row), "labels": {"mark": row}}).encode()
    uploaded = owner.http.post("/v1/files", files={"file": ("rows.jsonl", rows)}, data={"purpose": "batch"})
    file_id = _require_success(uploaded).json()["id"]
    owner.created.append(f"/v1/files/{file_id}")
    batch_id = owner.post("/v1/batches", {"input_file_id": file_id, "endpoint": "/v1/caches", "model": model})["id"]
    ended = _await(owner, f"/v1/batches/{batch_id}")
    results = (ended["output_file_id"], ended["error_file_id"])
    owner.created += [f"/v1/files/{result}" for result in results if result is not None]
    owner.created += [
        f"/v1/caches/{cache_of_row['id']}" for cache_of_row in owner.get(f"/v1/caches?label.mark={row}")["data"]
    ]
    yield Lookup("file", "GET", "/v1/files/{}", file_id)
    yield Lookup("file content", "GET", "/v1/files/{}/content", file_id)
    yield Lookup("batch", "GET", "/v1/batches/{}", batch_id)
    yield Lookup("batch events", "GET", "/v1/batches/{}/events", batch_id)
    yield Lookup("file delete", "DELETE", "/v1/files/{}", file_id, timed=False)
    yield Lookup("batch cancel", "POST", "/v1/batches/{}/cancel", batch_id, timed=False)
    of_file = {"input_file_id": "{}", "endpoint": "/v1/caches"}
    yield Lookup("batch of a file", "POST", "/v1/batches", file_id, of_file, timed=False)

    question = {"model": model, "cache_id": id, "input": "Say one word.", "max_output_tokens": 1, "store": True}
    response_id = owner.make("/v1/responses", question)["id"]
    yield Lookup("response", "GET", "/v1/responses/{}", response_id)
    follow = {"model": model, "input": "And?", "max_output_tokens": 1, "previous_response_id": "{}"}
    yield Lookup("next response", "POST", "/v1/responses", response_id, follow)
    yield Lookup("response delete", "DELETE", "/v1/responses/{}", response_id, timed=False)


def _named(owner: Party, model: str, id: str, mark: str) -> Iterator[Lookup]:
    """As `lookups`, of what the owner keeps under a name: a certificate, and a workflow that asks a cache."""
    owner.post("/v1/certificates", _certificate(owner, model, mark))
    owner.created.append(f"/v1/certificates/{mark}")
    yield Lookup("certificate", "GET", "/v1/certificates/{}", mark)
    yield Lookup("certificate delete", "DELETE", "/v1/certificates/{}", mark, timed=False)
    under = {"document": "It is.", "model": model, "certificate": "{}"}
    yield Lookup("creation under a certificate", "POST", "/v1/caches", mark, under, timed=False)

    owner.created.append(f"/v1/workflows/{mark}")
    _require_success(owner.http.put(f"/v1/workflows/{mark}", json={"steps": {"one": {"cache_ids": [id]}}}))
    steps = {"steps": {"one": {"cache_ids": ["{}"]}}}
    yield Lookup("workflow", "GET", "/v1/workflows/{}", mark)
    yield Lookup("workflow delete", "DELETE", "/v1/workflows/{}", mark, timed=False)
    yield Lookup("workflow of a cache", "PUT", f"/v1/workflows/{_mark()}", id, steps, timed=False)


def _certificate(owner: Party, model: str, name: str) -> dict[str, Any]:
    """A certificate of a model that certifies nothing."""
    served = next(one for one in owner.get("/v1/models")["data"] if one["id"] == model)
    group = GroupBound(documents=1, questions=1, limit=0.0, tokens=(1, 1), share=1.0, loss=0.0, ways=[])
    certificate = Certificate(
        name=name,
        alpha=0.5,
        reference="full",
        model=model,
        weights="",
        tokenizer=served["tokenizer"],
        fingerprint=served["fingerprint"],
        quality_version=0,
        ways=[],
        groups={"": group},
        data="",
        date="",
    )
    return certificate.signed().model_dump(mode="json")


def _await(party: Party, path: str) -> dict[str, Any]:
    ends_at = time.monotonic() + _PATIENCE_S
    while True:
        batch: dict[str, Any] = party.get(path)
        if batch["status"] in ("completed", "failed", "expired", "cancelled"):
            return batch
        if time.monotonic() > ends_at:
            raise NoWorker(f"{path} did not end within {_PATIENCE_S:g} s")
        time.sleep(0.2)


def probe(owner: Party, stranger: Party, lookup: Lookup, pairs: int) -> LookupProbe:
    """Compare what a stranger is answered for the owner's value and for one that nobody has."""
    theirs, nothing = lookup.theirs, nobodys(lookup.theirs)
    finding = LookupProbe(lookup.what, owner.tenant, pairs=pairs)
    answers = [_comparable(_looked_up(stranger, lookup, value)[0], value) for value in (theirs, nothing)]
    if lookup.alike:
        finding.differences = [f"{part}: {one!r:.80} and {other!r:.80}" for part, one, other in _unequal(*answers)]
    finding.differences += [f"names {id}" for id in owner.ids() if any(id in answer["body"] for answer in answers)]
    while lookup.timed and not finding.differences and len(finding.aucs) < ROUNDS:
        times: dict[str, list[float]] = {theirs: [], nothing: []}
        for _ in range(pairs):
            for value in random.sample([theirs, nothing], 2):
                times[value].append(_looked_up(stranger, lookup, value)[1])
        finding.ms = 1e3 * median(times[nothing])
        finding.aucs.append(auc(times[theirs], times[nothing]))
        if not is_beyond(finding.aucs[-1], pairs):
            break
    return finding


def _looked_up(party: Party, lookup: Lookup, value: str) -> tuple[httpx.Response, float]:
    body = None if lookup.body is None else json.loads(json.dumps(lookup.body).replace("{}", value))
    return party.send(lookup.method, lookup.path.replace("{}", value), body)


def _comparable(answer: httpx.Response, value: str) -> dict[str, Any]:
    """What an answer tells, without the value that was looked up and the id of the request."""
    text = _REQUEST.sub("", answer.text.replace(value, ""))
    headers = {name: text for name, text in answer.headers.items() if not _UNEQUAL.fullmatch(name)}
    return {"status": answer.status_code, "body": text, **{f"header {name}": text for name, text in headers.items()}}


def _unequal(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in {**one, **other}:
        if one.get(name) != other.get(name):
            yield name, one.get(name), other.get(name)


_LISTS: Final = ("/v1/caches?limit=100", "/v1/files", "/v1/batches")


def listings(stranger: Party) -> dict[str, Any]:
    """All that a tenant is told of its own: of another tenant's work, nothing may change in it."""
    limits = stranger.get("/v1/limits")["tenant"]
    return {
        **{path: stranger.get(path)["data"] for path in _LISTS},
        "limits": {name: limits[name] for name in ("caches", "bytes", "batches")},
        "usage": stranger.get("/v1/usage")["stored"],
    }


def puts(owner: Party, stranger: Party, model: str, pairs: int) -> LookupProbe:
    """Compare what a stranger is answered for a document that the owner has on the shelf, and for a new one."""
    finding = LookupProbe("put", owner.tenant, pairs=pairs)
    while len(finding.aucs) < ROUNDS:
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(pairs):
            known, fresh = _document(_mark()), _document(_mark())
            owner.make("/v1/caches", {"document": known, "model": model})
            for document in random.sample([known, fresh], 2):
                answer, took_s = stranger.send("POST", "/v1/caches", {"document": document, "model": model})
                created = _require_success(answer).json()
                if created["existing"] or answer.status_code != 201:
                    finding.differences = [f"status {answer.status_code}, existing {created['existing']}"]
                times[document == known].append(took_s)
                stranger.send("DELETE", f"/v1/caches/{created['id']}")
            owner.send("DELETE", owner.created.pop())
        finding.ms = 1e3 * median(times[False])
        finding.aucs.append(auc(times[True], times[False]))
        if finding.differences or not is_beyond(finding.aucs[-1], pairs):
            break
    return finding


def prove(url: str, keys: Sequence[str], *, pairs: int, show: Callable[[str], None]) -> list[LookupProbe]:
    """The findings of all probes, in both directions. show: is told what goes on.

    Raises `InvalidRequest` for keys and services that prove nothing, `NoWorker` if the service does not answer, or if
    something that was made could not be removed.
    """
    findings: list[LookupProbe] = []
    with parties(url.rstrip("/"), keys) as pair:
        model = pair[0].get("/v1/models")["data"][0]["id"]
        for owner, stranger in (pair, pair[::-1]):
            show(f"listings of tenant {stranger.tenant}")
            before = listings(stranger)
            tried = list(lookups(owner, model))
            differences = [f"{part} changed" for part, _, _ in _unequal(before, listings(stranger))]
            findings.append(LookupProbe("listings", owner.tenant, differences))
            for lookup in sorted(tried, key=lambda lookup: not lookup.timed):
                show(f"{lookup.what} of tenant {owner.tenant}")
                findings.append(probe(owner, stranger, lookup, pairs))
            show(f"put of what tenant {owner.tenant} has")
            findings.append(puts(owner, stranger, model, max(1, pairs // 4)))
            owner.clean()
    return findings
