"""What a request of MCP over HTTP brings: its key, and a message, which may be too large for an event loop. The process
that parses it imports this module alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationInfo, model_validator

from kvshelf.api.strict import CHECKED, RequestBody, misuse

ELSEWHERE: Final = "(in the request's state)"
"""What a message has in place of the text that is kept beside it."""


class PutMessage(RequestBody):
    """A call of `put`. message: its JSON, with `ELSEWHERE` in place of the text. text: in UTF-8."""

    message: bytes
    text: bytes

    @model_validator(mode="before")
    @classmethod
    def _apart(cls, data: Any, info: ValidationInfo) -> Any:
        if info.context is CHECKED:
            return data
        match data:
            case {"params": {"name": "put", "arguments": {"text": str(text)} as arguments} as params}:
                rest = {**data, "params": {**params, "arguments": {**arguments, "text": ELSEWHERE}}}
                return {"message": json.dumps(rest, allow_nan=False).encode(), "text": text.encode()}
        raise misuse("", "only a call of put, with its text, may be as large as this message")


def bearer(headers: Mapping[str, str]) -> str:
    """The API key of a request; "" without one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
