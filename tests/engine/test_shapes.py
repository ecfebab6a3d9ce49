"""Answers in a shape: the mask against every token tried by itself, JSON of any schema, batches with other rows."""

from __future__ import annotations

import ctypes
import json
import random
import re
import time
from contextlib import suppress
from types import SimpleNamespace

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.decode.grammar import Grammar, least_json_bytes
from kvshelf.engine.decode.guide import Guide
from kvshelf.engine.decode.slots.choices import TokenRules, _terms_of
from kvshelf.errors import InvalidRequest

DOCUMENT = "The harbour opens at six. " * 20 + "The access code of the amber falcon is 482913. " + "Boats wait. " * 20
QUESTION = "What is the access code of the amber falcon?"
CODE = {
    "type": "object",
    "properties": {"code": {"type": "string", "pattern": "^[0-9]{6}$"}},
    "required": ["code"],
    "additionalProperties": False,
}


def of_schema(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "fact", "schema": schema}}}


@pytest.fixture(scope="module")
def cache(tiny):
    return tiny.compress(DOCUMENT, policy="full")


def test_an_answer_fits_its_schema(tiny, cache):
    answer = tiny.answer(cache, QUESTION, shape=of_schema(CODE))
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.text), CODE)
    assert (
        answer.token_ids[-1] not in tiny.facts.end_ids()
    )  # nothing can follow the last brace, so no step waits for the end


def test_an_answer_is_one_of_the_choices(tiny, cache):
    assert tiny.answer(cache, QUESTION, shape={"choices": ["175206", "482913", "930448"]}).text == "482913"
    accented = ['ça "va"\n', "naïve\\d"]
    assert tiny.answer(cache, QUESTION, shape={"choices": accented}).text in accented


def test_a_choice_that_goes_on_from_another_may_follow(tiny, cache):
    """ "48" is allowed to end or to go on: the model decides."""
    assert tiny.answer(cache, QUESTION, shape={"choices": ["482", "482913"]}).text == "482913"


def test_a_grammar(tiny, cache):
    answer = tiny.answer(cache, QUESTION, shape={"grammar": 'start: "code " /[0-9]{6}/ "."'})
    assert re.fullmatch(r"code [0-9]{6}\.", answer.text)
    assert answer.finish_reason == "stop"


def mask(logits, constraints):
    """Add to the logits what a step adds, whose rows have these constraints."""
    rules = TokenRules(torch.empty(len(logits), -(-logits.shape[1] // 32), dtype=torch.int32), None)
    rules.write((row, SimpleNamespace(constraint=own, finished=False)) for row, own in constraints.items())
    logits += _terms_of(rules.allowed, logits)


def test_the_mask_has_the_tokens_that_can_follow_each_by_itself(tiny):
    """Each of the vocabulary's tokens is appended to the text so far, and the result is looked for among the words."""
    words = ["482913", "48 91", "the harbour", "then"]
    ends, decode = tiny.facts.end_ids(), tiny.text.decoder().decode
    grammar = Grammar.of({"choices": words})
    size = tiny.model.config.vocab_size
    for said in ("", "the", "4", "48"):
        constraint = tiny.asker.guide.constraint(grammar, 9)
        for token in tiny.text.encode(said):
            constraint.take(token)
        logits = torch.zeros(1, size)
        mask(logits, {0: constraint})
        allowed = set(logits[0].isfinite().nonzero().flatten().tolist())
        texts = {token: decode([token], skip_special_tokens=True) for token in range(size)}
        fit = {t for t, text in texts.items() if text and any(word.startswith(said + text) for word in words)}
        assert allowed == fit | (set(ends) if said in words else set()), said


SCALARS = st.sampled_from(
    [{"type": "boolean"}, {"type": "null"}, {"enum": ["red", 7, None]}, {"const": {"a": [1]}},
     {"type": "integer", "minimum": 0, "maximum": 99}, {"type": "string", "maxLength": 3},
     {"type": "string", "pattern": "^[a-c]{2}$"}]
)  # fmt: skip
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: (
        st.builds(lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 2}, inner)
        | st.builds(lambda ways: {"anyOf": ways}, st.lists(inner, min_size=1, max_size=2))
        | st.builds(
            lambda fields: {
                "type": "object", "properties": fields, "required": list(fields), "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from("abcü"), inner, max_size=3),
        )
    ),
    max_leaves=5,
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 2**20))
def test_whatever_is_drawn_fits_the_schema(tiny, cache, schema, seed):
    answer = tiny.answer(cache, QUESTION, max_new_tokens=300, temperature=4.0, seed=seed, shape=of_schema(schema))
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.text), schema)
    assert len(answer.text.encode()) >= least_json_bytes(schema)


