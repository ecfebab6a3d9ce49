"""Reading a streamed answer from the lines of an event stream (WHATWG HTML, section 9.2), without doing any I/O."""

from __future__ import annotations

import json

from pydantic import ValidationError

from kvshelf.client import _failures
from kvshelf.client.types import AnswerDelta, AnswerObject, ErrorBody
from kvshelf.errors import ConnectionFailed


class AnswerReader:
    """Takes the lines of one stream and gives back the pieces of text; afterwards it has the whole answer.

    An event is one `data:` line of JSON: a delta, the answer, an error, or `[DONE]`.
    """

    def __init__(self) -> None:
        self.answer: AnswerObject | None = None

    def feed(self, line: str) -> str | None:
        """The text that this line adds, None if it adds none. Raises the error that an error event carries."""
        if not line.startswith("data:"):
            return None
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return None
        try:
            event = json.loads(data)
            if "error" in event:
                raise _failures.from_body(ErrorBody.model_validate(event["error"]))
            if event["object"] == "answer.delta":
                return AnswerDelta.model_validate(event).text
            self.answer = AnswerObject.model_validate(event)
        except (ValueError, TypeError, KeyError, ValidationError) as error:
            raise ConnectionFailed(f"the stream holds something that is no event of kvshelf: {data[:120]!r}") from error
        return None

    def close(self) -> AnswerObject:
        """The whole answer, once the stream has ended. Raises `ConnectionFailed` if it ended too early."""
        if self.answer is None:
            raise ConnectionFailed("the stream ended before the answer was complete; repeat the query")
        return self.answer
