"""Bodies are parsed, and answers that may be long are made and written, beside the event loop."""

from __future__ import annotations

import ast
import asyncio
import json
import pkgutil
import threading
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from fastapi import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, field_validator

from kvshelf.api.strict import RequestBody
from kvshelf.service import routes
from kvshelf.service.http.parsing import LARGE_BYTES, SMALL_BYTES, Parser
from kvshelf.service.settings import Settings
from kvshelf.workers.replica.calls import Computing

SHORT = {
    "BatchObject",  # 16 pairs of metadata, 100 errors
    "EstimateObject",  # of each policy
    "Limits",
    "ModelList",
    "ModelObject",  # of the models that it is linked to, some digests
    "PolicyList",
    "SearchList",  # 100 hits of 300 bytes
    "SelectorList",
    "SuffixPolicyList",
}
"""Answers with lists whose length is bounded, and which take a millisecond."""


class Noting(RequestBody):
    """Knows on which thread it was validated."""

    text: str

    @field_validator("text")
    @classmethod
    def _on(cls, _text: str) -> str:
        return threading.current_thread().name


@pytest.mark.parametrize(
    ("length", "thread"),
    [(SMALL_BYTES // 2, "MainThread"), (2 * SMALL_BYTES, "computing"), (LARGE_BYTES - 20, "computing")],
)
def test_a_body_that_takes_a_while_is_parsed_beside_the_loop(length: int, thread: str) -> None:
    body = json.dumps({"text": "x" * length}).encode()
    found = asyncio.run(Parser(Settings(), Computing()).parsed(Noting, body, "acme"))
    assert found.text.startswith(thread)


def _is_long(model: Any) -> bool:
    """Whether an answer has a list or an object in it that the type does not bound."""
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return False
    told = json.dumps(model.model_json_schema())
    return '"type": "array"' in told or "additionalProperties" in told


def _routes() -> list[APIRoute]:
    modules = [import_module(f"{routes.__name__}.{found.name}") for found in pkgutil.iter_modules(routes.__path__)]
    return [route for module in modules for route in module.router.routes if isinstance(route, APIRoute)]


@pytest.mark.parametrize("route", _routes(), ids=lambda route: f"{min(route.methods)} {route.path}")
def test_an_answer_that_may_be_long_is_written_beside_the_loop(route: APIRoute) -> None:
    """What a route gives as a model, FastAPI writes on the loop. A list of 1,000 caches takes 50 ms."""
    answer = get_type_hints(route.endpoint)["return"]
    if answer is not Response and answer.__name__ not in SHORT:
        assert not _is_long(answer), f"{answer.__name__}: return `written` of it from `service.computing`"


def test_no_answer_waits_behind_a_store_that_hangs() -> None:
    """A tenant has one thread of `Service.computing`: what reads the store there would hold up all its answers."""
    calls = [
        node
        for path in Path(routes.__path__[0]).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("computing.run")
    ]
    assert len(calls) > 10
    assert [ast.unparse(call) for call in calls if any("store" in ast.unparse(part) for part in call.args)] == []
