"""The calls of the API, one function each, which checks arguments, builds the request and types the answer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, cast, overload
from urllib.parse import quote

from pydantic import ValidationError

from kvshelf import api
from kvshelf.api.caches import ExportDtype, ExportTo
from kvshelf.api.inspect import BuiltPrompt, KeptOf, KeptTokens
from kvshelf.api.options import AskFields, ProtectFields
from kvshelf.api.queries import Route
from kvshelf.api.strict import RequestBody, parse_request, refusal
from kvshelf.api.usage import UsageQuery, UsageReport
from kvshelf.client._exchange import HttpCall, parse_as
from kvshelf.errors import InvalidRequest
from kvshelf.names import as_text

MEDIA_TYPES = {".pdf": "application/pdf", ".html": "text/html", ".htm": "text/html", ".xhtml": "application/xhtml+xml"}
"""By the end of a file's name. Not guessed from the system's list of media types, in which .ts is a film."""

Blocks = Sequence[Mapping[str, str | bool]]
"""A text in blocks, `{"text": ..., "protect": True}` for those that every policy keeps, and of a document that is put
also `{"type": "image", "data": ...}`."""
Messages = Sequence[Mapping[str, str | Blocks] | api.Message]
Prompts = list[str]
Answers = list[api.AnswerObject]
Together = list[str]
"""Ids of caches that one question asks together."""
JointAnswers = list[api.JointAnswer]
Levels = list[api.CacheObject]
Level = float | Mapping[str, Any] | api.LevelOptions
Parts = list[api.CacheObject]
No = Literal[False]
SplitOptions = Literal[True] | Mapping[str, Any] | api.SplitOptions
Split = No | SplitOptions
Episodes = Mapping[str, Any] | api.EpisodeOptions


class ReducedFields(TypedDict, total=False):
    """How tokens are reduced, and how their cache is kept; None means absent."""

    policy: str | None
    policy_params: Mapping[str, Any] | None
    compression_ratio: float | None
    budget_tokens: int | None
    expected_questions: Sequence[str] | None
    ttl_s: float | None
    expires_at: float | None
    ttl_renew: bool | None
    labels: Mapping[str, str] | None


class OptionFields(ReducedFields, ProtectFields, total=False):
    """How a document is compressed and kept; None means absent."""

    model: str | None
    adapter: str | None
    layout: str | None
    codec: str | None
    quality: Literal["full", "fast", False] | None
    chat_template_kwargs: Mapping[str, Any] | None
    date: str | None
    keep_source: bool | Literal["tokens"] | None
    source_ttl_s: float | None
    guaranteed_until: float | None


class DocumentFields(TypedDict, total=False):
    """A document, or more of one, and the name of its cache.

    Exactly one of `document`, `messages`, `token_ids` and `file` (the path of text, PDF or HTML) is needed.
    """

    document: str | Blocks | None
    messages: Messages | None
    token_ids: Sequence[int] | None
    tokenizer: str | None
    file: str | os.PathLike[str] | None
    name: str | None


class KeptDocumentFields(OptionFields, DocumentFields, total=False):
    """Which document to keep, and how. `images`: mappings of `at`, a character of `document`, and `data`, a PNG or JPEG
    file in base64; blocks of `document` may be images, too."""

    images: Sequence[Mapping[str, Any]] | None


class CreateFields(KeptDocumentFields, total=False):
    """The keywords of `caches.create`."""

    min_quality: float | None
    max_bytes: int | None
    bytes_per_token: float | None
    certificate: str | None


class LevelFields(CreateFields, total=False):
    """The keywords of `estimate`, and of `caches.create` for several caches at once."""

    levels: Sequence[Level] | None


class WatchFields(LevelFields, total=False):
    """The keywords of `caches.create_events`."""

    split: Split
    episodes: Episodes | None


class AppendFields(ReducedFields, ProtectFields, DocumentFields, total=False):
    """What is appended to a cache, and how it is reduced."""


class UpdateFields(TypedDict, total=False):
    """What `caches.update` changes; absent fields stay. With None as `ttl_s` or `expires_at` a cache never expires.
    A new end ends an earlier renewal.
    `next_use_s` is a hint; None takes it back."""

    ttl_s: float | None
    expires_at: float | None
    ttl_renew: bool
    labels: Mapping[str, str]
    name: str
    pinned: bool
    guaranteed_until: float | None
    next_use_s: float | None


class ImportFields(TypedDict, total=False):
    """The keywords of `caches.import_blob`; None means absent."""

    ttl_s: float | None
    expires_at: float | None
    ttl_renew: bool | None
    name: str | None
    labels: Mapping[str, str] | None


class QuestionFields(AskFields, total=False):
    """How an answer is made: at most `max_tokens` tokens, until one of the `stop` texts. Temperature 0 is greedy.

    `adapter` names the LoRA adapter of the caches, and refuses those of another one or of none.

    `select` is what the answer reads, where it does not read all: `{"method": "quest", "tokens": 256}`; with
    `"passages": True` the answer's `passages` say which tokens of the documents these were.

    `suffix` is what stays in memory of question and answer, where it is not all: `{"policy": "lagkv", "budget": 512}`.

    `response_format`, `grammar` or `choices` is what the answer must be: `{"type": "json_schema", "json_schema":
    {"name": "fact", "schema": {...}}}`, a grammar in llguidance's Lark dialect, or texts of which it is one.

    `logprobs=True` tells how likely each token was, with the `top_logprobs` likeliest beside it. `n` answers are made
    to each prompt of a list.

    `chat_template_kwargs` is what the model's chat template is told (`{"enable_thinking": False}`), and
    `reasoning_effort` how much it thinks first ("none": not at all). Thoughts are the answer's `reasoning_content`.

    `tool` names the tool that the answer calls: while it runs, the caches stay in memory as long as that is worth it.

    `workflow` is the step of a workflow that this is (`{"id": "report", "step": "plan"}`, see `client.workflows`): the
    caches of the steps that follow stay in memory or are read there, if your key has the scope `write`. `program` names
    the program of an agent that asks, for an hour: its questions go before those of programs that came later. Runs of
    one workflow at the same time need a `program` each; without one they count as one run.

    `conversation` is the id of the conversation that this is a turn of: `usage` tells what the shelf saved each one.

    `on_miss="recompute"` makes a cache again from its kept source if it was evicted, has expired, is corrupt, or is of
    another model: the answer then says `recomputed`, and comes as late as a creation. It may raise `SourceNotKept`.

    `store` keeps question and answer behind the cache: the answer's `stored_cache_id` is asked like any cache. It
    expires with the cache that was asked, or after `ttl_s`; with `ttl_renew`, that long after each question.
    """

    max_tokens: int | None
    response_format: Mapping[str, Any] | None
    grammar: str | None
    choices: Sequence[str] | None
    logprobs: bool | None
    top_logprobs: int | None
    n: int | None
    chat_template_kwargs: Mapping[str, Any] | None
    reasoning_effort: str | None
    adapter: str | None
    select: Mapping[str, Any] | api.Select | None
    suffix: Mapping[str, Any] | api.SuffixOptions | None
    tool: str | None
    workflow: Mapping[str, str] | api.AtStep | None
    program: str | None
    conversation: str | None
    on_miss: str | None
    store: bool | None
    ttl_s: float | None
    ttl_renew: bool | None


class JointFields(QuestionFields, total=False):
    """As `QuestionFields`, for several caches. `route`: only the one or two answer that the question is about, by
    "likelihood" or "attention"; "nearest" is for caches of episodes."""

    route: Route | None


class QueryFields(QuestionFields, total=False):
    """As `QuestionFields`, for one cache. `compare` adds the answer of the full cache; it may raise `SourceNotKept`."""

    compare: bool | None


class ListFields(TypedDict, total=False):
    """Which caches to list, and how many to fetch with one request (`limit`)."""

    document_id: str | None
    model: str | None
    policy: str | None
    name: str | None
    id_prefix: str | None
    labels: Mapping[str, str] | None
    parent_id: str | None
    ended: bool | None
    limit: int | None
    after: str | None


@overload
def create_cache(
    *, levels: None = None, split: No = False, respond_async: No = False, **fields: Unpack[CreateFields]
) -> HttpCall[api.CacheObject]: ...
@overload
def create_cache(
    *, levels: None = None, split: SplitOptions, respond_async: No = False, **fields: Unpack[CreateFields]
) -> HttpCall[Parts]: ...
@overload
def create_cache(
    *,
    levels: None = None,
    split: No = False,
    episodes: Episodes,
    respond_async: No = False,
    **fields: Unpack[CreateFields],
) -> HttpCall[Parts]: ...
@overload
def create_cache(
    *, levels: Sequence[Level], min_quality: float, respond_async: No = False, **fields: Unpack[KeptDocumentFields]
) -> HttpCall[api.CacheObject]: ...
@overload
def create_cache(
    *,
    levels: Sequence[Level],
    min_quality: None = None,
    respond_async: No = False,
    **fields: Unpack[KeptDocumentFields],
) -> HttpCall[Levels]: ...
@overload
def create_cache(
    *,
    levels: Sequence[Level] | None = None,
    split: Split = False,
    episodes: Episodes | None = None,
    respond_async: Literal[True],
    **fields: Unpack[CreateFields],
) -> HttpCall[api.RequestObject]: ...
def create_cache(
    *,
    levels: Sequence[Level] | None = None,
    split: Split = False,
    episodes: Episodes | None = None,
    respond_async: bool = False,
    **fields: Unpack[CreateFields],
) -> HttpCall[api.CacheObject] | HttpCall[Levels] | HttpCall[api.RequestObject]:
    """Compress a document and put it on the shelf; a cache that is there already comes back with `existing` true,
    and gets the `labels` and the `name` that are given.

    One of `document` (text), `messages`, `token_ids` and `file` (a path), and as keywords `model`, `adapter` (a LoRA
    adapter of the model), `layout`, `policy`, `policy_params`, `compression_ratio` (the fraction removed) or
    `budget_tokens`, `codec`, `quality` (False: not measured), `ttl_s` or `expires_at`, `ttl_renew` (each question moves
    the end to `ttl_s` from then), `name`, `labels`, and `keep_source` to keep the text (or "tokens", the token ids
    alone) for `source_ttl_s`, so that a query with `on_miss="recompute"` makes the cache again if it is lost.
    `chat_template_kwargs` is what the model's chat template is told ({"reasoning_effort": "low"}), and `date` the day.
    With `respond_async` the request comes back at once, for `client.requests.retrieve`.

    `levels` are several compression ratios at once, or mappings of `compression_ratio` and `codec`, whose caches come
    back in a list, from one prefill. With `min_quality` only the smallest cache that agrees enough with the full one is
    kept, with `max_bytes` or `bytes_per_token` the best one that fits; the policy "auto" chooses policy, ratio and
    codec in the same way, and a `certificate` by its bound. The cache's `tried` lists the attempts.

    `split` makes one cache for each part of a text that is too long, and they come back in a list: True, or a mapping
    of `overlap_tokens` (128) and `max_tokens` of a part. The parts share the labels `document` (the name) and `split`;
    each has a label `part`, such as 2/5. `episodes` ({"count": 4}) makes one cache of the whole document for each
    episode of a conversation, by policy epicache; they share the label `episodes`, and each has a label `episode`.
    `query` with `route="nearest"` asks the one that a question is about.

    Raises `InvalidRequest`, `DocumentTooLong`, `DocumentTooShort`, `PolicyUnsupported`, `QualityBelowFloor`,
    `QueueFull`, ...
    """
    values: dict[str, Any] = {**fields, "levels": levels, "split": split or None, "episodes": episodes}
    body = _document(api.CreateCache, values)
    if respond_async:
        headers = {"prefer": "respond-async"}
        return HttpCall("POST", "/v1/caches", parse_as(api.RequestObject), headers=headers, body=body)
    targets = ("min_quality", "max_bytes", "bytes_per_token", "certificate")
    chooses = any(values.get(name) is not None for name in targets)
    if split or episodes is not None or (levels is not None and not chooses):
        return HttpCall("POST", "/v1/caches", lambda response: parse_as(api.LevelList)(response).data, body=body)
    return HttpCall("POST", "/v1/caches", parse_as(api.CacheObject), body=body)


def creation(fields: WatchFields) -> HttpCall[api.CacheObject | list[api.CacheObject]]:
    """As `create_cache`, where only the fields' values say which of its answers comes."""
    call: HttpCall[api.CacheObject | list[api.CacheObject]] = create_cache(**cast(Any, fields))
    return call