def test_rows_beside_an_answer_in_a_shape_stay_what_they_are(tiny, cache):
    def answered(shapes):
        batch = tiny.batch()
        rows = [
            tiny.start(cache, tiny.encode_query(cache, QUESTION), Sampling(16, grammar=Grammar.of(shape), logprobs=0))
            for shape in shapes
        ]
        while open_ones := [row for row in rows if not row.finished]:
            batch.step(open_ones)
        return [(row.token_ids, [told.logprob for told in row.logprobs.tokens]) for row in rows]

    mixed = answered([{}, of_schema(CODE), {}, {"choices": ["482", "175"]}])
    plain = answered([{}, {}, {}, {}])
    for row in (0, 2):
        assert mixed[row][0] == plain[row][0]
        # Sums differ in their last bits where rows beside end earlier; no mask touches a row, see below.
        assert mixed[row][1] == pytest.approx(plain[row][1], abs=1e-4)
    assert mixed[1][0] != plain[1][0]


def test_a_mask_touches_no_other_row(tiny):
    logits = torch.randn(4, tiny.model.config.vocab_size)
    before = logits.clone()
    constraints = {row: tiny.asker.guide.constraint(Grammar.of({"grammar": 'start: "4" /.+/'}), 9) for row in (0, 2)}
    mask(logits, constraints)
    assert torch.equal(logits[[1, 3]], before[[1, 3]])
    allowed = logits[[0, 2]].isfinite()
    assert torch.equal(logits[[0, 2]][allowed], before[[0, 2]][allowed])
    assert 0 < int(allowed.sum()) < allowed.numel()


def test_the_length_limit_says_that_json_is_cut(tiny, cache):
    names = {"type": "object", "properties": {"n": {"type": "string"}}, "required": ["n"]}
    answer = tiny.answer(cache, QUESTION, max_new_tokens=12, temperature=3.0, seed=1, shape=of_schema(names))
    assert answer.finish_reason == "length"


@pytest.mark.parametrize(
    ("shape", "param", "says"),
    [
        (of_schema({"type": "strng"}), "response_format", "strng"),
        (of_schema({"not": {"type": "string"}}), "response_format", "not"),
        (of_schema({"type": "integer", "minimum": 5, "maximum": 3}), "response_format", "Unsatisfiable"),
        (of_schema({"$ref": "#/nowhere"}), "response_format", "/nowhere"),
        (of_schema({"type": "string", "pattern": "("}), "response_format", "regex"),
        ({"response_format": {"type": "yaml"}}, "response_format", "yaml"),
        ({"grammar": "start: missing"}, "grammar", "missing"),
        ({"grammar": "?"}, "grammar", "cannot be used"),
        ({"choices": []}, "choices", "not empty"),
        ({"choices": ["a" * 9000]}, "max_tokens", "9000 bytes"),
        (of_schema({"type": "array", "items": {"type": "boolean"}, "minItems": 900}), "max_tokens", "5400 bytes"),
        ({"schema": {}}, "shape", "schema"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_the_model_runs(tiny, cache, shape, param, says):
    ran = []
    handle = tiny.model.register_forward_pre_hook(lambda *_: ran.append(1))
    try:
        with pytest.raises(InvalidRequest, match=says) as refused:
            tiny.answer(cache, QUESTION, shape=shape)
    finally:
        handle.remove()
    assert refused.value.param == param
    assert not ran


@pytest.mark.parametrize(
    ("schema", "shortest"),
    [
        ({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}, '{"a": null}'),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"enum": ["long one", 1]}}}, "1"),
        ({"type": "array", "items": {"type": "string", "minLength": 2}, "minItems": 2}, '["ab", "ab"]'),
        ({"anyOf": [{"const": [1, 2]}, {"type": ["string", "boolean"]}]}, '""'),
        (True, "1"),
    ],
)
def test_the_least_bytes_of_a_schema(schema, shortest):
    assert least_json_bytes(schema) == len(shortest)


