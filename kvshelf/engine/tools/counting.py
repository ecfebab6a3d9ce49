"""How many tokens a conversation has. The model does not run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvshelf.api import Asking
from kvshelf.api.tools import ToolAsking
from kvshelf.artifact.identity import Boundary
from kvshelf.engine.tools.tools import ToolFormat
from kvshelf.model.text import TemplateOptions, TextFormat


def count(
    form: TextFormat,
    tools: ToolFormat | None,
    variables: Mapping[str, Any],
    query: Asking,
    document: str | None,
    boundary: Boundary | None,
    cached: Mapping[str, Any],
) -> int:
    """The tokens of a document, if there is one, and of the messages behind it. tools: of the query. variables: that
    the template is told. boundary: of the cache that the messages are behind instead, and `cached` the variables of its
    document; None: they begin the conversation. Raises `InvalidRequest` for messages that the template refuses
    there."""
    before = 0
    if document is not None:
        encoded = form.document(document, "chat")
        before, boundary = len(encoded.token_ids), encoded.boundary
    if isinstance(query, ToolAsking):
        messages = [turn.template_fields for turn in query.messages]
    else:
        messages = [message.model_dump() for message in query.messages or ()]
    options, intro = TemplateOptions({**cached, **variables}, cached=cached), None if tools is None else tools.intro
    return before + len(form.prompt(boundary, messages, opening=True, options=options, intro=intro).token_ids)
