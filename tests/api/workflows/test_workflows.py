"""The graph of a workflow: what is refused, by which name."""

from __future__ import annotations

from typing import Any

import pytest

from kvshelf.api.openai import MarkedCompletionRequest
from kvshelf.api.strict import parse_request
from kvshelf.api.workflows import MAX_STEP_CACHES, MAX_STEPS, Workflow
from kvshelf.errors import InvalidRequest


def parse(steps: Any) -> Workflow:
    return parse_request(Workflow, {"steps": steps})


def chain(count: int, **step: Any) -> dict[str, Any]:
    return {f"s{at}": {**step, "next": [f"s{at + 1}"] if at + 1 < count else []} for at in range(count)}


def test_the_largest_graph_is_accepted_and_in_order() -> None:
    largest = parse(chain(MAX_STEPS, cache_ids=["kvs_1"]))
    assert largest.in_order() == [f"s{at}" for at in range(MAX_STEPS)]
    assert sum(len(step.cache_ids) for step in largest.steps.values()) == MAX_STEP_CACHES


@pytest.mark.parametrize(
    ("steps", "param", "words"),
    [
        ({"a": {"next": ["b"]}, "b": {"next": ["c"]}, "c": {"next": ["a"]}}, "steps", "in a circle, "),
        ({"a": {"next": ["b", "b"]}, "b": {}}, "steps.a.next", "'b' is there twice"),
        ({"a": {"cache_ids": ["kvs_1", "kvs_1"]}}, "steps.a.cache_ids", "'kvs_1' is there twice"),
        (
            {f"s{at}": {"next": [f"s{after}" for after in range(at + 1, 47)]} for at in range(47)},
            "steps",
            "name 1081 that follow; at most 1024",
        ),
        ({"a": {"next": ["a"]}}, "steps", "in a circle, a -> a; write a step for each round"),
        ({"plan": {"next": ["serch"]}, "search": {}}, "steps.plan.next", "no step 'serch' (did you mean 'search'?)"),
        ({}, "steps", "at least 1"),
        (chain(MAX_STEPS + 1), "steps", f"at most {MAX_STEPS}"),
        (
            {"a": {"cache_ids": [f"k{at}" for at in range(64)]}, **chain(MAX_STEPS - 1, cache_ids=["k"])},
            "steps",
            "at most 256 are accepted",
        ),
        ({"a": {"cache_ids": ["k"] * 65}}, "steps.a.cache_ids", "at most 64"),
        ({"a": {"join": "some"}}, "steps.a.join", "'any' or 'all'"),
        ({"a": {"duration_s": 0}}, "steps.a.duration_s", "greater than 0"),
        ({"a": {"after": ["b"]}}, "steps.a.after", "unknown field"),
        ({"a:b": {}}, "steps.a:b", "pattern"),
    ],
)
def test_a_bad_graph_is_refused_by_name(steps: Any, param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse(steps)
    assert refusal.value.param == param
    assert words in refusal.value.message


def test_a_circle_is_named_step_by_step() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse(
            {"in": {"next": ["b"]}, "b": {"next": ["c", "out"]}, "c": {"next": ["d"]}, "d": {"next": ["b"]}, "out": {}}
        )
    circle = refusal.value.message.split("in a circle, ")[1].split(";")[0].split(" -> ")
    assert circle[0] == circle[-1]
    assert "".join(circle[:-1]) in ("bcd", "cdb", "dbc")


def test_a_step_asks_caches_that_are_there() -> None:
    text = {"type": "text", "text": "The tide. " * 500, "prompt_cache_breakpoint": {"mode": "explicit"}}
    message = {"role": "user", "content": [text, {"type": "text", "text": "When?"}]}
    body = {"messages": [message], "workflow": {"id": "w", "step": "a"}}
    with pytest.raises(InvalidRequest, match="a step of a workflow asks caches that are there") as refusal:
        parse_request(MarkedCompletionRequest, body)
    assert refusal.value.param == "workflow"