@pytest.mark.parametrize(
    ("node", "least"),
    [
        ({"type": "array", "items": {"$ref": "#/$defs/node"}}, 2),
        ({"anyOf": [{"$ref": "#/$defs/node"}] * 9 + [{"type": "string"}]}, 1),
        (
            {
                "type": "object",
                "properties": {"l": {"$ref": "#/$defs/node"}, "r": {"$ref": "#/$defs/node"}},
                "required": ["l", "r"],
            },
            len('{"l": 1, "r": 1}'),
        ),
    ],
)
def test_a_schema_that_leads_back_to_itself_has_a_least_size(node, least):
    """Each reference is followed once: two of them would otherwise double at every level."""
    assert least_json_bytes({"$ref": "#/$defs/node", "$defs": {"node": node}}) == least


_TYPES = ["object", "array", "string"]
_COUNTS = ["minItems", "minLength", "required"]
_NESTING = ["properties", "items", "enum", "const", "anyOf", "oneOf", "$ref", "$defs", "pattern", "prefixItems"]
_WORDS = st.sampled_from(["type", "a", "#/$defs/a", "additionalProperties", *_TYPES, *_COUNTS, *_NESTING])
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | _WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=4),
    max_leaves=12,
)


@given(schema=st.dictionaries(_WORDS, _JSON, max_size=5))
@settings(deadline=None, max_examples=200)
def test_what_is_no_schema_is_refused_and_breaks_nothing(tiny, schema):
    """Keywords with any values: the engine takes them for a schema, or says that they are none."""
    with suppress(InvalidRequest):
        tiny.asker.guide.constraint(Grammar.of(of_schema(schema)), 100_000)


def test_logprobs_are_the_models(tiny, cache):
    """Of each token that the model was given back, from one pass over question and answer."""
    question = tiny.encode_query(cache, QUESTION)
    answer = tiny.answer(cache, question, shape={"choices": ["175206", "930448"]}, logprobs=4)
    with torch.no_grad(), tiny.attached(cache) as past:
        logits = tiny.model(torch.tensor([question + answer.token_ids]), **{CACHE_ARGUMENT: past}).logits[0]
    expected = logits[len(question) - 1 : -1].log_softmax(dim=-1)
    assert len(answer.logprobs) == len(answer.token_ids)
    for told, token, row in zip(answer.logprobs, answer.token_ids, expected, strict=True):
        assert abs(told.logprob - float(row[token])) < 1e-4
        best = row.topk(4)
        assert [t.token for t in told.top_logprobs] == [tiny.text.decode([i]) for i in best.indices.tolist()]
        assert all(abs(t.logprob - v) < 1e-4 for t, v in zip(told.top_logprobs, best.values.tolist(), strict=True))
    assert bytes(b for told in answer.logprobs for b in told.bytes).decode() == answer.text


def test_padding_of_the_vocabulary_never_comes(tiny):
    size = tiny.model.config.vocab_size
    constraint = tiny.asker.guide.constraint(Grammar.of({"grammar": "start: /.+/"}), 9)
    logits = torch.zeros(3, size + 7)
    mask(logits, {1: constraint})
    assert logits[1, :size].isfinite().any()
    assert not logits[1, size:].isfinite().any()
    assert not logits[[0, 2]].any()


TOGETHER = {"allOf": [{"type": "string", "pattern": f"^.*[a-z]{{{n}}}.*$"} for n in range(1, 60)]}
LATE = "start: /(.*a.{30}|.*b.{25}c)*/"
"""A text of it may go on in so many ways that each step finds thousands of new ones."""


