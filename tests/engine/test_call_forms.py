"""Calls of tools as Python and in harmony's channels: read as models write them, held to their schema, and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from kvshelf.api.tools import Tool
from kvshelf.engine.decode.grammar import Grammar
from kvshelf.engine.tools.harmony import HarmonyCalls
from kvshelf.engine.tools.pieces import HeldPieces
from kvshelf.engine.tools.pythonic import PythonCalls
from kvshelf.engine.tools.tools import ToolFormat
from kvshelf.errors import InvalidRequest
from kvshelf.model.text import TextFormat
from tests.tokenizers import byte_level

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}"
TOLD = "{% if tools %}Tools: {{ tools | tojson }}\n\n{% endif %}"
PYTHON = (  # as vLLM's template for Llama 3.2: in the history texts have no quotes
    "{% for m in messages %}{% if m.tool_calls %}<|im_start|>assistant\n["
    "{% for c in m.tool_calls %}{{ c.function.name }}("
    "{% for p in c.function.arguments %}{{ p }}={{ '%s' | format(c.function.arguments[p]) }}"
    "{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]<|im_end|>\n"
    "{% else %}" + TURN.replace("{{ m.content }}", "{% if m.role == 'system' %}" + TOLD + "{% endif %}{{ m.content }}")
    + "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
HARMONY = (
    "{% for m in messages %}{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}<|start|>assistant to=functions."
    "{{ c.name }}<|channel|>commentary json<|message|>{{ c.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{% if m.role == 'system' %}" + TOLD + "{% endif %}{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    "{# <|channel|>analysis<|message|> #}"
)  # fmt: skip
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "rain": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [
    Tool.model_validate({"type": "function", "function": function})
    for function in ({"name": "get_weather", "parameters": WEATHER}, {"name": "get"}, {"name": "clock"})
]


def tools_of(template: str) -> ToolFormat:
    tokenizer = byte_level()
    marks = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|constrain|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks} if template is HARMONY else {})
    tokenizer.chat_template = template
    return ToolFormat.of(TextFormat(tokenizer), TOOLS)


@pytest.fixture(scope="module")
def python() -> ToolFormat:
    return tools_of(PYTHON)


@pytest.fixture(scope="module")
def harmony() -> ToolFormat:
    return tools_of(HARMONY)


def read(tools: ToolFormat, text: str) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in tools.parsed(text)[1]]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('[get_weather(city="San Francisco", days=2)]', [("get_weather", {"city": "San Francisco", "days": 2})]),
        ("[get_weather(city='Kiel'), clock()]", [("get_weather", {"city": "Kiel"}), ("clock", {})]),
        ("[get(), get_weather(city='x', )]", [("get", {}), ("get_weather", {"city": "x"})]),
        ("[clock( ) ,\n clock()]", [("clock", {}), ("clock", {})]),
        ("[get(a=True, b=None, c=-1.5e3, d=[1, 'x', {'k': (2,)}], e=false, f=null)]",
         [("get", {"a": True, "b": None, "c": -1500.0, "d": [1, "x", {"k": [2]}], "e": False, "f": None})]),
        (r"""[get(a='it\'s', b="say \"hi\"", c='a\\b', d="\u00e9", e='\x41\d')]""",
         [("get", {"a": "it's", "b": 'say "hi"', "c": "a\\b", "d": "é", "e": "A\\d"})]),
        ("[get(a='two\nlines', b=\"two\nlines\", c='), clock(')]",
         [("get", {"a": "two\nlines", "b": "two\nlines", "c": "), clock("})]),
        ("[get(größe=1)]", [("get", {"größe": 1})]),
    ],
)  # fmt: skip
def test_calls_as_python_are_read(python: ToolFormat, text: str, calls: list[tuple[str, Any]]) -> None:
    assert isinstance(python.calls, PythonCalls)
    assert read(python, text) == calls
    content, found = python.parsed(f"I look [1].\n{text}")
    assert (content, len(found)) == ("I look [1].", len(calls))
    for cut in range(1, len(text)):
        assert python.settled(text[:cut]) == 0, "a stream holds back what may be a call"
        assert read(python, text[:cut]) == [], "half of it is text"


@pytest.mark.parametrize(
    "text",
    [
        "[1] says so", "[weather]", "[get(]", "[get(1)]", "[get(a=b)]", "[get(a=1 b=2)]", "[get(a=1, a=2)]",
        "[get(a=1e999)]",
        "[get(a=open('x'))]", "[get(a='it's')]", "[rm(a=1)]", "[get()] and more", f"[get(a={'[' * 500})]", "[get(a=1)",
        f"[get(a={'9' * 5000})]", "[]", r"[get(a='\U99999999')]",
    ],
)  # fmt: skip
def test_what_is_no_call_is_text(python: ToolFormat, text: str) -> None:
    assert python.parsed(text) == (text, [])


SAID = "to=functions.get_weather<|channel|>commentary json<|message|>"
ARGUMENTS = '{"city": "Kiel", "days": 2}'


@pytest.mark.parametrize(
    "header",
    [
        f" {SAID}",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.get_weather json<|message|>",
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
        f"<|start|>assistant {SAID}",
        "<|channel|>commentary to=functions.get_weather<|message|>",
    ],
)
def test_calls_in_channels_are_read(harmony: ToolFormat, header: str) -> None:
    assert isinstance(harmony.calls, HarmonyCalls)
    assert not harmony.several
    assert read(harmony, header + ARGUMENTS) == [("get_weather", json.loads(ARGUMENTS))]
    before = "I look it up.<|end|>"
    if header.startswith("<|start|>"):
        assert harmony.parsed(before + header + ARGUMENTS)[0] == "I look it up."
    for cut in range(len(header)):
        assert harmony.settled(header[:cut]) <= len(header[:cut].rstrip()) - len(header[:cut].strip())
    for text in (header + "[1]", header + "{", header.replace("get_weather", "rm") + "{}", header + '{"a": 1} more'):
        assert harmony.parsed(text)[1] == []


def test_pieces_before_a_call_are_told_and_its_own_are_not(harmony: ToolFormat, python: ToolFormat) -> None:
    for tools, before, call in (
        (harmony, "I look it up.", f"<|end|><|start|>assistant {SAID}{ARGUMENTS}"),
        (python, "I look [1] it up.", "\n[get_weather(city='Kiel')]"),
    ):
        held = HeldPieces(tools.settled)
        told = "".join(piece for letter in before + call for piece in held.push(letter))
        assert told == before
        assert list(held.rest(tools.parsed(before + call)[0])) == []


@pytest.mark.parametrize("template", [PYTHON, HARMONY])
def test_forced_calls_are_held_to_their_schema(template: str) -> None:
    tools = tools_of(template)
    form = tools.form
    seen = LLTokenizer(form.decoder().to_str(), eos_token=[form.end_id or 0])
    grammar = Grammar.of_lark(tools.grammar(TOOLS, several=True), "tools")

    def fits(text: str) -> bool:
        matcher = LLMatcher(seen, grammar.text)
        assert not matcher.is_error(), matcher.get_error()
        return bool(matcher.consume_tokens(form.tokens.encode_marked(text)) and matcher.is_accepting())

    if template is PYTHON:
        good = ['[get_weather(city="Kiel")]', '[get_weather(city="a \\" b", days=3, rain=True, tags=["x", "y"])]',
                "[clock()]",
                '[get_weather(city="Kiel", rain=False), clock()]', '[get_weather(city="x", tags=[])]']  # fmt: skip
        bad = ["[get_weather()]", '[get_weather(days=3, city="x")]', '[get_weather(city="x" days=3)]', "It rains.",
               "[rm()]",
               '[get_weather(city="x", days="many")]', '[get_weather(city="x", other=1)]',
               '[get_weather(city="x", rain=true)]',
               "[get_weather(city='x', )]"]  # fmt: skip
    else:
        good = [f" {SAID}{ARGUMENTS}", ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "x"}']
        bad = [f" {SAID}{{}}", f' {SAID}{{"city": 1}}', "It rains.", f" {SAID}{ARGUMENTS}\n {SAID}{ARGUMENTS}",
               " to=functions.rm<|channel|>commentary json<|message|>{}"]  # fmt: skip
    assert [text for text in good if not fits(text)] == []
    assert [text for text in bad if fits(text)] == []
    assert all(read(tools, text) for text in good)


def test_what_python_cannot_name_is_refused(python: ToolFormat) -> None:
    odd = {"type": "object", "properties": {"first-name": {"type": "string"}}}
    tool = Tool.model_validate({"type": "function", "function": {"name": "greet", "parameters": odd}})
    with pytest.raises(InvalidRequest, match="'first-name', which is no name in Python"):
        python.grammar([tool], several=False)
