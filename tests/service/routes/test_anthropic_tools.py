"""Tools and structured output by Anthropic's own client, and a stream that fails in its middle."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import anthropic
import pytest
from pydantic import BaseModel

if TYPE_CHECKING:
    from tests.conftest import LiveService

pytestmark = pytest.mark.slow

QUESTION: Any = {"role": "user", "content": "Where is the green book?"}
FIND: Any = {
    "name": "find",
    "description": "Find a book.",
    "input_schema": {
        "type": "object",
        "properties": {"shelf": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["shelf"],
        "additionalProperties": False,
    },
}
CLOCK: Any = {"name": "clock", "input_schema": {"type": "object", "additionalProperties": False}}
ONE_CALL: Any = {"type": "any", "disable_parallel_tool_use": True}


class Place(BaseModel):
    shelf: Literal[1, 2, 3, 4]
    sure: bool


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def client(tool_service: LiveService) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tool_service.url, api_key="anything", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def asked() -> Any:
    text = "The green book lies on shelf 4. " * 40
    system = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
    return {"model": "with-tools", "max_tokens": 60, "system": system}


def called(message: anthropic.types.Message) -> anthropic.types.ToolUseBlock:
    (call,) = message.content
    assert isinstance(call, anthropic.types.ToolUseBlock)
    return call


def test_a_conversation_with_calls(client: anthropic.Anthropic, asked: Any) -> None:
    said = client.messages.create(messages=[QUESTION], tools=[FIND, CLOCK], tool_choice=ONE_CALL, **asked)
    call = called(said)
    assert said.stop_reason == "tool_use"
    assert call.id.startswith("toolu_")
    assert call.name in ("find", "clock")
    chosen: Any = {"type": "tool", "name": "find", "disable_parallel_tool_use": True}
    find = called(client.messages.create(messages=[QUESTION], tools=[FIND, CLOCK], tool_choice=chosen, **asked))
    assert find.name == "find"
    assert 1 <= int(str(find.input["shelf"])) <= 9

    def told(**more: Any) -> anthropic.types.Message:
        back = [{"type": "tool_result", "tool_use_id": call.id, **more}, {"type": "text", "text": "So where?"}]
        talk: Any = [QUESTION, {"role": "assistant", "content": said.content}, {"role": "user", "content": back}]
        counted = client.messages.count_tokens(
            model=asked["model"], system=asked["system"], messages=talk, tools=[FIND, CLOCK]
        )
        found = client.messages.create(messages=talk, tools=[FIND, CLOCK], tool_choice={"type": "none"}, **asked)
        usage = found.usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        assert found.stop_reason in ("end_turn", "max_tokens")
        return found

    plain = told(content="<|end|> It is on shelf 4.")
    listed = told(content=[{"type": "text", "text": "<|end|> It is on shelf 4."}])
    assert plain.usage.input_tokens == listed.usage.input_tokens
    nothing, error = told(), told(content="It is on shelf 4.", is_error=True)
    assert nothing.usage.input_tokens < error.usage.input_tokens
    assert nothing.usage.cache_read_input_tokens == said.usage.cache_creation_input_tokens


def test_an_agent_s_conversation_goes_on_from_the_shelf(client: anthropic.Anthropic, asked: Any) -> None:
    mark: Any = {"cache_control": {"type": "ephemeral"}}

    def ask(talk: Any, choice: Any, tools: Any = (FIND, CLOCK), **more: Any) -> anthropic.types.Message:
        return client.messages.create(messages=talk, tools=list(tools), tool_choice=choice, **asked, **more)

    def conversation(**more: Any) -> tuple[list[Any], list[anthropic.types.Usage]]:
        """The question, two calls with their results, and two answers."""
        talk, usages = [QUESTION], []
        for choice in (ONE_CALL, ONE_CALL, {"type": "none"}, {"type": "none"}):
            said = ask(talk, choice, **more)
            usages.append(said.usage)
            results: Any = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "It is on shelf 4."}
                for block in said.content
                if block.type == "tool_use"
            ]
            back = {"role": "user", "content": results or "Sure?"}
            talk += [{"role": "assistant", "content": [block.to_dict() for block in said.content]}, back]
        return talk, usages

    def contents(talk: list[Any]) -> list[Any]:
        said = [message["content"] for message in talk if message["role"] == "assistant"]
        return [(block.get("text"), block.get("input")) for blocks in said for block in blocks]

    talk, alone = conversation()
    changed = [*talk[:2], {"role": "user", "content": [talk[2]["content"][0] | {"content": "Nowhere."}]}, *talk[3:]]
    none: Any = {"type": "none"}
    others: list[Any] = [(changed, none), (talk, none, (CLOCK, FIND))]
    answers = [ask(*other).content for other in others]

    again, kept = conversation(**mark)
    assert contents(again) == contents(talk)
    document = alone[-1].cache_read_input_tokens
    read = [usage.cache_read_input_tokens for usage in kept]
    assert read[0] == document
    assert read == sorted(set(read)), "each turn goes on from the one before"
    made = [usage.cache_creation_input_tokens or 0 for usage in kept]
    assert 2 * max(made[1:]) < min(usage.input_tokens for usage in alone)
    assert [usage.input_tokens for usage in kept] == [0] * 4
    with client.messages.stream(messages=again[:-2], tools=[FIND, CLOCK], tool_choice=none, **asked, **mark) as stream:
        assert stream.get_final_message().usage.cache_read_input_tokens == read[-1]
    found = [ask(*other) for other in others]
    assert [each.content for each in found] == answers
    assert [each.usage.cache_read_input_tokens for each in found] == [read[1], document], "up to what is other"


def test_a_stream_of_a_call(client: anthropic.Anthropic, asked: Any) -> None:
    body: Any = {"messages": [QUESTION], "tools": [FIND, CLOCK], "tool_choice": ONE_CALL, **asked}
    with client.messages.stream(**body) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert events == [
        "message_start", "content_block_start", "content_block_delta", "input_json", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    whole = client.messages.create(**body)
    assert (called(streamed).name, called(streamed).input) == (called(whole).name, called(whole).input)
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)


@pytest.mark.anyio
async def test_the_asynchronous_client_calls(tool_service: LiveService, asked: Any) -> None:
    body: Any = {"messages": [QUESTION], "tools": [FIND], "tool_choice": ONE_CALL, **asked}
    async with anthropic.AsyncAnthropic(base_url=tool_service.url, api_key="anything", max_retries=0) as client:
        said = called(await client.messages.create(**body))
        async with client.messages.stream(**body) as stream:
            assert called(await stream.get_final_message()).input == said.input


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_s_runner_runs_a_tool_and_sends_its_result(
    client: anthropic.Anthropic, asked: Any, stream: bool
) -> None:
    ran: list[int] = []

    @anthropic.beta_tool
    def find(shelf: Literal[1, 2, 3, 4]) -> str:
        """Find a book."""
        ran.append(shelf)
        return "It is green."

    runner: Any = client.beta.messages.tool_runner(
        messages=[QUESTION], tools=[find], tool_choice=ONE_CALL, max_iterations=2, stream=stream, **asked
    )
    reasons = [(turn.get_final_message() if stream else turn).stop_reason for turn in runner]
    assert reasons == ["tool_use", "tool_use"]
    assert set(ran) <= {1, 2, 3, 4}
    assert len(ran) >= 1


def test_structured_output(client: anthropic.Anthropic, asked: Any) -> None:
    said = client.messages.parse(messages=[QUESTION], output_format=Place, **asked)
    assert isinstance(said.parsed_output, Place)
    assert said.stop_reason == "end_turn"
    with client.messages.stream(messages=[QUESTION], output_format=Place, **asked) as stream:
        assert stream.get_final_message().parsed_output == said.parsed_output
    assert client.beta.messages.parse(messages=[QUESTION], output_format=Place, **asked).parsed_output is not None
    echo: Any = [QUESTION, {"role": "assistant", "content": said.content}, QUESTION]
    assert client.messages.create(messages=echo, **asked).content
    wrong: Any = {"format": {"type": "json_schema", "schema": {"type": "strng"}}}
    with pytest.raises(anthropic.BadRequestError, match="strng"):
        client.messages.create(messages=[QUESTION], output_config=wrong, **asked)


def test_an_error_in_the_middle_of_a_stream_is_raised(tool_service: LiveService, asked: Any) -> None:
    """The last test here: it kills the replica."""
    long: Any = {"format": {"type": "json_schema", "schema": {"type": "string", "minLength": 4000}}}
    with anthropic.Anthropic(base_url=tool_service.url, api_key="anything", max_retries=0) as client:
        body = asked | {"max_tokens": 8000, "messages": [QUESTION], "output_config": long, "stream": True}
        stream = client.messages.create(**body)
        for _ in range(5):
            next(stream)
        (replica,) = tool_service.replica_pids()
        os.kill(replica, signal.SIGKILL)
        with pytest.raises(anthropic.APIStatusError) as failed:
            list(stream)
    assert failed.value.type == "overloaded_error"
    assert failed.value.body["error"]["code"] == "worker_crashed"  # type: ignore[index]
