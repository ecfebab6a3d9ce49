"""Completes the OpenAPI document: request bodies that the routes read as streams, and common responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kvshelf.api import AnswerDelta, CacheObject, CreationProgress, ErrorEnvelope
from kvshelf.api.openai import ChatCompletionChunk
from kvshelf.service.http import reference

_NAMED: dict[str, type[BaseModel]] = {
    model.__name__: model for model in (AnswerDelta, ChatCompletionChunk, CreationProgress)
}
"""Models that the document describes although FastAPI does not see them: events, and models given to `_reference`."""

EXISTING: dict[int | str, dict[str, Any]] = {
    200: {"model": CacheObject, "description": "the cache was already on the shelf"}
}
"""The `responses` of routes that store a cache."""

# Some tools read this schema as that of the whole stream, others as that of one event. It is true of both.
EVENTS: dict[str, Any] = {"text/event-stream": {"schema": {"description": "server-sent events"}}}


def body_of(model: type[BaseModel], *, form: bool = False) -> dict[str, Any]:
    """The `requestBody` of a route. form: it may also be a multipart form with the document as `file`."""
    content: dict[str, Any] = {"application/json": {"schema": _reference(model)}}
    if form:
        fields = {
            name: {"type": "string"} for name in model.model_fields if name not in ("document", "messages", "token_ids")
        }
        fields["file"] = {"type": "string", "format": "binary", "description": "the document: text, PDF or HTML"}
        content["multipart/form-data"] = {"schema": {"type": "object", "properties": fields, "required": ["file"]}}
    return {"requestBody": {"required": True, "content": content}}


def errors_of(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The `responses` of routes whose errors have this envelope."""
    content = {"application/json": {"schema": _reference(model)}}
    return {"default": {"description": "an error; `code` identifies its kind", "content": content}}


def json_or_events(one: type[BaseModel], *more: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The 200 of a route that answers with JSON, or with an event stream if that is asked for."""
    schemas = [_reference(model) for model in (one, *more)]
    schema = {"anyOf": schemas} if more else schemas[0]
    return {200: {"description": "the answer", "content": {"application/json": {"schema": schema}, **EVENTS}}}


def query_of(model: type[BaseModel]) -> dict[str, Any]:
    """The `parameters` of a route that parses its query string itself, without labels: callers choose their names."""
    fields = model.model_json_schema()["properties"]
    return {"parameters": [_parameter(name, schema) for name, schema in fields.items() if name != "labels"]}


def _parameter(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    # A query string has no null: a parameter that is None is absent.
    plain = next(option for option in schema.get("anyOf", [schema]) if option.get("type") != "null")
    rules = {key: value for key, value in plain.items() if key not in ("title", "description")}
    return {
        "name": name, "in": "query", "required": False, "schema": rules, "description": schema.get("description", "")
    }  # fmt: skip


def install(app: FastAPI) -> None:
    """Make `app.openapi` add the schemas of `_NAMED`, and serve the document, and the reference at /docs. Both are made
    once, and anyone may ask: they are the same for all callers."""
    generate = app.openapi

    @cache
    def openapi() -> dict[str, Any]:
        document = generate()
        _, definitions = models_json_schema(
            [(model, "validation") for model in _NAMED.values()], ref_template="#/components/schemas/{model}"
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for name, schema in definitions["$defs"].items():
            schemas.setdefault(name, schema)
        return document

    def serve(path: str, media_type: str, make: Callable[[], str]) -> None:
        page = cache(lambda: make().encode())

        async def answer(_: Request) -> Response:
            return Response(await asyncio.to_thread(page), media_type=media_type)

        app.add_route(path, answer, include_in_schema=False)

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend its document
    serve("/openapi.json", "application/json", lambda: json.dumps(openapi(), ensure_ascii=False))
    serve("/docs", "text/html", lambda: reference.page(openapi()))


def _reference(model: type[BaseModel]) -> dict[str, str]:
    _NAMED[model.__name__] = model
    return {"$ref": f"#/components/schemas/{model.__name__}"}


ERRORS = errors_of(ErrorEnvelope)
"""The `responses` of most routes."""
