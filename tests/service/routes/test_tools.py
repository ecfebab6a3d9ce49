"""Tools by OpenAI's own client: calls that a model must make, conversations with their results, and what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.service.conftest import created, refused

if TYPE_CHECKING:
    from tests.conftest import LiveService

QUESTION: Any = [{"role": "user", "content": "Where is the green book?"}]
FIND: Any = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Find a book.",
        "parameters": {
            "type": "object",
            "properties": {"shelf": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["shelf"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.slow
def test_a_conversation_with_calls(tool_service: LiveService) -> None:
    with httpx.Client(base_url=tool_service.url, timeout=120) as http:
        cache = created(http, document="The green book lies on shelf 4. " * 40, policy="full", layout="chat")
    client = openai.OpenAI(base_url=f"{tool_service.url}/v1", api_key="anything", max_retries=0)
    asked: Any = {"model": cache["model"], "tools": [FIND, CLOCK], "max_tokens": 60}
    asked["extra_body"] = {"cache_id": cache["id"]}
    chosen: Any = {"type": "function", "function": {"name": "find"}}
    said = client.chat.completions.create(messages=QUESTION, tool_choice=chosen, parallel_tool_calls=False, **asked)
    (choice,) = said.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "find"
    assert 1 <= json.loads(call.function.arguments)["shelf"] <= 9

    stream = client.chat.completions.create(
        messages=QUESTION, tool_choice="required", parallel_tool_calls=False, stream=True, logprobs=True, **asked
    )
    choices = [choice for chunk in stream for choice in chunk.choices]
    assert [bool(each.logprobs and each.logprobs.content) for each in choices] == [False, True]
    deltas = [choice.delta for choice in choices]
    streamed = [made for delta in deltas for made in delta.tool_calls or ()]
    assert [made.index for made in streamed] == [0]
    assert streamed[0].function is not None
    assert streamed[0].function.name in ("find", "clock")

    for choice_of_tools in ("auto", "none"):
        plain = client.chat.completions.create(messages=QUESTION, tool_choice=choice_of_tools, **asked)
        chunks = client.chat.completions.create(
            messages=QUESTION, tool_choice=choice_of_tools, stream=True, logprobs=True, **asked
        )
        texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        assert sum(map(bool, texts)) > 1, "text that is no call comes as it is made"
        assert "".join(texts) == plain.choices[0].message.content

    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "<|end|> It is on shelf 4."}
    talk = [*QUESTION, choice.message, result]
    told = client.chat.completions.create(messages=talk, tool_choice="none", **asked)
    assert told.choices[0].message.tool_calls is None
    assert told.choices[0].finish_reason in ("stop", "length")
    assert told.usage is not None
    assert said.usage is not None
    assert told.usage.prompt_tokens > said.usage.prompt_tokens
    assert said.usage.prompt_tokens_details is not None
    assert said.usage.prompt_tokens_details.cached_tokens == cache["tokens"]["document"]

    wrong: Any = {"type": "function", "function": {"name": "find", "parameters": {"type": "strng"}}}
    with pytest.raises(openai.BadRequestError, match="strng") as refusal:
        client.chat.completions.create(messages=QUESTION, tool_choice="required", **asked | {"tools": [wrong]})
    assert refusal.value.param == "tools"


@pytest.mark.slow
def test_a_conversation_with_calls_goes_on_from_the_shelf(tool_service: LiveService) -> None:
    with httpx.Client(base_url=tool_service.url, timeout=120) as http:
        cache = created(http, document="The grey book lies on shelf 4. " * 40, policy="full", layout="chat")
    client = openai.OpenAI(base_url=f"{tool_service.url}/v1", api_key="anything", max_retries=0)
    asked: Any = {"model": cache["model"], "max_tokens": 60, "parallel_tool_calls": False}
    loose = 'I look. \n\n<tool_call>{"arguments":{}, "name":"clock"}</tool_call>'

    def ask(talk: Any, choice: Any = "none", tools: Any = (FIND, CLOCK), store: bool = False) -> tuple[Any, int, int]:
        """The answer, and its tokens from the shelf and others."""
        own: Any = {"cache_id": cache["id"]} | ({"choices": [loose]} if choice == "auto" else {})
        said = client.chat.completions.create(
            messages=talk, tools=list(tools), tool_choice=choice, store=store, extra_body=own, **asked
        )
        assert ("stored_cache_id" in said.to_dict()) == store
        assert said.usage is not None
        assert said.usage.prompt_tokens_details is not None
        cached = said.usage.prompt_tokens_details.cached_tokens or 0
        return said.choices[0].message, cached, said.usage.prompt_tokens - cached

    def conversation(*, store: bool) -> tuple[list[Any], list[tuple[int, int]]]:
        talk, counts = [*QUESTION], []
        for choice in ("required", "auto", "none", "none"):
            answer, cached, others = ask(talk, choice, store=store)
            (call,) = answer.tool_calls or (None,)
            back = {"role": "user", "content": "Sure?"}
            if call is not None:
                back = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
            talk += [answer.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True), back]
            counts.append((cached, others))
        return talk, counts

    def contents(talk: list[Any]) -> list[Any]:
        called = [[call["function"] for call in message.get("tool_calls", ())] for message in talk]
        return [(message.get("content"), calls) for message, calls in zip(talk, called, strict=True)]

    talk, alone = conversation(store=False)
    assert (talk[3]["content"], talk[3]["tool_calls"][0]["function"]["name"]) == ("I look.", "clock")
    calling = talk[1]["tool_calls"][0]
    number = {"name": calling["function"]["name"], "arguments": '{"shelf": 10}'}
    others: list[tuple[Any, Any]] = [
        ([*talk[:2], talk[2] | {"content": "Nowhere."}, *talk[3:]], (FIND, CLOCK)),
        ([talk[0], talk[1] | {"tool_calls": [calling | {"function": number}]}, *talk[2:]], (FIND, CLOCK)),
        (talk, (CLOCK, FIND)),
    ]
    answers = [ask(each, tools=tools)[0].content for each, tools in others]
    document = cache["tokens"]["document"]
    assert [cached for cached, _ in alone] == [document] * 4

    again, shelved = conversation(store=True)
    assert contents(again) == contents(talk)
    assert list(map(sum, shelved)) == list(map(sum, alone)), "the model reads the same"
    read = [cached for cached, _ in shelved]
    assert read[0] == document
    assert read == sorted(set(read)), "each turn goes on from the one before"
    assert 2 * max(prefilled for _, prefilled in shelved[1:]) < min(prefilled for _, prefilled in alone)
    found = [ask(each, tools=tools) for each, tools in others]
    assert [answer.content for answer, _, _ in found] == answers
    assert [cached for _, cached, _ in found] == [read[1], document, document], "up to what is other"


def flat(tool: Any, **fields: Any) -> Any:
    """A tool as the API of responses has it."""
    return {"type": "function", "strict": None, "parameters": None} | tool["function"] | fields


class Shelf(BaseModel):
    number: Literal[4, 5]


RESULT = "<|end|> It is on shelf 4."


@pytest.mark.slow
def test_responses_with_calls(tool_service: LiveService) -> None:
    with httpx.Client(base_url=tool_service.url, timeout=120) as http:
        cache = created(http, document="The red book lies on shelf 4. " * 40, policy="full", layout="chat")
        client = openai.OpenAI(base_url=f"{tool_service.url}/v1", api_key="anything", max_retries=0)
        tools: Any = [flat(FIND), flat(CLOCK)]
        asked: Any = {"model": cache["model"], "tools": tools, "max_output_tokens": 60}
        own: Any = {"extra_body": {"cache_id": cache["id"]}}
        forced: Any = {"tool_choice": {"type": "function", "name": "find"}, "parallel_tool_calls": False}
        first = client.responses.create(input="Where is it?", **asked, **own, **forced)
        (call,) = first.output
        assert call.type == "function_call"
        assert (call.name, call.status, first.status) == ("find", "completed", "completed")
        assert 1 <= json.loads(call.arguments)["shelf"] <= 9
        assert [tool.to_dict() for tool in first.tools] == [
            tool | {"description": tool.get("description")} for tool in tools
        ]
        assert first.tool_choice.to_dict() == forced["tool_choice"]  # type: ignore[union-attr]
        assert first.parallel_tool_calls is False
        assert client.responses.retrieve(first.id).to_dict() == first.to_dict()

        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
        behind: Any = {"previous_response_id": first.id, "tool_choice": "none"}
        told = client.responses.create(input=[result], **asked, **behind)
        (message,) = told.output
        assert message.type == "message"
        (turn,) = http.get(f"/v1/caches/{first.stored_cache_id}/turns").json()["data"][1:]  # type: ignore[attr-defined]
        assert turn["messages"][0] == {"role": "user", "content": "Where is it?"}
        assert call.arguments in turn["messages"][1]["content"]
        last = http.get(f"/v1/caches/{told.stored_cache_id}/turns").json()["data"][-1]  # type: ignore[attr-defined]
        assert last["messages"][0] == {"role": "tool", "content": RESULT}, "as it was sent"
        assert told.usage is not None
        assert told.usage.input_tokens_details.cached_tokens == turn["total_tokens"]

        more: Any = asked | forced | {"previous_response_id": told.id, "instructions": "Be exact."}
        third = client.responses.create(input="And the other?", **more)
        (another,) = third.output
        assert another.type == "function_call"
        nothing: Any = {"type": "function_call_output", "call_id": another.call_id, "output": ""}
        assert client.responses.create(input=[nothing], **asked | behind | {"previous_response_id": third.id}).output
        chain = http.get(f"/v1/caches/{third.stored_cache_id}/turns").json()["data"]  # type: ignore[attr-defined]
        assert "# Tools" not in json.dumps(chain[2:])

        question: Any = {"role": "user", "content": "Where is it?"}
        listed: Any = result | {"output": [{"type": "input_text", "text": RESULT}]}
        whole = client.responses.create(
            input=[question, *first.output, listed], store=False, **asked, **own, tool_choice="none"
        )
        assert whole.output_text == told.output_text, "the kept turn is what a client's whole conversation is"

        typed: Any = [openai.pydantic_function_tool(Shelf)]
        parsed = client.responses.parse(
            input="Where?", store=False, **asked | own | forced | {"tools": typed, "tool_choice": "required"}
        )
        (first_call,) = parsed.output
        assert first_call.type == "function_call"
        assert isinstance(first_call.parsed_arguments, Shelf)

        other: Any = asked | {"tools": [flat(CLOCK)]}
        http_body = {"previous_response_id": first.id, "tool_choice": "none", "input": [result], "store": False}
        again = client.responses.create(**other, **http_body)
        assert again.usage is not None
        kept = again.usage.input_tokens_details.cached_tokens
        assert kept == cache["tokens"]["document"], "with other tools the turn is another one, and is read again"


@pytest.mark.slow
@pytest.mark.anyio
async def test_streams_of_responses_with_calls(tool_service: LiveService) -> None:
    with httpx.Client(base_url=tool_service.url, timeout=120) as http:
        cache = created(http, document="The blue book lies on shelf 4. " * 40, policy="full", layout="chat")
    asked: Any = {"model": cache["model"], "tools": [flat(FIND), flat(CLOCK)], "max_output_tokens": 60}
    asked |= {"input": "Where is it?", "parallel_tool_calls": False, "extra_body": {"cache_id": cache["id"]}}
    names = [
        "created", "in_progress", "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    async with openai.AsyncOpenAI(base_url=f"{tool_service.url}/v1", api_key="anything", max_retries=0) as client:
        async with client.responses.stream(**asked, tool_choice="required") as stream:
            seen = [event.type.removeprefix("response.") async for event in stream]
            final = await stream.get_final_response()
        assert seen == names
        (call,) = final.output
        assert call.type == "function_call"
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
        behind = asked | {"input": [result], "extra_body": {"previous_response_id": final.id}}
        events = [event async for event in await client.responses.create(**behind, tool_choice="none", stream=True)]
        told: Any = events[-1]
        assert told.response.output_text
        assert told.response.usage.input_tokens_details.cached_tokens > cache["tokens"]["document"]


def post(http: httpx.Client, cache: dict[str, Any], **body: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"cache_id": cache["id"], "messages": QUESTION} | body)


CALL: Any = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"shelf": 4}'}}


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"tools": [FIND]}, "tools", "has no tools"),
        ({"tools": [FIND, FIND]}, "tools", "same name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
        ({"tools": [FIND], "tool_choice": "required", "choices": ["a"]}, "choices", "leave choices out"),
        ({"tools": [FIND], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "no tool"),
        ({"tool_choice": "required"}, "tool_choice", "give tools"),
        ({"messages": [*QUESTION, {"role": "tool", "tool_call_id": "a", "content": "4"}]}, "tools", "give the tools"),
        ({"messages": [*QUESTION, {"role": "tool", "content": "4"}], "tools": [FIND]}, "messages", "tool_call_id"),
        ({"messages": [{"role": "user"}]}, "messages", "needs a content"),
        ({"messages": [{"role": "user", "content": "?", "tool_calls": [CALL]}]}, "messages", "role assistant"),
        ({"messages": [*QUESTION, {"role": "assistant", "tool_calls": [CALL | {
            "function": {"name": "find", "arguments": "4"}}]}, *QUESTION], "tools": [FIND]}, None, "JSON object"),
    ],
)  # fmt: skip
def test_tools_that_cannot_be(
    http: httpx.Client, cache: dict[str, Any], body: dict[str, Any], param: str | None, says: str
) -> None:
    error = refused(post(http, cache, **body), 400, "invalid_request")
    assert says in error["message"]
    assert param is None or error["param"] == param


def test_no_tools_are_none(http: httpx.Client, cache: dict[str, Any]) -> None:
    plain = post(http, cache, max_tokens=4).json()["choices"]
    assert post(http, cache, max_tokens=4, tools=[], tool_choice="none").json()["choices"] == plain