def watched_creation(fields: WatchFields) -> HttpCall[Any]:
    """The creation as a stream of events."""
    return replace(creation(fields), headers={"accept": "text/event-stream"})


def append_cache(id: str, **fields: Unpack[AppendFields]) -> HttpCall[api.CacheObject]:
    """Read more of a document behind its cache, and store the cache of all as a new one; only what is new is prefilled.

    One of `document` (a text, which goes on where the document ends), `messages` (whole turns), `token_ids` and `file`
    (a path), and as keywords `policy`, `policy_params`, `compression_ratio` or `budget_tokens` and `protect`, which are
    of what is appended alone, `ttl_s` or `expires_at`, `name` and `labels`. By default policy, ratio and expiry are
    those of the cache `id`.

    Raises `CacheNotFound`, `CacheExpired`, `ModelMismatch`, `DocumentTooLong`, `PolicyUnsupported`, ...
    """
    body = _document(api.AppendCache, fields)
    return HttpCall("POST", _cache_path(id) + "/append", parse_as(api.CacheObject), body=body)


def remake_cache(id: str, *, model: str | None = None) -> HttpCall[api.CacheObject]:
    """Make a cache of the same document under another served model (by default the first), from the kept source, with
    the same name, labels, policy, codec and lifetime. The cache `id` stays; one of that model comes back itself, with
    `existing` true. Raises `SourceNotKept`, `ModelMismatch` for token ids of another tokenizer, `CacheNotFound`, ..."""
    body = {"json": checked(api.RemakeCache, {"model": model})}
    return HttpCall("POST", _cache_path(id) + "/remake", parse_as(api.CacheObject), body=body)


