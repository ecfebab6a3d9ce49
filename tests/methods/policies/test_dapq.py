"""DapQ: against what tokens appended to a plain model attend to."""

from __future__ import annotations

import copy

import pytest
import torch

from kvshelf.engine.engine import Engine
from kvshelf.errors import DocumentTooLong, InvalidRequest
from kvshelf.methods.policies import build
from kvshelf.methods.policies.view import DocumentView
from tests.methods.policies.test_chunked import SHAPES, document, small
from tests.views import random_layer


def attention(model, ids, positions):
    """Weights per layer, `[q_heads, T, T]`, by transformers alone."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            out = model(torch.tensor([ids]), position_ids=torch.tensor([positions]), output_attentions=True)
        return [weights[0] for weights in out.attentions]
    finally:
        model.set_attn_implementation(before)


def naive(weights, rows, columns, kv_heads, kernel, budget):
    """Mean weight of the last `rows` rows on each column, zero-padded mean over neighbours, the best of each head."""
    kept = []
    for group in weights[:, -rows:, :columns].double().chunk(kv_heads):
        mean = group.mean(dim=(0, 1)).tolist()
        near = [
            sum(mean[k] for k in range(j - kernel // 2, j + kernel // 2 + 1) if 0 <= k < columns) / kernel
            for j in range(columns)
        ]
        kept.append(sorted(sorted(range(columns), key=lambda j: (-near[j], j))[:budget]))
    return kept


@pytest.mark.parametrize(
    ("params", "rows"), [({}, 32), ({"pseudo": 5}, 5), ({"offset": 40}, 32), ({"pseudo": 60, "kernel": 1}, 60)], ids=str
)
def test_keeps_what_appended_tokens_attend_to(oracle, params, rows):
    """A document of token ids has no template: its own last tokens stand again where the answer will."""
    ids = oracle.ids[:150]
    cache = oracle.engine.compress(ids, policy="dapq", budget_tokens=50, **params)
    start = 150 + params.get("offset", 0)
    plain = attention(oracle.model, ids + ids[-rows:], [*range(150), *range(start, start + rows)])
    for record, weights in zip(cache.layers, plain, strict=True):
        expected = naive(weights, rows, 150, oracle.model.config.num_key_value_heads, params.get("kernel", 5), 50)
        same = [len(set(ours.tolist()) & set(theirs)) for ours, theirs in zip(record.positions, expected, strict=True)]
        assert min(same) >= 49, "but for one near tie: two ways to multiply fp32"


@pytest.mark.parametrize(("kind", "group"), SHAPES)
def test_it_is_the_rule_in_float64(kind, group):
    """Pseudo tokens at N, N + 1 ..., all of what they attend to, none of what they leave behind."""
    engine, ids = Engine(small(kind, group)), document(120)
    cache = engine.compress(ids, policy="dapq", budget_tokens=40, pseudo=9)
    weights = attention(copy.deepcopy(engine.model).double(), ids + ids[-9:], list(range(129)))
    for record, of_layer in zip(cache.layers, weights, strict=True):
        assert [own.tolist() for own in record.positions] == naive(of_layer, 9, 120, 2, 5, 40)
    assert cache.next_position == 120


def test_the_template_and_its_suffix(tiny):
    """In the chat layout the pseudo tokens are the template's suffix, over and over, cut at the length."""
    job = tiny.prepare("One. Two. Three. " * 30, policy="dapq", budget_tokens=64)
    [probe] = job.passes
    suffix = job.document.suffix
    assert len(probe.token_ids) == 32
    assert probe.first_position == job.num_tokens
    assert all(token == suffix[i % len(suffix)] for i, token in enumerate(probe.token_ids))
    assert job.identity.probe == tiny.text.decode(suffix)
    plain = attention(
        tiny.model, [*job.document.token_ids, *probe.token_ids], list(range(job.num_tokens + 32))
    )  # fmt: skip
    protected = job.document.protected_prefix
    for record, weights in zip(tiny.run(job).cache.layers, plain, strict=True):
        for ours, theirs in zip(record.positions, naive(weights, 32, job.num_tokens, 2, 5, 64), strict=True):
            assert ours[:protected].tolist() == list(range(protected))
            # The template's tokens may push out as many of the others.
            assert len(set(ours.tolist()) & set(theirs)) >= 64 - protected


def test_a_given_text_and_expected_questions_come_first(tiny):
    document = "One. Two. Three. " * 30
    job = tiny.prepare(document, policy="dapq", policy_params={"probe": "What is it?", "pseudo": 9})
    ids = tiny.text.encode("What is it?")
    assert job.passes[0].token_ids == tuple((ids * 9)[:9])
    assert job.identity.probe == "What is it?"
    job = tiny.prepare(document, policy="dapq", expected_questions=["What is one?", "And what is the second of two?"])
    assert [probe.token_ids for probe in job.passes] == list(job.document.questions)
    assert len({len(probe.token_ids) for probe in job.passes}) == 2
    cache = tiny.run(job).cache
    assert all(len(head) == job.budget.tokens for record in cache.layers for head in record.positions)


def test_nothing_is_kept_for_standing_at_the_end():
    policy = build("dapq", {})
    source = DocumentView(range(90), 3)
    assert policy.protected(random_layer(90, protected=3)).nonzero().flatten().tolist() == [0, 1, 2]
    assert policy.probe_passes(source)[0].token_ids == tuple(range(58, 90))


def test_pseudo_tokens_beyond_the_model_are_refused(llama):
    room = llama.engine.max_tokens - len(llama.ids)
    llama.engine.prepare(llama.ids, policy="dapq", policy_params={"offset": room - 32})
    with pytest.raises(DocumentTooLong, match="runs 32 tokens behind the document"):
        llama.engine.prepare(llama.ids, policy="dapq", policy_params={"offset": room - 31})
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        llama.engine.prepare(llama.ids, policy="dapq", policy_params={"probe": "text"})
