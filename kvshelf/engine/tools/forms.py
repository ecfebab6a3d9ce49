"""Which of the known ways a chat template writes calls of tools in."""

from __future__ import annotations

from kvshelf.engine.tools.calls import CallFormat, Write, as_json, as_tags, unsupported
from kvshelf.engine.tools.harmony import as_harmony
from kvshelf.engine.tools.pythonic import as_python
from kvshelf.model.text import TextFormat


def call_format(form: TextFormat, write: Write) -> CallFormat:
    """How a template writes calls. Raises `InvalidRequest` for a way that is none of these."""
    for known in (as_harmony, as_python, as_json, as_tags):
        if (found := known(form, write)) is not None:
            return found
    raise unsupported(
        "writes calls of tools neither as JSON, nor as Python, nor in channels, nor with tags around each argument"
    )
