"""Chunks of several choices, as OpenAI's own client puts them together."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from kvshelf.api import Usage
from kvshelf.api.answers import Answer, Piece
from kvshelf.service.dialects.completions import Completion

USAGE = Usage(cache_read_tokens=9, read_tokens=7, prefill_tokens=3, completion_tokens=2)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_choices_begin_in_their_order_whichever_is_first() -> None:
    async def pieces() -> AsyncGenerator[tuple[int, Piece | Answer], None]:
        for index in (2, 0, 1):
            yield index, Piece(f"Choice {index}.")
        for index in (1, 2, 0):
            yield index, Answer(f"Choice {index}.", [1], "stop", USAGE)

    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    async for chunk in Completion("tiny").chunks(pieces(), with_usage=True):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    choices = state.get_final_completion().choices
    assert [choice.message.content for choice in choices] == ["Choice 0.", "Choice 1.", "Choice 2."]
    assert [choice.message.role for choice in choices] == ["assistant"] * 3
