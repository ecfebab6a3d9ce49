"""An answer of several documents read together is called exact in no form of the API."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from kvshelf.api import Asking, Usage, responses
from kvshelf.api.answers import Answer, Piece, Served
from kvshelf.service.dialects import own
from kvshelf.service.dialects.completions import Completion
from kvshelf.service.dialects.responses import Responding

USAGE = Usage(cache_read_tokens=9, read_tokens=7, prefill_tokens=3, completion_tokens=1)
ASKED = ("kvs_1", "kvs_2")
ONE = Answer("a", [1], "stop", USAGE, (1.0, 0.0), served=Served("ans_1", ASKED, ASKED[:1], "kvs_1", "full"))
SEVERAL = replace(ONE, sources=(0.25, 0.75)).also(read_ids=ASKED)


def pieces(answer: Answer, *numbers: int) -> AsyncGenerator[Any, None]:
    async def made() -> AsyncGenerator[Any, None]:
        for piece in (Piece("a"), answer):
            yield (*numbers, piece) if numbers else piece

    return made()


async def forms(answer: Answer) -> list[dict[str, Any]]:
    """The answer as each form says it: whole, and at the end of a stream."""
    chat = Completion("m", together=True)
    body = responses.ResponsesRequest(input="tide", cache_ids=list(ASKED))
    response = Responding(body, Asking(prompt="tide"), "m")
    ends = [event async for event in chat.chunks(pieces(answer, 0), with_usage=False)]
    events = [event async for event in response.events(pieces(answer))]
    return [
        own.wire(own.together(answer)), chat.whole([answer]), ends[-1], response.whole(answer), events[-1]["response"],
    ]  # fmt: skip


@pytest.mark.anyio
async def test_every_form_says_that_documents_read_together_are_not_exact() -> None:
    assert [said["exact"] for said in await forms(SEVERAL)] == [False] * 5


@pytest.mark.anyio
async def test_no_form_claims_it_of_one_document() -> None:
    """Nor where a route chose it among several: what its policy and codec lose is its quality."""
    assert not any("exact" in said for said in await forms(ONE))


def test_answers_without_a_service_say_it_too() -> None:
    assert replace(SEVERAL, served=Served()).exact is False
    assert replace(ONE, served=Served()).exact is None
