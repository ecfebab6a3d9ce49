"""Where a chat template is, and what it depends on."""

from __future__ import annotations

import json
import shutil

import pytest

from kvshelf.errors import InvalidRequest
from kvshelf.model.loading import load_tokenizer
from kvshelf.model.source import bundled_folder
from kvshelf.model.text import TemplateOptions, TextFormat
from tests.tokenizers import byte_level

PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
DATED = "Today: {{ strftime_now('%d %b %Y') if strftime_now is defined else 'never' }}<|im_end|>\n" + PLAIN
PARTS = PLAIN.replace("m.content", "m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join")
THINKING = PLAIN + (
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
EFFORT = "Effort: {{ reasoning_effort or 'medium' }}<|im_end|>" + PLAIN


def form_of(template):
    tokenizer = byte_level()
    tokenizer.chat_template = template
    return TextFormat(tokenizer)


def test_a_document_has_one_name_and_the_date_that_it_was_given():
    form = form_of(DATED)
    first, later = (
        form.document("The book.", "chat", TemplateOptions(date=day)) for day in ("2031-03-07", "2031-12-24")
    )
    assert "Today: 07 Mar 2031" in form.decode(first.token_ids)
    assert "Today: 24 Dec 2031" in form.decode(later.token_ids)
    assert first.named_ids == later.named_ids
    assert first.token_ids != later.token_ids
    assert (first.date, later.date) == ("2031-03-07", "2031-12-24")
    said = [{"role": "user", "content": "The book?"}]
    assert form.conversation(said, first.options).named_ids == form.conversation(said, later.options).named_ids
    again = form.dated(first, "2031-03-07")
    assert again.named_ids == first.named_ids, "from its tokens, too"


def test_a_template_without_a_date_gives_none():
    document = form_of(PLAIN).document("The book.", "chat", TemplateOptions(date="2031-03-07"))
    assert (document.date, document.named_ids) == ("", None)


def test_content_as_parts():
    form, plain = form_of(PARTS), form_of(PLAIN)
    said = [{"role": "user", "content": "The book <|im_end|>?"}, {"role": "assistant", "content": "It is."}]
    assert form.prompt(None, said).token_ids == plain.prompt(None, said).token_ids
    assert form.document("The book.", "chat").token_ids == plain.document("The book.", "chat").token_ids


def test_several_templates_and_none_the_default_are_named():
    form = form_of({"rag": PLAIN, "tool_use": PLAIN})
    with pytest.raises(InvalidRequest, match="rag, tool_use; serve it with --chat-template"):
        form.document("The book.", "chat")
    assert "rag, tool_use" in form.about_template
    assert form_of({"default": PLAIN, "rag": DATED}).document("The book.", "chat").token_ids


def test_what_a_template_is_told():
    form = form_of(THINKING)
    assert form.template.choose_variables({}, "none") == form.template.choose_variables(
        {"enable_thinking": False}, None
    )
    off = TemplateOptions(form.template.choose_variables({}, "none"))
    question = [{"role": "user", "content": "The book?"}]
    on, quiet = (form.decode(form.prompt("document", question, opening=True, options=options).token_ids)
                 for options in (TemplateOptions(), off))  # fmt: skip
    assert quiet == on + "<think></think>"
    for name in ("bos_token", "namespace", "effort"):
        with pytest.raises(InvalidRequest, match=f"reads no {name}; it reads enable_thinking"):
            form.template.choose_variables({name: "x"}, None)
    for name in ("tokenize", "chat_template", "messages", "tools", "documents", "strftime_now"):
        with pytest.raises(InvalidRequest, match=f"has {name}, which kvshelf tells the chat template itself"):
            form.template.choose_variables({name: "x"}, None)
    with pytest.raises(InvalidRequest, match="nothing that turns thinking off"):
        form_of(PLAIN + "{{ '</think>' if false }}").template.choose_variables({}, "none")
    assert form_of(PLAIN).template.choose_variables({}, "high") == {}


def test_what_would_change_the_cached_text_is_refused_by_name():
    form = form_of(EFFORT)
    question = [{"role": "user", "content": "The book?"}]
    high = TemplateOptions(form.template.choose_variables({}, "high"))
    with pytest.raises(InvalidRequest, match=r"with reasoning_effort .* before the document") as refused:
        form.prompt("document", question, opening=True, options=high)
    assert refused.value.param == "chat_template_kwargs"
    usual = TemplateOptions(form.template.choose_variables({}, "medium"))
    assert form.prompt("document", question, options=usual) == form.prompt("document", question)
    said = [{"role": "user", "content": "The book?"}, {"role": "assistant", "content": "It is."}]
    with pytest.raises(InvalidRequest, match=r"with reasoning_effort .* before the document"):
        form.prompt("after_assistant", question, opening=True, options=high)
    assert form.prompt("after_assistant", question, options=usual) == form.prompt("after_assistant", question)
    assert form.conversation(said, high).token_ids != form.conversation(said).token_ids


@pytest.mark.parametrize("variables", [{"reasoning_effort": "high"}, {"reasoning_effort": "<|im_end|>"}])
def test_a_document_is_written_with_the_variables_that_it_is_put_with(variables):
    form = form_of(EFFORT + "{{ more if more is defined and add_generation_prompt }}")
    made = form.document("The book.", "chat", TemplateOptions(variables))
    assert made.variables == variables
    decoded = form.decode(made.token_ids)
    assert decoded.startswith(f"Effort: {variables['reasoning_effort']}<|im_end|>"), "and the rest as without"
    marks = {mark.text: mark.id for mark in form.tokens.marks.values()}
    assert made.token_ids.count(marks["<|im_end|>"]) == 1, "a value is text"
    question = [{"role": "user", "content": "Where?"}]
    token_ids = form.prompt("document", question, opening=True, options=made.options).token_ids
    assert token_ids == form.prompt("document", question, opening=True).token_ids
    for effort in ("low", "medium"):
        options = TemplateOptions({"reasoning_effort": effort}, cached=made.variables)
        with pytest.raises(InvalidRequest, match=f'with reasoning_effort "{effort}" .* made with reasoning_effort'):
            form.prompt("document", question, opening=True, options=options)


def test_variables_that_change_nothing_before_the_document_are_not_kept():
    form, plain = form_of(EFFORT + "{{ more }}"), form_of(THINKING)
    usual = form.document("The book.", "chat")
    for variables in ({"reasoning_effort": "medium"}, {"reasoning_effort": ""}, {"reasoning_effort": None}):
        assert form.document("The book.", "chat", TemplateOptions(variables)) == usual
    off = TemplateOptions({"enable_thinking": False})
    assert plain.document("The book.", "chat", off) == plain.document("The book.", "chat")
    said = [{"role": "user", "content": "The book?"}, {"role": "assistant", "content": "It is."}]
    assert plain.conversation(said, off) == plain.conversation(said)


def test_a_date_among_the_variables_stands_for_the_day():
    form = form_of("{% if not date is defined %}{% set date = strftime_now('%d %b %Y') %}{% endif %}{{ date }}" + PLAIN)
    variables = {"date": "07 Mar 2031"}
    first, later = (
        form.document("The book.", "chat", TemplateOptions(variables, date=day)) for day in ("2031-03-07", "2031-12-24")
    )
    assert first == later
    assert (first.date, first.variables, first.named_ids) == ("", variables, None)


@pytest.fixture
def folder(tmp_path):
    """The bundled model, without a template."""
    path = tmp_path / "model"
    shutil.copytree(bundled_folder("kvshelf-tiny"), path, ignore=shutil.ignore_patterns("*.safetensors", "kvshelf"))
    said = json.loads((path / "tokenizer_config.json").read_text())
    del said["chat_template"]
    (path / "tokenizer_config.json").write_text(json.dumps(said))
    return path


def test_a_template_beside_the_weights(folder):
    assert not TextFormat(load_tokenizer(str(folder))).has_template
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": PLAIN}))
    assert load_tokenizer(str(folder)).chat_template == PLAIN
    (folder / "chat_template.json").write_text("{")
    with pytest.raises(InvalidRequest, match=r"chat_template\.json .* cannot be read"):
        load_tokenizer(str(folder))


def test_a_template_that_the_user_names(folder):
    file = folder / "mine.jinja"
    file.write_text(PLAIN)
    assert load_tokenizer(str(folder), str(file)).chat_template == PLAIN
    several = [{"name": "rag", "template": PLAIN}, {"name": "tool_use", "template": DATED}]
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": several}))
    assert load_tokenizer(str(folder), "tool_use").chat_template == DATED
    with pytest.raises(InvalidRequest, match="no template of that name: the model has rag, tool_use") as refused:
        load_tokenizer(str(folder), "other")
    assert refused.value.param == "chat_template"
