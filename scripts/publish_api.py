"""Write docs/api.md from the OpenAPI document of the service: `python scripts/publish_api.py`. A test compares them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opentelemetry.trace import NoOpTracer

from kvshelf.errors import Cancelled, ConnectionFailed, MissingExtra, by_code
from kvshelf.service.app import create_app
from kvshelf.service.settings import Settings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"

HEAD = """# HTTP API

`scripts/publish_api.py` makes this page from the service's OpenAPI document (`GET /openapi.json`). Bodies are JSON in
UTF-8; unknown fields are refused. Times are Unix seconds, sizes bytes; durations carry `_s` or `_ms`. Every response
has an `x-request-id`. An error is `{"error": {"message", "type", "param", "code"}}`, with `miss_reason` and `details`
if they apply. Its `code` is one of these:

"""

NEVER_SENT = (Cancelled, ConnectionFailed, MissingExtra)
"""Errors of the caller's own process."""


def document() -> dict[str, Any]:
    """The OpenAPI document. No route is called, so neither a store nor workers are needed."""
    return create_app(Settings(), {}, None, NoOpTracer(), None).openapi()  # type: ignore[arg-type]


def page(api: dict[str, Any]) -> str:
    """The page, as Markdown."""
    used: dict[str, None] = {}
    routes = [
        part
        for path, operations in api["paths"].items()
        for method, operation in operations.items()
        for part in _route(method, path, operation, used)
    ]
    return HEAD + codes() + "\n".join([*routes, *_types(api["components"]["schemas"], used)]).rstrip() + "\n"


def codes() -> str:
    """The table of error codes, by status."""
    found: dict[int, list[str]] = {}
    for code, cls in by_code().items():
        if not issubclass(cls, NEVER_SENT):
            found.setdefault(cls.status, []).append(f"`{code}`")
    rows = [f"| {status} | {', '.join(sorted(names))} |" for status, names in sorted(found.items())]
    return "\n".join(["| status | `code` |", "|---|---|", *rows]) + "\n\n"


def _route(method: str, path: str, operation: dict[str, Any], used: dict[str, None]) -> Iterator[str]:
    yield f"## {method.upper()} {path}\n\n{operation['description']}\n"
    if parameters := operation.get("parameters"):
        yield "| parameter | in | what it is |\n|---|---|---|"
        for found in parameters:
            about = _about(found["schema"] | {"description": found.get("description", "")}, used)
            yield f"| `{found['name']}` | {found['in']} | {about} |"
        yield ""
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"Body, `{media_type}`: {_kind(content['schema'], used)}\n"
    for status, response in sorted(operation["responses"].items()):
        kinds = [_kind(content.get("schema", {}), used) for content in response.get("content", {}).values()]
        yield f"- {status}: {response['description']}" + (f" ({', or '.join(kinds)})" if kinds else "")
    yield ""


def _types(schemas: dict[str, Any], used: dict[str, None]) -> Iterator[str]:
    """All types that the routes name, then the types that those name."""
    yield "# Types\n"
    told: set[str] = set()
    while waiting := [name for name in used if name not in told]:
        name = waiting[0]
        told.add(name)
        schema = schemas[name]
        yield f"## {name}\n"
        if text := schema.get("description"):
            yield _one_line(text) + "\n"
        yield "| field | what it is |\n|---|---|"
        needed = schema.get("required", [])
        for field, rules in schema.get("properties", {}).items():
            yield f"| `{field}`{' (required)' if field in needed else ''} | {_about(rules, used)} |"
        yield ""


def _about(schema: dict[str, Any], used: dict[str, None]) -> str:
    """A field in one line: its kind, bounds, default and meaning."""
    parts = [_kind(schema, used)]
    if schema.get("default") not in (None, "", [], {}):
        parts.append(f"default `{json.dumps(schema['default'])}`")
    text = "; ".join(parts)
    return _one_line(f"{text}. {schema['description']}" if schema.get("description") else text).replace("|", "\\|")


def _kind(schema: dict[str, Any], used: dict[str, None]) -> str:
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        used.setdefault(name)
        return f"[{name}](#{name.lower()})"
    options = schema.get("anyOf") or schema.get("oneOf")
    if options and "properties" not in schema:
        return " or ".join(dict.fromkeys(_kind(option, used) for option in options))
    if values := schema.get("enum") or ([schema["const"]] if "const" in schema else None):
        return " or ".join(f"`{json.dumps(value)}`" for value in values)
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        kind = f"list of {_kind(schema.get('items', {}), used)}"
    return kind + _bounds(schema)


def _bounds(schema: dict[str, Any]) -> str:
    words = {
        "minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below",
        "minLength": "characters at least", "maxLength": "characters at most", "minItems": "items at least",
        "maxItems": "items at most",
    }  # fmt: skip
    found = [f"{text} {schema[name]}" for name, text in words.items() if name in schema]
    return f" ({', '.join(found)})" if found else ""


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    PAGE.write_text(page(document()))