def retrieve_cache(id: str) -> HttpCall[api.CacheObject]:
    """The record of one cache. Raises `CacheNotFound` or `CacheExpired`."""
    return HttpCall("GET", _cache_path(id), parse_as(api.CacheObject))


def list_turns(id: str) -> HttpCall[list[api.StoredTurn]]:
    """The caches that one grew from by appends and stored turns, the oldest first and itself last. Raises as
    `retrieve`."""
    return HttpCall("GET", _cache_path(id) + "/turns", lambda response: parse_as(api.TurnList)(response).data)


def list_caches(**fields: Unpack[ListFields]) -> HttpCall[api.CacheList]:
    """All caches that match every filter, fetched `limit` at a time as they are read.

    The filters are `document_id`, `model`, `policy`, `name`, `id_prefix`, `labels`, and `parent_id` for the caches that
    extend one. `ended` lists those that have expired or were evicted, and whose source is kept. `after` is the id of
    the cache before the first one.
    """
    return HttpCall("GET", "/v1/caches", parse_as(api.CacheList), params=query_string(api.ListCaches, fields))


def update_cache(id: str, **fields: Unpack[UpdateFields]) -> HttpCall[api.CacheObject]:
    """Change `ttl_s` (with `ttl_renew`) or `expires_at` (None: it never expires), `labels` (as a whole), `name`,
    `pinned` or `guaranteed_until` (None takes it back).

    Absent fields stay. A pinned cache is never evicted, a guaranteed one not before that time. `next_use_s` says in how
    many seconds the next question comes: replicas keep the cache in memory for it, or read it before. Raises
    `InvalidRequest`, `CacheNotFound`, `CacheExpired`, `QuotaExceeded` for a pin or promise beyond the budget, and with
    `next_use_s` also `ModelMismatch`.
    """
    body = {"json": _as_json(api.UpdateCache, fields)}
    return HttpCall("PATCH", _cache_path(id), parse_as(api.CacheObject), body=body)


