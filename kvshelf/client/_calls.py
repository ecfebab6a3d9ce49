"""The calls of the API, one function each: its arguments checked, its request built, its answer named.

Nothing here talks to the network. The functions are the clients' methods: `Client.caches.retrieve` and
`AsyncClient.caches.retrieve` both are `retrieve_cache`, sent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from kvshelf import api
from kvshelf.api.inspect import KeptOf, KeptTokens
from kvshelf.api.strict import RequestBody, parse_request, refusal
from kvshelf.client._exchange import Call, parse_as
from kvshelf.errors import InvalidRequest

# Guessed from no list of the system's: there .ts is a film.
_MEDIA_TYPES = {".pdf": "application/pdf", ".html": "text/html", ".htm": "text/html", ".xhtml": "application/xhtml+xml"}

Messages = Sequence[Mapping[str, str] | api.Message]
Prompts = list[str]
Answers = list[api.AnswerObject]
Levels = list[api.CacheObject]


class OptionFields(TypedDict, total=False):
    """How documents are kept; None is as good as absent."""

    model: str | None
    layout: str | None
    policy: str | None
    policy_params: Mapping[str, Any] | None
    compression_ratio: float | None
    budget_tokens: int | None
    codec: str | None
    expected_questions: Sequence[str] | None
    ttl_s: float | None
    expires_at: float | None
    labels: Mapping[str, str] | None
    keep_source: bool | None


class KeepFields(OptionFields, total=False):
    """Which document to keep, and how.

    Exactly one of `document`, `messages`, `token_ids` and `file` (the path of text, PDF or HTML) is
    needed.
    """

    document: str | None
    messages: Messages | None
    token_ids: Sequence[int] | None
    tokenizer: str | None
    file: str | os.PathLike[str] | None
    name: str | None


class CreateFields(KeepFields, total=False):
    """What `caches.create` takes."""

    min_quality: float | None


class LevelFields(CreateFields, total=False):
    """What `estimate` takes, and `caches.create` for several caches at once."""

    levels: Sequence[float] | None


class UpdateFields(TypedDict, total=False):
    """What `caches.update` changes; what is absent stays. None as `ttl_s` or `expires_at`: the cache never expires."""

    ttl_s: float | None
    expires_at: float | None
    labels: Mapping[str, str]
    name: str
    pinned: bool


class ImportFields(TypedDict, total=False):
    """What `caches.import_blob` takes beside the blob; None is as good as absent."""

    ttl_s: float | None
    expires_at: float | None
    name: str | None
    labels: Mapping[str, str] | None


class QueryFields(TypedDict, total=False):
    """How an answer is made: at most `max_tokens` tokens, until one of the `stop` texts. Temperature 0 is greedy.

    `compare`: what the full cache answers comes with it. `on_miss="recompute"`: a cache that is corrupt or of another
    model is made again from its kept source. Both may raise `SourceNotKept`.
    """

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    compare: bool | None
    on_miss: str | None


class ListFields(TypedDict, total=False):
    """Which caches to list, and how many to fetch with one request (`limit`)."""

    document_id: str | None
    model: str | None
    policy: str | None
    labels: Mapping[str, str] | None
    limit: int | None
    after: str | None


def create_cache(fields: LevelFields) -> Call[api.CacheObject | Levels]:
    """Levels without a floor have a cache each, in their order; all else has one."""
    given = dict(fields)
    several = given.get("levels") is not None and given.get("min_quality") is None
    parse = _levels if several else parse_as(api.CacheObject)
    if (path := given.pop("file", None)) is None:
        return Call("POST", "/v1/caches", parse, body={"json": checked(api.CreateCache, given)})
    return Call("POST", "/v1/caches", parse, body=_upload(Path(str(path)), given))


def create_in_background(fields: LevelFields) -> Call[api.RequestObject]:
    call = create_cache(fields)
    headers = {"prefer": "respond-async"}
    return Call(call.method, call.path, parse_as(api.RequestObject), headers=headers, body=call.body)


def retrieve_cache(id: str) -> Call[api.CacheObject]:
    """The record of one cache. Raises `CacheNotFound` or `CacheExpired`."""
    return Call("GET", _cache_path(id), parse_as(api.CacheObject))


def list_caches(fields: ListFields) -> Call[api.CacheList]:
    return Call("GET", "/v1/caches", parse_as(api.CacheList), params=query_string(api.ListCaches, fields))


def update_cache(id: str, **fields: Unpack[UpdateFields]) -> Call[api.CacheObject]:
    """Change `ttl_s` or `expires_at` (None: it never expires), `labels` (as a whole), `name` or `pinned`.

    What is not given stays as it is. A pinned cache is never evicted to make room. Raises `InvalidRequest`,
    `CacheNotFound`, `CacheExpired`.
    """
    body = {"json": _as_json(api.UpdateCache, fields)}
    return Call("PATCH", _cache_path(id), parse_as(api.CacheObject), body=body)


def delete_cache(id: str) -> Call[api.Deleted]:
    """Delete one cache. Raises `CacheNotFound`."""
    return Call("DELETE", _cache_path(id), parse_as(api.Deleted), repeatable=False)


def download_cache(id: str) -> Call[bytes]:
    """The blob of one cache, for `CompressedCache.from_bytes`, which checks every digest in it."""
    return Call("GET", _cache_path(id) + "/blob", _content)


def import_blob(blob: bytes, **fields: Unpack[ImportFields]) -> Call[api.CacheObject]:
    """Put the blob of a cache, as `download` gives it, on the shelf of this service. It keeps its codec.

    `ttl_s` or `expires_at`, `name`, `labels` as in `create`; a cache that is there already comes back with `existing`
    true. Raises `CacheCorrupt` for bytes that are no sound blob, `ModelMismatch` for a cache of a model that the
    service does not run, `BodyTooLarge`, `QuotaExceeded`, `StorageFull`.
    """
    if not isinstance(blob, bytes):
        raise InvalidRequest(f"a blob is bytes, not {type(blob).__name__}", param="blob")
    headers = {"content-type": "application/octet-stream"}
    params = query_string(api.ImportCache, fields)
    path = "/v1/caches/import"
    return Call("POST", path, parse_as(api.CacheObject), params=params, headers=headers, body={"content": blob})


def verify_cache(id: str) -> Call[api.Verification]:
    """Have the service read a stored cache to its end and check every digest. Raises `CacheNotFound`, `CacheExpired`;
    that it is corrupt is no error but an answer, whose `ok` is false.
    """
    return Call("POST", _cache_path(id) + "/verify", parse_as(api.Verification))


def kept_tokens(id: str, document: str | None = None, *, first_layer: int = 0) -> Call[KeptTokens]:
    """Which tokens of its document a cache kept, by layer and head; `document` is its text where no source was kept.

    What one answer does not hold is asked for with `first_layer=answer.next_layer`. Raises `SourceNotKept`,
    `StateConflict` for a text that is not the cache's document, `ModelMismatch`, `CacheNotFound`, ...
    """
    path, params = _cache_path(id) + "/kept", {"first_layer": first_layer}
    if document is None:
        return Call("GET", path, parse_as(KeptTokens), params=params)
    body = {"json": checked(KeptOf, {"document": document})}
    return Call("POST", path, parse_as(KeptTokens), params=params, body=body)


def query_cache(id: str, fields: Mapping[str, Any]) -> Call[api.AnswerObject | Answers]:
    """One prompt, or messages, has one answer; a list of prompts has as many, in the same order."""
    several = isinstance(fields.get("prompt"), list | tuple)
    parse = _answers if several else parse_as(api.AnswerObject)
    return Call("POST", _cache_path(id) + "/query", parse, body={"json": checked(api.Query, fields)})


def stream_query(id: str, fields: Mapping[str, Any]) -> Call[None]:
    """The answer is an event stream, which `_stream.AnswerReader` reads."""
    body = {"json": checked(api.Query, {**fields, "stream": True})}
    return Call("POST", _cache_path(id) + "/query", lambda _: None, body=body)


def retrieve_request(id: str, *, wait_s: float | None = None) -> Call[api.RequestObject]:
    """The state of a creation in the background. With `wait_s` the service answers when the state is final, or after
    that many seconds. Raises `RequestNotFound`.
    """
    path = "/v1/requests/" + quoted(id)
    return Call("GET", path, parse_as(api.RequestObject), params={"wait_s": wait_s}, extra_read_s=wait_s or 0.0)


def estimate(**fields: Unpack[LevelFields]) -> Call[api.EstimateObject]:
    """What `caches.create` with these arguments would take in tokens, bytes and seconds; nothing is compressed.

    Without `policy` every policy is told, without `codec` the five codecs; with `levels` each of them, and with the
    policy "auto" each way that it would try. Raises as `caches.create` does.
    """
    given = dict(fields)
    if (path := given.pop("file", None)) is not None:
        _require_no_document(given)
        given["document"] = _text(Path(str(path)))
    body = {"json": checked(api.Estimate, given)}
    return Call("POST", "/v1/estimate", parse_as(api.EstimateObject), body=body)


def list_models() -> Call[list[api.ModelObject]]:
    """The models this service answers for; the first one is the default."""
    return Call("GET", "/v1/models", lambda response: parse_as(api.ModelList)(response).data)


def list_policies() -> Call[list[api.PolicyObject]]:
    """The compression policies, each with its parameters and its source."""
    return Call("GET", "/v1/policies", lambda response: parse_as(api.PolicyList)(response).data)


def readiness() -> Call[api.Readiness]:
    """Whether the service can work, part by part. A service that is degraded answers too; it does not raise."""
    return Call("GET", "/readyz", parse_as(api.Readiness), accepts=frozenset({503}))


def _cache_path(id: str) -> str:
    return "/v1/caches/" + quoted(id)


def quoted(id: str) -> str:
    # An empty id would turn "this cache" into "the list of caches".
    if not isinstance(id, str) or not id:
        raise InvalidRequest(f"{id!r} is not an id; ids look like kvs_... or req_...", param="id")
    return quote(id, safe="")


def checked(model: type[RequestBody], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a request, only with what was given. Raises `InvalidRequest` before anything is sent."""
    return _as_json(model, {key: value for key, value in fields.items() if value is not None})


