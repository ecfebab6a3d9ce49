"""The policies that judge by the end of the prompt or by text, through the engine with a real model."""

from __future__ import annotations

import pytest

from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.samples.tasks import make_document
from tests.amounts import few

PROBED = ("sage", "sablock", "sentencekv", "chunkkv", "tova")
TEXTUAL = ("sablock", "sentencekv")


@pytest.fixture(scope="module")
def document(tiny):
    return make_document("multikey", "prose", 600, 3, tiny.text.count_tokens)


def kept(cache):
    return [head.tolist() for layer in cache.layers for head in layer.positions]


@pytest.mark.parametrize("policy", PROBED)
def test_what_stands_at_the_end_decides_and_is_recorded(tiny, document, policy):
    suffix, empty, questioned = (
        tiny.compress(document.text, policy=policy, compression_ratio=0.75, **options)
        for options in ({}, {"probe": ""}, {"expected_questions": [document.questions[0].text]})
    )
    assert suffix.identity.probe == "<|end|>\n<|assistant|>\n"
    assert (empty.identity.probe, questioned.identity.probe) == ("", "")
    assert questioned.identity.expected_questions == (document.questions[0].text,)
    assert kept(suffix) != kept(empty) != kept(questioned) != kept(suffix)
    last = empty.num_tokens - 1
    assert all(last in head for head in kept(empty)), "the document's last token observes, and stays"


@pytest.mark.parametrize("policy", few(2, PROBED))
def test_an_expected_question_keeps_more_of_its_answer(tiny, document, policy):
    """Summed over heads, layers and questions: the tokens of the answer's value that stay."""
    ids = tiny.text.document(document.text, "chat").token_ids
    stays = {False: 0, True: 0}
    how = {"policy": policy, "compression_ratio": 0.875}
    unasked = tiny.compress(document.text, **how)
    for question in document.questions[:8]:
        value = tiny.text.encode(question.answer)
        starts = [i for i in range(len(ids)) if ids[i : i + len(value)] == value]
        tokens = {start + i for start in starts for i in range(len(value))}
        questioned = tiny.compress(document.text, **how, expected_questions=[question.text])
        for expected, cache in ((False, unasked), (True, questioned)):
            stays[expected] += sum(len(tokens & set(head)) for head in kept(cache))
    assert stays[True] > 1.2 * stays[False]


@pytest.mark.parametrize("policy", TEXTUAL)
def test_a_policy_that_reads_text_is_refused_without_a_tokenizer(llama, policy):
    with pytest.raises(PolicyUnsupported, match=f"{policy}.*no tokenizer") as refused:
        llama.engine.prepare(llama.ids, policy=policy)
    assert refused.value.param == "policy"


@pytest.mark.parametrize(
    ("policy", "params", "named"),
    [
        ("sage", {"union": "pad"}, "'refill', 'ragged'"),
        ("sage", {"multiple": 0}, "from 1"),
        ("sage", {"window": 3}, "no parameter 'window'"),
        ("sablock", {"block": 65}, "to 63"),
        ("sablock", {"sizes": "even"}, "'odd', 'all', 'powers'"),
        ("sablock", {"tau": 1.5}, "from 0 to 1"),
        ("sablock", {"form": "sum"}, "'scaled', 'power'"),
        ("sentencekv", {"semantic_factor": 0.5}, "from 1"),
        ("chunkkv", {"chunk": 0}, "from 1"),
        ("chunkkv", {"share": 0.5}, "no parameter 'share'"),
        ("knorm", {"probe": ""}, "no parameter 'probe'"),
    ],
)
def test_bad_parameters_are_refused_by_name(tiny, policy, params, named):
    with pytest.raises(InvalidRequest, match=named) as refused:
        tiny.prepare("A text.", policy=policy, policy_params=params)
    assert refused.value.param == f"policy_params.{next(iter(params))}"


@pytest.mark.parametrize("policy", [*PROBED, "knorm"])
def test_a_short_document_under_a_template_fits(tiny, policy):
    """Defaults shrink; what the template wrote stays."""
    prefix = len(tiny.text.document("", "chat").token_ids)
    for words, ratio in [(9, 0.3), (40, 0.8), (40, 0.5)]:
        cache = tiny.compress("word, " * words, policy=policy, compression_ratio=ratio)
        assert all(head[:prefix] == list(range(prefix)) for head in kept(cache))