def warm_caches(
    ids: Sequence[str] = (),
    *,
    labels: Mapping[str, str] | None = None,
    model: str | None = None,
    replicas: Literal["all"] = "all",
) -> HttpCall[list[api.WarmedReplica]]:
    """Have caches in the memory of every replica before their questions come: those with these ids, or those that have
    all `labels`, with `model` of the model that has this name. Says of each replica how many bytes it has and read.

    Raises `InvalidRequest` for what does not fit, before anything is read, and for caches of several models;
    `CacheNotFound`, `CacheExpired`, `ModelMismatch`.
    """
    fields = {"cache_ids": list(ids), "labels": labels, "model": model, "replicas": replicas}
    body = {"json": checked(api.WarmCaches, fields)}
    return HttpCall("POST", "/v1/caches/warm", lambda response: parse_as(api.WarmedCaches)(response).data, body=body)


def delete_cache(id: str, cascade: bool = False) -> HttpCall[api.Deleted]:
    """Delete one cache, with `cascade` also those that extend it. Raises `CacheNotFound`, `CacheHasChildren`."""
    params = {"cascade": "true"} if cascade else {}
    return HttpCall("DELETE", _cache_path(id), parse_as(api.Deleted), params=params, repeatable=False)


def download_cache(id: str, *, about: bool = False) -> HttpCall[bytes]:
    """The blob of one cache, for `CompressedCache.from_bytes`, which checks every digest in it. With `about` it is an
    export: `import_blob` then gives the cache its name, labels, quality and kept source, too."""
    params = {"about": "true"} if about else {}
    return HttpCall("GET", _cache_path(id) + "/blob", lambda response: response.content, params=params)