def _as_json(model: type[RequestBody], fields: Mapping[str, Any]) -> dict[str, Any]:
    """As `checked`, where None says something."""
    try:
        text = json.dumps(dict(fields), default=_plain)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from error
    return parse_request(model, text.encode()).model_dump(mode="json", exclude_unset=True)


def query_string(model: type[api.QueryString], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a query string, only with what was given. Raises `InvalidRequest` before anything is sent."""
    try:
        query = model.model_validate({key: value for key, value in fields.items() if value is not None})
    except ValidationError as error:
        raise refusal(error) from error
    params = query.model_dump(exclude_unset=True, exclude={"labels"})
    return params | {f"label.{key}": value for key, value in query.labels.items()}


def _plain(value: Any) -> Any:
    """JSON's view of what callers have at hand: API types, other mappings, other sequences."""
    if isinstance(value, api.Message):
        return value.model_dump()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no JSON type")


def _upload(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A multipart body: the file as it is, text fields as text, all others as JSON."""
    data = _read(path)
    _require_no_document(fields)
    # The bytes stand in for the document, so that the other fields are checked by the same rules.
    given = checked(api.CreateCache, {**fields, "document": "file"})
    form = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
    del form["document"]
    return {"files": {"file": (path.name, data, _MEDIA_TYPES.get(path.suffix.lower(), "text/plain"))}, "data": form}


def _require_no_document(fields: Mapping[str, Any]) -> None:
    if fields.get("document") is not None:
        raise InvalidRequest("file and document are both given; give one of them", param="file")


def _text(path: Path) -> str:
    try:
        return _read(path).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path}: byte {error.start} is not valid UTF-8", param="file") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", param="file") from error


def _content(response: httpx.Response) -> bytes:
    return response.content


def _levels(response: httpx.Response) -> Levels:
    return parse_as(api.LevelList)(response).data


def _answers(response: httpx.Response) -> Answers:
    return parse_as(api.AnswerList)(response).data
