"""Lines of questions as rows: checked before any work, and grouped by the caches that they ask."""

from __future__ import annotations

import io
import json
import random
from itertools import groupby
from typing import Any

import pytest

from kvshelf.corpus.input.reading import ordered
from kvshelf.corpus.input.rows import parse_jsonl
from kvshelf.corpus.row import Row

URL = "/v1/chat/completions"


def line(custom_id: Any = "a", url: str = URL, **fields: Any) -> dict[str, Any]:
    body = {"cache_id": "kvs_1", "messages": [{"role": "user", "content": "Why?"}], **fields}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def rows(*lines: Any) -> list[Row]:
    data = b"\n".join(json.dumps(line).encode() for line in lines)
    return list(parse_jsonl(io.BytesIO(data), "in.jsonl", {}, endpoint="/v1/chat/completions"))


def test_a_line_is_the_body_of_the_live_route_and_crosses_processes() -> None:
    (row,) = rows(line(max_tokens=3, temperature=0.5, n=1, model="m"))
    assert row.question is not None
    assert (row.spec, row.error, row.custom_id) == (None, None, "a")
    asking = row.question.asking
    assert (row.question.cache_id, asking.max_tokens, asking.temperature) == ("kvs_1", 3, 0.5)
    assert Row.from_dict(json.loads(json.dumps(row.to_dict()))) == row


def test_a_question_may_have_tools_and_their_results() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "shelf 4"},
    ]
    (row,) = rows(line(messages=said, tools=[{"type": "function", "function": {"name": "find"}}]))
    assert (row.error, row.length) == (None, len("Where?shelf 4"))
    assert Row.from_dict(json.loads(json.dumps(row.to_dict()))) == row


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (line(stream=True), "leave stream out"),
        (line(on_miss="recompute"), "makes no cache again"),
        (line(workflow={"id": "report", "step": "plan"}), "run in no order of steps"),
        (line(program="run-1"), "program: rows of a batch go behind all questions"),
        (line(custom_id=None), "custom_id: a question needs one"),
        (line(url="/v1/caches"), f"only POST {URL}"),
        (line(colour="red"), "colour: unknown field"),
        (line(frequency_penalty=1), "frequency_penalty is not supported"),
        ({"custom_id": "a", "document": "x"}, "document: unknown beside method, url and body"),
        ({"custom_id": "a", "method": "POST", "url": URL}, "body: the fields of the request"),
        (line(cache_id=None), "cache_id or cache_ids is needed"),
    ],
)
def test_a_bad_line_is_an_error_row_with_its_number(bad: dict[str, Any], message: str) -> None:
    good, refused = rows(line("b"), bad)
    assert good.question is not None
    assert (refused.line, refused.question) == (2, None)
    assert refused.error is not None
    assert refused.error.code == "invalid_request"
    assert message in refused.error.message


def test_questions_of_one_cache_are_together() -> None:
    caches = [f"kvs_{n % 7}" for n in range(40 * 7)]
    random.Random(1).shuffle(caches)
    questions = rows(*(line(str(n), cache_id=cache) for n, cache in enumerate(caches)))
    order = [row.question.cache_id for row in ordered(iter(questions)) if row.question is not None]
    assert sorted(order) == sorted(str(cache) for cache in caches)
    assert len(list(groupby(order))) == 7