def export_cache(
    id: str, to: ExportTo, *, dtype: ExportDtype | None = None, engine_model: str | None = None
) -> HttpCall[bytes]:
    """One cache as a file of another engine, `llama.cpp` or `mlx`, which then answers questions to its document.

    dtype: of the numbers, by default float16 for llama.cpp and the model's for MLX. engine_model: what `mlx_lm` is told
    as its model, by default the model's name here. Raises `PolicyUnsupported` for a cache that the engine cannot hold
    and for a model that was not compared with the engine's, `InvalidRequest` for numbers that the dtype does not hold.
    """
    params = {"to": to, "dtype": dtype, "engine_model": engine_model}
    return HttpCall("GET", _cache_path(id) + "/export", lambda response: response.content, params=params)


def import_blob(blob: bytes, **fields: Unpack[ImportFields]) -> HttpCall[api.CacheObject]:
    """Put the blob of a cache, as `download` gives it, on the shelf of this service. It keeps its codec; from an export
    also its name, labels, quality and source, where `name` and `labels` say nothing else.

    `ttl_s` or `expires_at`, `name`, `labels` as in `create`, also of a cache that is there already, which comes back
    with `existing` true. Raises `CacheCorrupt` for bytes that are not a sound blob, `ModelMismatch` for a cache of a
    model that the service does not run, `StateConflict` for an export with the source of another document,
    `BodyTooLarge`, `QuotaExceeded`, `StorageFull`.
    """
    if not isinstance(blob, bytes):
        raise InvalidRequest(f"a blob is bytes, not {type(blob).__name__}", param="blob")
    headers = {"content-type": "application/octet-stream"}
    params = query_string(api.ImportCache, fields)
    path = "/v1/caches/import"
    return HttpCall("POST", path, parse_as(api.CacheObject), params=params, headers=headers, body={"content": blob})


def verify_cache(id: str) -> HttpCall[api.Verification]:
    """Have the service read a whole stored cache and check every digest. Raises `CacheNotFound`, `CacheExpired`.

    A corrupt cache raises nothing: `ok` of the answer is false.
    """
    return HttpCall("POST", _cache_path(id) + "/verify", parse_as(api.Verification))


