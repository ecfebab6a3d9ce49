"""The options of a question, from the one place that declares them to every surface that takes them."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from pydantic import ValidationError

from kvshelf.api import JointQuery, Query
from kvshelf.api.openai import ChatCompletionRequest
from kvshelf.api.options import Ask, AskFields, Protecting, written_rule
from kvshelf.api.responses import ResponsesRequest
from kvshelf.cli import app
from kvshelf.client._calls import JointFields, QueryFields
from kvshelf.engine.options import AnswerFields, AnswerOptions

OPTIONS = Ask.model_fields.keys()


def test_keyword_arguments_are_those_of_the_value() -> None:
    assert AskFields.__annotations__.keys() == OPTIONS


@pytest.mark.parametrize("body", [Query, JointQuery, ChatCompletionRequest, ResponsesRequest])
def test_every_body_of_a_question_has_the_options(body: type[Ask]) -> None:
    assert body.model_fields.keys() >= OPTIONS


@pytest.mark.parametrize("fields", [QueryFields, JointFields, AnswerFields])
def test_clients_and_engine_take_the_options(fields: type) -> None:
    assert fields.__annotations__.keys() >= OPTIONS


@pytest.mark.parametrize(("body", "fields"), [(Query, QueryFields), (JointQuery, JointFields)])
def test_clients_take_every_field_of_a_question(body: type[Ask], fields: type) -> None:
    of_the_call = {"prompt", "messages", "stream", "cache_ids"}
    assert fields.__annotations__.keys() == body.model_fields.keys() - of_the_call


def test_rules_of_protect_may_be_objects() -> None:
    rules = [{"first": 64}, {"text": "never lie: not once"}, {"regex": "^Rule"}, "headings"]
    written = ["first:64", "text:never lie: not once", "lines:^Rule", "headings"]
    assert Protecting(protect=rules).protect == written  # type: ignore[arg-type]
    assert list(map(written_rule, rules)) == written


@pytest.mark.parametrize(
    "rule", [{"first": "64"}, {"first": True}, {"last": 3}, {"first": 1, "text": "a"}, {}, {"text": 3}]
)
def test_other_objects_are_no_rules(rule: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Protecting.model_validate({"protect": [rule]})


def test_a_completion_asks_with_all_options_of_its_body() -> None:
    told = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["a"], "tool": "search", "on_miss": "recompute"}
    body = ChatCompletionRequest(cache_id="kvs_1", messages=[{"role": "user", "content": "a"}], **told)
    asking = body.asking
    assert {name: getattr(asking, name) for name in told} == told


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_reaches_the_command_line_a_row_of_a_batch_and_the_sampler(name: str) -> None:
    value = {"seed": 3, "stop": ["a"]}.get(name, 0.5)
    ask = typer.main.get_command(app).commands["ask"]  # type: ignore[attr-defined]
    option = next(param for param in ask.params if param.name == name)
    assert option.help[:9].lower() == str(Ask.model_fields[name].description)[:9].lower()
    row = ChatCompletionRequest(cache_id="kvs_1", messages=[{"role": "user", "content": "a"}], **{name: value})
    assert getattr(row.asking, name) == value
    assert getattr(AnswerOptions.of(**{name: value}).sampling.ask, name) == value  # type: ignore[arg-type]