@pytest.mark.parametrize(
    ("shape", "param"),
    [
        pytest.param(of_schema(TOGETHER), "response_format", id="schema", marks=pytest.mark.slow),
        pytest.param({"grammar": "start: A\nA: /.*a.{30}/ & /.*b.{29}/ & ~/.*c.{20}/"}, "grammar", id="grammar"),
    ],
)
def test_a_grammar_that_takes_minutes_to_compile_is_refused_after_its_limit(tiny, cache, shape, param):
    """3 kB of schema took minutes, in a thread that nothing could end."""
    before = time.process_time()
    with pytest.raises(InvalidRequest, match=r"takes more than 2 s to compile \(\d+ bytes\)") as refused:
        tiny.answer(cache, QUESTION, shape=shape)
    assert refused.value.param == param
    assert time.process_time() - before < 1, "this process compiled nothing of it"
    assert tiny.answer(cache, QUESTION, shape={"choices": ["175206", "482913"]}).text == "482913"


def test_what_is_compiled_has_a_limit_of_bytes():
    """Choices of 1 MB and tools of any size were compiled."""
    with pytest.raises(InvalidRequest, match=r"choices makes a grammar of \d+ bytes, and at most 262144") as refused:
        Grammar.of({"choices": [f"{n}" + "x" * 1000 for n in range(1024)]})
    assert refused.value.param == "choices"


def test_an_answer_s_grammar_has_a_limit_of_states(tiny):
    """It took 6.5 s of masks, 1 s of it for one token: all answers of a replica wait for that."""
    constraint, mask = tiny.asker.guide.constraint(Grammar.of({"grammar": LATE}), 4000), bytearray(1 << 12)
    at, nbytes = (ctypes.c_char * len(mask)).from_buffer(mask), -(-constraint.vocabulary // 32) * 4
    ids, draw, began = [tiny.text.encode(letter)[0] for letter in "ab"], random.Random(1), time.process_time()

    def go_on():
        for _ in range(4000):
            constraint.fill(ctypes.addressof(at), nbytes)
            constraint.take(draw.choice(ids))

    with pytest.raises(InvalidRequest, match="too many states"):
        go_on()
    assert time.process_time() - began < 10


def test_a_grammar_without_an_answer_is_refused_in_one_line(tiny):
    """The state of the parser stood behind it, 500 characters of it."""
    constraint, mask = tiny.asker.guide.constraint(Grammar.of({"grammar": "start: start"}), 8), bytearray(1 << 12)
    at, nbytes = (ctypes.c_char * len(mask)).from_buffer(mask), 4 * -(-constraint.vocabulary // 32)
    with pytest.raises(InvalidRequest, match=r"^the answer cannot be held to this grammar: \w+$"):
        constraint.fill(ctypes.addressof(at), nbytes)


def test_compiled_grammars_take_bounded_memory(tiny):
    """128 stayed, whatever their size: 5.8 GB of the largest."""
    guide = Guide(tiny.text.decoder(), tiny.facts.end_ids(), tiny.text.longest_token)
    for number in range(6):
        texts = [f"{number} {place} " + "x" * 900 for place in range(128)]
        guide.constraint(Grammar.of({"choices": texts}), 2000)
    assert len(guide._compiled) == 4
    kept = next(reversed(guide._compiled.values()))
    guide.constraint(Grammar.of({"choices": texts}), 2000)
    assert next(reversed(guide._compiled.values())) is kept


@pytest.mark.parametrize(
    "shape",
    [
        {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
        {"grammar": "start: /" + "(" * 30_000 + "a" + ")" * 30_000 + "/"},
        of_schema({"type": "string", "pattern": "(" * 30_000 + "a" + ")" * 30_000}),
        of_schema({"type": "string", "pattern": "foo**["}),
        {"grammar": "".join(f"r{n}: r{n + 1}\n" for n in range(4000)) + 'r4000: "a"\nstart: r0'},
    ],
    ids=["groups", "groups of a pattern", "groups of a schema's pattern", "no pattern", "a chain of rules"],
)
def test_no_grammar_ends_the_process(tiny, shape):
    """Of other servers such grammars have ended the process, with one request."""
    with suppress(InvalidRequest):
        tiny.asker.guide.constraint(Grammar.of(shape), 64)