def kept_tokens(id: str, document: str | None = None, *, first_layer: int = 0) -> HttpCall[KeptTokens]:
    """Which tokens of its document a cache kept, by layer and head; `document` is its text where no source was kept.

    If one answer does not hold all layers, ask for the rest with `first_layer=answer.next_layer`. Raises
    `SourceNotKept`, `StateConflict` for a text that is not the cache's document, `ModelMismatch`, `CacheNotFound`, ...
    """
    path, params = _cache_path(id) + "/kept", {"first_layer": first_layer}
    if document is None:
        return HttpCall("GET", path, parse_as(KeptTokens), params=params)
    body = {"json": checked(KeptOf, {"document": document})}
    return HttpCall("POST", path, parse_as(KeptTokens), params=params, body=body)


def built_prompt(id: str, prompt: str | None = None, *, messages: Messages | None = None) -> HttpCall[BuiltPrompt]:
    """The prompt that this question to a cache builds, token by token, and which of it is on the shelf. Nothing is
    answered. The document's tokens are listed where its source is kept."""
    body = {"json": checked(api.Query, {"prompt": prompt, "messages": messages})}
    return HttpCall("POST", _cache_path(id) + "/prompt", parse_as(BuiltPrompt), body=body)


@overload
def query_cache(id: str, prompt: str, **fields: Unpack[QueryFields]) -> HttpCall[api.AnswerObject]: ...
@overload
def query_cache(id: str, prompt: Prompts, **fields: Unpack[QueryFields]) -> HttpCall[Answers]: ...
@overload
def query_cache(id: str, *, messages: Messages, **fields: Unpack[QueryFields]) -> HttpCall[api.AnswerObject]: ...
@overload
def query_cache(id: Together, prompt: str, **fields: Unpack[JointFields]) -> HttpCall[api.JointAnswer]: ...
@overload
def query_cache(id: Together, prompt: Prompts, **fields: Unpack[JointFields]) -> HttpCall[JointAnswers]: ...
@overload
def query_cache(id: Together, *, messages: Messages, **fields: Unpack[JointFields]) -> HttpCall[api.JointAnswer]: ...
def query_cache(
    id: str | Together,
    prompt: str | Prompts | None = None,
    *,
    messages: Messages | None = None,
    **fields: Any,  # of one of the forms above
) -> HttpCall[api.AnswerObject] | HttpCall[Answers] | HttpCall[api.JointAnswer] | HttpCall[JointAnswers]:
    """Ask one question, several independent ones (a list), or continue with chat `messages`.

    A list of questions has a list of answers in the same order, with `n` as many to each. A list of up to 64 ids asks
    these caches together: each question sees all documents, and the answer's `sources` say what part each had.
    Keywords: `max_tokens`, `temperature`, `top_p`, `seed`, `stop`, `response_format`, `grammar`, `choices`, `logprobs`,
    `top_logprobs`, `n`, `chat_template_kwargs`, `reasoning_effort`, `select`, `suffix`, `tool`, `workflow`, `program`,
    `on_miss`; for one cache `store`, `ttl_s` and `compare`; for several `route`. Raises `CacheNotFound`,
    `CacheExpired`, `CacheCorrupt`, `ModelMismatch`, `SourceNotKept`, ...
    """
    path, body = _question(id, {**fields, "prompt": prompt, "messages": messages})
    several = isinstance(prompt, list | tuple)
    if (fields.get("n") or 1) > 1 and not several:
        raise InvalidRequest("n answers are a list; give the prompts as a list, too", param="n")
    if isinstance(id, str) and several:
        return HttpCall("POST", path, lambda response: parse_as(api.AnswerList)(response).data, body=body)
    if isinstance(id, str):
        return HttpCall("POST", path, parse_as(api.AnswerObject), body=body)
    if several:
        return HttpCall("POST", path, lambda response: parse_as(api.JointAnswerList)(response).data, body=body)
    return HttpCall("POST", path, parse_as(api.JointAnswer), body=body)


