"""The source of a model's chat template: the tokenizer, a file beside the weights, or a file that the user names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from kvshelf.errors import InvalidRequest

_BESIDE: Final = "chat_template.json"
"""A file of models with a processor, whose tokenizer has no template itself (Mistral Small 3.1)."""


def take_template(tokenizer: Any, source: str, chosen: str | None) -> None:
    """Give a tokenizer its chat template. source: the tokenizer's folder or hub id. chosen: the name of one of several
    templates, or a file with one; None: the model's own. Raises `InvalidRequest` for one that does not exist."""
    if not tokenizer.chat_template:
        tokenizer.chat_template = _beside(source)
    if chosen is None:
        return
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    if chosen in named:
        tokenizer.chat_template = named[chosen]
        return
    file = Path(chosen).expanduser()
    if not file.is_file():
        names = f"the model has {', '.join(sorted(named))}" if named else "the model names none"
        raise InvalidRequest(
            f"there is no file {chosen!r} with a chat template, and no template of that name: {names}",
            param="chat_template",
        )
    try:
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the chat template {chosen!r} cannot be read: {error}", param="chat_template") from error


def _beside(source: str) -> str | dict[str, str] | None:
    """The template in `chat_template.json` beside the weights; None without that file."""
    from transformers.utils import cached_file

    try:
        path = cached_file(
            source,
            _BESIDE,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        content = None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{_BESIDE} of {source!r} cannot be read: {error}", param="model") from error
    template = content.get("chat_template") if isinstance(content, dict) else None
    if isinstance(template, list):  # several, by their names
        return {str(named["name"]): str(named["template"]) for named in template}
    return template if isinstance(template, str) and template else None
