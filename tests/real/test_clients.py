"""Both vendors' clients on a real model: the same answers as kvshelf's own client gives."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anthropic
import openai

from kvshelf import Client

if TYPE_CHECKING:
    from tests.conftest import LiveService

QUESTION = "What is the address of the library?"
ASKED: Any = [{"role": "user", "content": QUESTION}]
SCHEMA = {
    "type": "object",
    "properties": {"fee": {"type": "integer"}},
    "required": ["fee"],
    "additionalProperties": False,
}


def test_openai_s_client(real_service: LiveService, shelf: Client, stored: str) -> None:
    own = shelf.caches.query(stored, QUESTION, max_tokens=20)
    with openai.OpenAI(base_url=f"{real_service.url}/v1", api_key="x", max_retries=0) as client:
        asked: Any = {"model": "smollm2", "messages": ASKED, "max_tokens": 20, "extra_body": {"cache_id": stored}}
        said = client.chat.completions.create(**asked)
        assert said.choices[0].message.content == own.text
        assert said.usage is not None
        assert said.usage.prompt_tokens_details is not None
        assert said.usage.prompt_tokens_details.cached_tokens == own.usage.cache_read_tokens
        pieces = client.chat.completions.create(**asked, stream=True)
        assert "".join(each.choices[0].delta.content or "" for each in pieces if each.choices) == own.text
        first = client.responses.create(
            model="smollm2", input=QUESTION, max_output_tokens=20, extra_body={"cache_id": stored}
        )
        assert first.output_text == own.text
        again = client.responses.create(
            model="smollm2", input="And the fee?", previous_response_id=first.id, max_output_tokens=16
        )
        talk = [*ASKED, {"role": "assistant", "content": own.text}, {"role": "user", "content": "And the fee?"}]
        assert again.output_text == shelf.caches.query(stored, messages=talk, max_tokens=16).text


def test_anthropic_s_client(real_service: LiveService, shelf: Client, stored: str) -> None:
    own = shelf.caches.query(stored, QUESTION, max_tokens=20)
    with anthropic.Anthropic(base_url=real_service.url, api_key="x", max_retries=0) as client:
        said: Any = client.messages.create(
            model="smollm2", max_tokens=20, messages=ASKED, extra_body={"cache_id": stored}
        )
        assert said.content[0].text == own.text
        assert said.usage.cache_read_input_tokens == own.usage.cache_read_tokens
        with client.messages.stream(
            model="smollm2", max_tokens=20, messages=ASKED, extra_body={"cache_id": stored}
        ) as stream:
            assert "".join(stream.text_stream) == own.text


def test_answers_have_the_shape_that_is_asked_for(real_service: LiveService, shelf: Client, stored: str) -> None:
    with openai.OpenAI(base_url=f"{real_service.url}/v1", api_key="x", max_retries=0) as client:
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "fee", "schema": SCHEMA}}
        said = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "How much is the yearly fee, in euros?"}],
            max_tokens=24,
            response_format=wanted,
            extra_body={"cache_id": stored},
        )
        assert isinstance(json.loads(said.choices[0].message.content or "")["fee"], int)
    chosen = shelf.caches.query(
        stored, "Is the library in Harbour Street?", choices=["Yes, größer", "No"], max_tokens=12
    )
    assert chosen.text in ("Yes, größer", "No")
    digits = shelf.caches.query(stored, "When was it founded?", grammar='start: /[0-9]{4}/ " 日本"', max_tokens=16)
    assert digits.text[:4].isdecimal()
    assert digits.text[4:] == " 日本"
