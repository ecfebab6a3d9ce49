"""What an error's answer says beside its body. No service runs."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest
from httpx import Response

from kvshelf import errors
from kvshelf.service.http.errors import error_response

FINAL = (
    errors.InvalidRequest("x"),
    errors.DocumentTooLong("x"),
    errors.ModelMismatch("x"),
    errors.StorageFull("x", fits=False),
)
PASSING = (
    errors.OutOfMemory("x"),
    errors.StorageFull("x"),
    errors.StateConflict("x"),
    errors.RequestTimeout("x"),
    errors.WorkerCrashed("x"),
)


@pytest.mark.parametrize("client", [openai.OpenAI(api_key="x"), anthropic.Anthropic(api_key="x")])
@pytest.mark.parametrize(("error", "again"), [*((one, False) for one in FINAL), *((one, True) for one in PASSING)])
def test_clients_repeat_what_may_pass_and_nothing_else(client: Any, error: errors.KvshelfError, again: bool) -> None:
    answer = error_response(error)
    received = Response(answer.status_code, headers=dict(answer.headers))
    assert client._should_retry(received) is again  # the clients have no other way to ask
