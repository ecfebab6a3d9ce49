"""The API's reference: Markdown from the OpenAPI document, which is docs/api.md, and as a web page at /docs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import escape
from itertools import pairwise
from string import Template
from typing import Any, Final

from markdown_it import MarkdownIt

from kvshelf.errors import Cancelled, ConnectionFailed, MissingExtra, by_code

HEAD = """# HTTP API

This reference is made from the OpenAPI document (`GET /openapi.json`). A running service shows it at `/docs`. Bodies
are JSON in UTF-8; unknown fields are refused. Times are Unix seconds, sizes bytes; durations carry `_s` or `_ms`. Every
response has an `x-request-id`. An error is `{"error": {"message", "type", "param", "code"}}`, with `miss_reason` and
`details` if they apply. Its `code` is one of these:

"""

_PAGE: Final = Template("""<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <meta name="color-scheme" content="light dark">
    <title>HTTP API · kvshelf</title>
    <link rel="icon" href="page/icon.svg" type="image/svg+xml">
    <link rel="stylesheet" href="page/styles/base.css">
    <link rel="stylesheet" href="page/styles/reference.css">
  </head>
  <body>
    <header class="bar">
      <a class="brand" href="./">kvshelf</a>
      <nav aria-label="Formats"><a href="openapi.json">OpenAPI document</a></nav>
    </header>
    <div class="reference">
      <nav aria-label="Contents"><ul>$contents</ul></nav>
      <main>$text</main>
    </div>
  </body>
</html>
""")

NEVER_SENT = (Cancelled, ConnectionFailed, MissingExtra)
"""Errors of the caller's own process."""


def page(api: dict[str, Any]) -> str:
    """The reference as a web page, which needs no scripts."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(markdown(api))
    contents = []
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":  # an anchor as on GitHub, so that links to types work in both forms
            anchor = re.sub(r"[^\w\- ]", "", inline.content.lower()).replace(" ", "-")
            opening.attrSet("id", anchor)
            contents.append(f'<li class="{opening.tag}"><a href="#{anchor}">{escape(inline.content)}</a></li>')
    return _PAGE.substitute(contents="\n".join(contents), text=parser.renderer.render(tokens, parser.options, {}))


def markdown(api: dict[str, Any]) -> str:
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
    codes: dict[int, list[str]] = {}
    for code, cls in by_code().items():
        if not issubclass(cls, NEVER_SENT):
            codes.setdefault(cls.status, []).append(f"`{code}`")
    rows = [f"| {status} | {', '.join(sorted(names))} |" for status, names in sorted(codes.items())]
    return "\n".join(["| status | `code` |", "|---|---|", *rows]) + "\n\n"


def _route(method: str, path: str, operation: dict[str, Any], used: dict[str, None]) -> Iterator[str]:
    yield f"## {method.upper()} {path}\n\n{operation['description']}\n"
    if parameters := operation.get("parameters"):
        yield "| parameter | in | what it is |\n|---|---|---|"
        for parameter in parameters:
            about = _about(parameter["schema"] | {"description": parameter.get("description", "")}, used)
            yield f"| `{parameter['name']}` | {parameter['in']} | {about} |"
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
    done: set[str] = set()
    while waiting := [name for name in used if name not in done]:
        name = waiting[0]
        done.add(name)
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
    members = (schema.get("additionalProperties"), *schema.get("patternProperties", {}).values())
    kind += "".join(f" of {_kind(member, used)}" for member in members if isinstance(member, dict) and "$ref" in member)
    return kind + _bounds(schema)


def _bounds(schema: dict[str, Any]) -> str:
    words = {
        "minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below",
        "minLength": "characters at least", "maxLength": "characters at most", "minItems": "items at least",
        "maxItems": "items at most",
    }  # fmt: skip
    bounds = [f"{text} {schema[name]}" for name, text in words.items() if name in schema]
    return f" ({', '.join(bounds)})" if bounds else ""


def _one_line(text: str) -> str:
    return " ".join(text.split())
