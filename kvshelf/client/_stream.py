"""Reading answers and batches from the lines of an event stream (WHATWG HTML, section 9.2), without doing any I/O."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import httpx
from pydantic import ValidationError

from kvshelf.api import AnswerDelta, Answered, CacheObject, CreationProgress, ErrorBody, LevelList
from kvshelf.api.batches import BatchObject
from kvshelf.client import _failures
from kvshelf.client._config import Retries
from kvshelf.errors import ConnectionFailed, NoWorker, WorkerCrashed

CreationEvent = CreationProgress | CacheObject | list[CacheObject]
"""How far a creation is, or its answer: a cache, or those of its levels or parts."""

BREAKS_OFF = (httpx.HTTPError, httpx.StreamError, NoWorker, WorkerCrashed)
"""Errors that end the events of a creation without ending the creation. Sent again, it goes on from its state."""

AnswerT = TypeVar("AnswerT", bound=Answered)


class AnswerReader(Generic[AnswerT]):
    """Takes the lines of one stream and gives back the pieces of text; afterwards it has the whole answer.

    An event is one `data:` line of JSON: a delta, the answer, an error, or `[DONE]`.
    """

    def __init__(self, answer_type: type[AnswerT]) -> None:
        self._answer_type = answer_type
        self.answer: AnswerT | None = None

    def feed(self, line: str) -> str | None:
        """The text that this line adds, None if it adds none. Raises the error that an error event carries."""
        with _parsing(line):
            event = _event(line)
            if event is None:
                return None
            if event["object"] == "answer.delta":
                return AnswerDelta.model_validate(event).text
            self.answer = self._answer_type.model_validate(event)
        return None

    def close(self) -> AnswerT:
        """The whole answer, once the stream has ended. Raises `ConnectionFailed` if it ended too early."""
        if self.answer is None:
            raise ConnectionFailed("the stream ended before the answer was complete; repeat the query")
        return self.answer


class CreationReader:
    """Takes the lines of the events of one creation. ended: whether its answer, the last event, was among them."""

    def __init__(self) -> None:
        self.ended = False

    def feed(self, line: str) -> CreationEvent | None:
        """The event of this line, None if it has none. Raises the error that an error event carries."""
        with _parsing(line):
            event = _event(line)
            if event is None:
                return None
            if event["object"] == "cache.progress":
                return CreationProgress.model_validate(event)
            is_list = event["object"] == "list"
            answer = LevelList.model_validate(event).data if is_list else CacheObject.model_validate(event)
        self.ended = True
        return answer


class BatchReader:
    """Takes the lines of the events of one batch, over several connections if need be.

    last_event_id: from which a new connection goes on. ended: whether the batch has ended.
    """

    def __init__(self, retries: Retries) -> None:
        self.last_event_id = ""
        self.ended = False
        self._next_id = ""
        self._retries = retries
        self._breaks = 0  # since the last event

    def pause_after_break(self) -> float:
        """Seconds to wait before a new connection: more after each connection that had no event."""
        self._breaks += 1
        return self._retries.pause_s(self._breaks - 1)

    def feed(self, line: str) -> BatchObject | None:
        """The batch, if this line completes an event about it. Raises the error that an error event carries."""
        if line.startswith("id:"):
            self._next_id = line.removeprefix("id:").strip()
            return None
        with _parsing(line):
            event = _event(line)
            if event is None:
                return None
            batch = BatchObject.model_validate(event)
        self.last_event_id = self._next_id
        self.ended = batch.ended
        self._breaks = 0
        return batch


def _event(line: str) -> Any:
    """The JSON of a `data:` line; None for other lines and at the end. Raises the error that an error event carries."""
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return None
    event = json.loads(data)
    if "error" in event and "object" not in event:
        raise _failures.from_body(ErrorBody.model_validate(event["error"]))
    return event


@contextmanager
def _parsing(line: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, ValidationError) as error:
        raise ConnectionFailed(f"the stream holds something that is no event of kvshelf: {line[:120]!r}") from error
