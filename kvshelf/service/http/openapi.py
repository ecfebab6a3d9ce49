"""Completes the OpenAPI document: request bodies that the routes read as streams, and common responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kvshelf.api import (
    AnswerDelta,
    AnswerList,
    CacheObject,
    CreateCache,
    ErrorEnvelope,
    Estimate,
    LevelList,
    Query,
    RequestObject,
    UpdateCache,
)
from kvshelf.api.batches import CreateBatch
from kvshelf.api.inspect import KeptOf
from kvshelf.api.openai import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest

_READ_BY_ROUTES: list[type[BaseModel]] = [
    AnswerDelta,
    AnswerList,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    CreateBatch,
    CreateCache,
    ErrorEnvelope,
    Estimate,
    KeptOf,
    Query,
    RequestObject,
    UpdateCache,
]

ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "an error, told apart by `code`",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorEnvelope"}}},
    }
}
"""For the `responses` of every route."""

EXISTING: dict[int | str, dict[str, Any]] = {
    200: {"model": CacheObject, "description": "the cache was already on the shelf"}
}
"""For the `responses` of the routes that put a cache on the shelf."""

EXISTING_LEVELS: dict[int | str, dict[str, Any]] = {
    200: {"model": CacheObject | LevelList, "description": "the cache, or every level, was already on the shelf"}
}
"""The same for the route that may put several caches there."""


# Tools differ in whether this schema is that of the whole text or of one event of it: it says what holds of both.
EVENTS: dict[str, Any] = {"text/event-stream": {"schema": {"description": "server-sent events"}}}


def body_of(model: type[BaseModel], *, form: bool = False) -> dict[str, Any]:
    """The `requestBody` of a route. With `form`, a multipart form with the document as `file` will do as well."""
    content: dict[str, Any] = {"application/json": {"schema": _reference(model)}}
    if form:
        fields = {
            name: {"type": "string"} for name in model.model_fields if name not in ("document", "messages", "token_ids")
        }
        fields["file"] = {"type": "string", "format": "binary", "description": "the document: text, PDF or HTML"}
        content["multipart/form-data"] = {"schema": {"type": "object", "properties": fields, "required": ["file"]}}
    return {"requestBody": {"required": True, "content": content}}


def json_or_events(one: type[BaseModel], *more: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The 200 of a route that answers with JSON, or with an event stream where `stream` asks for one."""
    schemas = [_reference(model) for model in (one, *more)]
    content = {
        "application/json": {"schema": schemas[0] if not more else {"anyOf": schemas}},
        **EVENTS,
    }
    return {200: {"description": "the answer", "content": content}}


def query_of(model: type[BaseModel]) -> dict[str, Any]:
    """The `parameters` of a route that reads its query string itself. Labels have any name, and stand in its text."""
    fields = model.model_json_schema()["properties"]
    return {"parameters": [_parameter(name, schema) for name, schema in fields.items() if name != "labels"]}


def _parameter(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    # There is no null in a query string: what may be None is left out.
    plain = next(option for option in schema.get("anyOf", [schema]) if option.get("type") != "null")
    rules = {key: value for key, value in plain.items() if key not in ("title", "description")}
    return {
        "name": name, "in": "query", "required": False, "schema": rules, "description": schema.get("description", "")
    }  # fmt: skip


def install(app: FastAPI) -> None:
    """Make `app.openapi` add the schemas that routes refer to by name."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        _, definitions = models_json_schema(
            [(model, "validation") for model in _READ_BY_ROUTES], ref_template="#/components/schemas/{model}"
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for name, schema in definitions["$defs"].items():
            schemas.setdefault(name, schema)
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend its document


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
