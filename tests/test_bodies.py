"""A request body with many mistakes is refused after the first one of a list: errors cost far more than elements."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from kvshelf.api import CreateCache, JointQuery, Query
from kvshelf.api.anthropic import MessagesRequest
from kvshelf.api.inspect import KeptOf
from kvshelf.api.openai import ChatCompletionRequest
from kvshelf.api.strict import RequestBody, parse_request
from kvshelf.errors import InvalidRequest

LISTS: list[tuple[type[RequestBody], str, Any]] = [
    (CreateCache, "token_ids", ""),
    (CreateCache, "messages", ""),
    (CreateCache, "expected_questions", 1),
    (CreateCache, "levels", ""),
    (KeptOf, "token_ids", ""),
    (Query, "prompt", 1),
    (Query, "messages", 1),
    (Query, "stop", 1),
    (JointQuery, "cache_ids", 1),
    (ChatCompletionRequest, "cache_ids", 1),
    (ChatCompletionRequest, "messages", 1),
    (ChatCompletionRequest, "stop", 1),
    (MessagesRequest, "messages", 1),
    (MessagesRequest, "tools", 1),
    (MessagesRequest, "stop_sequences", 1),
]


@pytest.mark.parametrize(("model", "field", "wrong"), LISTS)
def test_a_list_fails_at_its_first_bad_element(model: type[RequestBody], field: str, wrong: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_request(model, json.dumps({field: [wrong] * 100}).encode())
    more = re.search(r"\((\d+) more problem", refused.value.message)
    assert more is None or int(more[1]) < 5  # of other fields


def test_eight_megabytes_of_mistakes_are_refused_in_a_moment() -> None:
    """They took 17.8 s, in which the service answered nobody."""
    body = b'{"token_ids": [' + b'"",' * 2_600_000 + b'""]}'
    started = time.process_time()
    with pytest.raises(InvalidRequest):
        parse_request(CreateCache, body)
    assert time.process_time() - started < 3
