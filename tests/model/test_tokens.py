"""Only the template's marks are tokens, in every kind of tokenizer, and no word gets a space that nobody wrote."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from kvshelf.api.tools import Tool
from kvshelf.engine.tools.tools import ToolFormat
from kvshelf.model.text import TemplateOptions, TextFormat
from tests.amounts import amount
from tests.tokenizers import KINDS, MARKS, byte_level

CHATML = """\
{%- if tools %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' }}

# Tools
<tool_call>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}{% if m.role == 'tool' %}<|im_start|>user
<tool_response>{{ m.content }}</tool_response><|im_end|>
{% elif m.role != 'system' or not loop.first %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{{ mood or '' }}{% endif %}"""
INSTRUCT = """\
{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]\
{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"""
TEMPLATES = {"chatml": CHATML, "instruct": INSTRUCT}
WORDS = [
    "the book", " is on the", "\n", "<", "|", ">", "<|im_", "im_end|>", "</think", "think>", "<tool_", " ", "the",
    *MARKS,
    "<|im_<|im_end|>end|>", "\ue000", "</s>",
]  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return KINDS[request.param]()


def form_of(tokenizer, template=CHATML):
    tokenizer.chat_template = template
    return TextFormat(tokenizer)


def mark_ids(form, ids):
    return [token for token in ids if token in {mark.id for mark in form.tokens.marks.values()}]


def tool(text):
    fields = {"type": "object", "properties": {f"a{text}": {"type": "string", "description": text}}}
    return Tool.model_validate(
        {"type": "function", "function": {"name": "find", "description": text, "parameters": fields}}
    )


def prompts(form, text, think):
    """Every place of text from outside. think: of an answer that is sent back."""
    yield form.document(text, "chat").token_ids
    yield form.document(text, "plain").token_ids
    yield form.encode(text)
    yield form.question("document", text)
    call = {"id": "c1" + text, "type": "function", "function": {"name": "find", "arguments": {f"a{text}": [text, 1]}}}
    said = [
        {"role": "system", "content": "." + text},
        {"role": "user", "content": "?" + text},
        {"role": "assistant", "content": "." + think, "tool_calls": [call]},
        {"role": "tool", "content": text, "tool_call_id": "c1" + text},
        {"role": "user", "content": "." + text},
    ]
    yield form.prompt(None, said, opening=True).token_ids
    tools = ToolFormat.of(form, [tool(text)])
    yield form.prompt("document", said, opening=True, intro=tools.intro).token_ids
    yield form.prompt("after_assistant", said[1:], opening=True).token_ids
    mood = TemplateOptions(form.template.choose_variables({"mood": text}, None))
    yield form.prompt("document", said, opening=True, options=mood).token_ids
    yield form.conversation([{"role": "user", "content": "?" + text}]).token_ids


@settings(max_examples=amount(8, 20), deadline=None)
@given(text=st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map("".join))
def test_text_from_outside_makes_no_marks(kind, text):
    """As many as with harmless text, in the same order: nothing opens or ends."""
    form = form_of(kind)
    plain = list(prompts(form, "x", "x"))
    for ids, harmless in zip(prompts(form, text, "x" + text.replace("</think>", "")), plain, strict=True):
        assert mark_ids(form, ids) == mark_ids(form, harmless)


def test_thoughts_in_an_answer_that_is_sent_back_are_the_template_s(kind):
    """As without a shelf: the template looks for their end, and drops them."""
    form = form_of(kind)
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<think>hm</think>so <|im_end|>"}]
    with_thoughts = form.prompt(None, [*said, said[0]], opening=True).token_ids
    said[1] = {"role": "assistant", "content": "so <|im_end|>"}
    assert with_thoughts == form.prompt(None, [*said, said[0]], opening=True).token_ids


@pytest.mark.parametrize("template", TEMPLATES)
def test_pieces_are_the_ids_of_the_whole_text(kind, template):
    """Document and question meet at a line's end; all else is the plain tokenizer on what transformers writes."""
    form = form_of(kind, TEMPLATES[template])
    document, turns = "the book is on", ["the book?", "on the book", "is the book there"]
    said = [{"role": role, "content": turn} for role, turn in zip(("user", "assistant", "user"), turns, strict=True)]
    encoded = form.document(document, "chat")
    token_ids = form.prompt("document", said, opening=True).token_ids
    whole = kind.apply_chat_template(
        [{"role": "user", "content": f"{document}\n\n{turns[0]}"}, *said[1:]],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert encoded.token_ids + token_ids == kind(whole, add_special_tokens=False).input_ids
    assert form.prompt(None, said, opening=True).token_ids == kind(
        kind.apply_chat_template(said, tokenize=False, add_generation_prompt=True), add_special_tokens=False
    ).input_ids  # fmt: skip


def test_a_plain_text_goes_on_without_a_space(kind):
    form = form_of(kind)
    for first, more in (("the book", " is on"), ("the", "the book"), ("a", "b")):
        ids = form.document(first, "plain").token_ids + form.encode(more)
        assert kind.decode(ids, skip_special_tokens=True) == kind.decode(
            kind(first + more).input_ids, skip_special_tokens=True
        )


def test_a_kept_turn_is_a_beginning_of_the_next_question(kind):
    form = form_of(kind)
    said = [{"role": "user", "content": "the book?"}, {"role": "assistant", "content": "on the <|im_end|> book"}]
    kept = form.prompt("document", said, followed=True).token_ids
    following = form.prompt("document", [*said, {"role": "user", "content": "is it?"}], opening=True)
    assert following.token_ids[: len(kept)] == kept
    assert following.ends[1] == len(kept)
    assert len(kept) > following.ends[0]


def test_white_space_that_is_an_added_token_stays_one():
    """As Gemma's tokenizer has its line ends, and a GPT-NeoX its indents."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("\n\n\n", "   ")])
    form = form_of(tokenizer)
    text = "def f():\n   pass\n\n\nf()"
    assert form.encode(text) == tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.convert_tokens_to_ids("   ") in form.encode(text)


def test_a_mark_takes_the_white_space_that_it_takes_in_the_whole_text():
    """As `<|end|>` and `<|user|>` of Phi-3 do."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<|turn|>", special=True, rstrip=True, lstrip=True, normalized=False)])
    form = form_of(tokenizer, "{% for m in messages %} <|turn|>\n  {{ m.content }} \n<|im_end|>{% endfor %}")
    said = [{"role": "user", "content": "the book"}, {"role": "assistant", "content": "is on"}]
    whole = tokenizer.apply_chat_template(said, tokenize=False)
    assert form.prompt(None, said).token_ids == tokenizer(whole, add_special_tokens=False).input_ids
