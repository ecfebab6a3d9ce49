"""How many tokens a conversation has. The model does not run."""

from __future__ import annotations

from kvshelf.api import Asking
from kvshelf.api.tools import ToolAsking
from kvshelf.store.artifact.identity import Boundary
from kvshelf.workers.engine.inputs.tools import ToolFormat
from kvshelf.workers.model.text import TextFormat


def count(
    form: TextFormat, tools: ToolFormat | None, query: Asking, document: str | None, boundary: Boundary | None
) -> int:
    """The tokens of a document, if there is one, and of the messages behind it. tools: of the query. boundary: of the
    cache that the messages are behind instead; None: they begin the conversation. Raises `InvalidRequest` for messages
    that the template refuses there."""
    before = 0
    if document is not None:
        encoded = form.document(document, "chat")
        before, boundary = len(encoded.token_ids), encoded.boundary
    if isinstance(query, ToolAsking) and tools is not None:
        return before + len(tools.encoded(boundary, query.messages))
    return before + len(form.turns(boundary, [message.model_dump() for message in query.messages or ()]))