@overload
def stream_query(
    id: str, prompt: str | None = None, *, messages: Messages | None = None, **fields: Unpack[QueryFields]
) -> HttpCall[type[api.AnswerObject]]: ...
@overload
def stream_query(
    id: Together, prompt: str | None = None, *, messages: Messages | None = None, **fields: Unpack[JointFields]
) -> HttpCall[type[api.JointAnswer]]: ...
def stream_query(
    id: str | Together, prompt: str | None = None, *, messages: Messages | None = None, **fields: Any
) -> HttpCall[type[api.AnswerObject]] | HttpCall[type[api.JointAnswer]]:
    """As `query`, with the text as it is generated. The question is on its way when the call returns its stream."""
    path, body = _question(id, {**fields, "prompt": prompt, "messages": messages, "stream": True})
    if isinstance(id, str):
        return HttpCall("POST", path, lambda _: api.AnswerObject, body=body)  # what ends the stream
    return HttpCall("POST", path, lambda _: api.JointAnswer, body=body)


def _question(id: str | Together, fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The path and the body of a question to one cache, or to several together."""
    if isinstance(id, list | tuple):
        return "/v1/query", {"json": checked(api.JointQuery, {**fields, "cache_ids": id})}
    return _cache_path(id) + "/query", {"json": checked(api.Query, fields)}


class SearchFields(TypedDict, total=False):
    """What a search is narrowed to, and the most documents that it names (5, at most 64); None means absent."""

    labels: Mapping[str, str] | None
    model: str | None
    limit: int | None


def search_caches(query: str, **fields: Unpack[SearchFields]) -> HttpCall[api.SearchList]:
    """Which documents hold most of a question's words, the best first, each by its newest cache; `query` asks those
    together. `labels`: only caches that have all of them; `model`: whose caches; `limit`: most documents to name.

    Raises `InvalidRequest`, `PolicyUnsupported` for a model whose caches have no summaries, `QueueFull`, ...
    """
    body = {"json": checked(api.SearchCaches, {**fields, "query": query})}
    return HttpCall("POST", "/v1/caches/search", parse_as(api.SearchList), body=body)


def retrieve_request(id: str, *, wait_s: float | None = None) -> HttpCall[api.RequestObject]:
    """The state of a creation in the background. Raises `RequestNotFound`.

    With `wait_s` the service answers when the state is final, or after that many seconds.
    """
    path = "/v1/requests/" + quoted(id)
    return HttpCall("GET", path, parse_as(api.RequestObject), params={"wait_s": wait_s}, extra_read_s=wait_s or 0.0)


def estimate(**fields: Unpack[LevelFields]) -> HttpCall[api.EstimateObject]:
    """What `caches.create` with these arguments would take in tokens, bytes and seconds; nothing is compressed.

    Without `policy` the answer covers every policy, without `codec` all codecs; with `levels` each of them, and
    with the policy "auto" each combination that it would try. Raises as `caches.create` does.
    """
    values = dict(fields)
    if (path := values.pop("file", None)) is not None:
        _require_no_document(values)
        values["document"] = _text(Path(str(path)))
    body = {"json": checked(api.Estimate, values)}
    return HttpCall("POST", "/v1/estimate", parse_as(api.EstimateObject), body=body)


class UsageFields(TypedDict, total=False):
    """Days of UTC as `datetime.date` or text (2026-01-31), both included, and the groups; None means absent."""

    from_: date | str | None
    to: date | str | None
    group_by: str | Sequence[str] | None
    all_tenants: bool | None
    label: str | None
    cost: bool | None


def usage(**fields: Unpack[UsageFields]) -> HttpCall[UsageReport]:
    """What your tenant has used, and what it stores now; by default of the last 30 days, in one row.

    `group_by` is any of "day", "model", "tenant", "conversation" and "guard_group", one or several.
    `all_tenants` needs a key with the scope `admin`. `label` adds up the caches on the shelf by the values of a
    label; `cost` says all of it in money, by the prices of the service.
    Raises `InvalidRequest`, `Forbidden`.
    """
    values: dict[str, Any] = dict(fields)
    values["from"] = values.pop("from_", None)
    if (group_by := values.get("group_by")) is not None and not isinstance(group_by, str):
        values["group_by"] = ",".join(group_by)
    return HttpCall("GET", "/v1/usage", parse_as(UsageReport), params=query_string(UsageQuery, values))


def limits() -> HttpCall[api.Limits]:
    """The limits of one request, those of your tenant, and the scopes of your key."""
    return HttpCall("GET", "/v1/limits", parse_as(api.Limits))


def list_models() -> HttpCall[list[api.ModelObject]]:
    """The models this service answers for; the first one is the default."""
    return HttpCall("GET", "/v1/models", lambda response: parse_as(api.ModelList)(response).data)


def list_selectors() -> HttpCall[list[api.SelectorObject]]:
    """The selectors, each with its parameters and its source."""
    return HttpCall("GET", "/v1/selectors", lambda response: parse_as(api.SelectorList)(response).data)


def list_suffix_policies() -> HttpCall[list[api.SuffixPolicyObject]]:
    """The suffix policies, each with its parameters and its source."""
    return HttpCall("GET", "/v1/suffix_policies", lambda response: parse_as(api.SuffixPolicyList)(response).data)


def list_policies() -> HttpCall[list[api.PolicyObject]]:
    """The compression policies, each with its parameters and its source."""
    return HttpCall("GET", "/v1/policies", lambda response: parse_as(api.PolicyList)(response).data)


def readiness() -> HttpCall[api.Readiness]:
    """Whether the service can work, part by part. A degraded service answers too; nothing is raised."""
    return HttpCall("GET", "/readyz", parse_as(api.Readiness), accepts=frozenset({503}))


def _cache_path(id: str) -> str:
    return "/v1/caches/" + quoted(id)


def quoted(id: str) -> str:
    # With an empty id the path of one cache would be the path of the list of caches.
    if not isinstance(id, str) or not id:
        raise InvalidRequest(f"{id!r} is not an id; ids look like kvs_... or req_...", param="id")
    return quote(id, safe="")


def checked(model: type[RequestBody], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a request, without fields that are None. Raises `InvalidRequest` before anything is sent."""
    return _as_json(model, {key: value for key, value in fields.items() if value is not None})


def _as_json(model: type[RequestBody], fields: Mapping[str, Any]) -> dict[str, Any]:
    """As `checked`, with fields that are None."""
    try:
        text = json.dumps(dict(fields), default=_plain)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from error
    return parse_request(model, text.encode()).model_dump(mode="json", exclude_unset=True)


def query_string(model: type[api.QueryString], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a query string without those that are None. Raises `InvalidRequest` before anything is sent."""
    try:
        query = model.model_validate({key: value for key, value in fields.items() if value is not None})
    except ValidationError as error:
        raise refusal(error) from error
    params = query.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"labels"})
    return params | {f"label.{key}": value for key, value in query.labels.items()}


def _plain(value: Any) -> Any:
    """API types, and mappings and sequences other than dict and list, as plain JSON values."""
    if isinstance(value, RequestBody):
        return value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no JSON type")


def _document(model: type[RequestBody], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a request with a document: JSON, or with `file` a form of the file, texts, and others as JSON."""
    fields = dict(fields)
    if (file := fields.pop("file", None)) is None:
        return {"json": checked(model, fields)}
    path = Path(str(file))
    data = _read(path)
    _require_no_document(fields)
    # The bytes stand in for the document, so that the other fields are checked by the same rules.
    values = checked(model, {**fields, "document": "file"})
    form = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    del form["document"]
    return {
        "files": {"file": (as_text(path.name), data, MEDIA_TYPES.get(path.suffix.lower(), "text/plain"))},
        "data": form,
    }


def _require_no_document(fields: Mapping[str, Any]) -> None:
    if fields.get("document") is not None:
        raise InvalidRequest("file and document are both given; give one of them", param="file")


def _text(path: Path) -> str:
    try:
        return _read(path).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{as_text(path)}: byte {error.start} is not valid UTF-8", param="file") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"cannot read {as_text(path)}: {error.strerror}", param="file") from error
