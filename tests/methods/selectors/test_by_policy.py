"""Policies as selectors, against loops in fp64 over the attention of plain transformers: which stored entries an answer
reads, what was merged for it, and what it says."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch.nn.functional import normalize
from transformers import AutoTokenizer

from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.kernels.prefix_attention import MergedPrefix
from kvshelf.methods import selectors
from kvshelf.model.source import bundled_folder
from tests.by_hand import Prefix, greedy
from tests.engine.test_selecting import read_positions
from tests.methods.policies.shaped import SHAPES, shaped_model
from tests.methods.policies.test_sablock import filled, guided
from tests.views import best

BUDGET, WINDOW = 40, 5
SENTENCES = (
    "The ferry, when it is late, waits; the boats do not.",
    "Who reads the tide tables? Nobody.",
    "A code: 4829.",
)
TEXT = " ".join(SENTENCES[i % 3] + f" Pier {i} is closed." for i in range(9))
QUESTION = "Which pier is closed, and who waits?"
SIZES = {"window": WINDOW}


@cache
def tokenizer():
    return AutoTokenizer.from_pretrained(bundled_folder("kvshelf-tiny"))


class Question:
    """A document and a question on a random model, and what plain transformers computes of them in fp64."""

    def __init__(self, kind, group):
        self.model = shaped_model(kind, group, vocab_size=len(tokenizer()), num_hidden_layers=3)
        for layer in self.model.model.layers:  # or most weights are too small for fp32, and equal
            layer.self_attn.q_proj.weight.mul_(0.25)
        by_hand = copy.deepcopy(self.model).double()
        by_hand.set_attn_implementation("eager")
        self.engine = Engine(self.model, tokenizer(), name="m")
        view = self.engine.prepare(TEXT, policy="full").document
        self.ids, self.protected = list(view.token_ids), view.protected_prefix
        self.full = self.engine.compress(TEXT, policy="full")
        self.query = list(self.engine.encode_query(self.full, QUESTION))
        self.group, tokens = group, len(self.ids)
        out = by_hand(torch.tensor([[*self.ids, *self.query]]), output_attentions=True, use_cache=True)
        self.weights = [weights[0, :, tokens:, :tokens] for weights in out.attentions]
        self.states = [(layer.keys[0, :, :tokens], layer.values[0, :, :tokens]) for layer in out.past_key_values.layers]

    def sums(self, layer, kv_head, rows=0):
        """The attention of each query head of a group, summed over the last rows of the question; 0: over all."""
        return self.weights[layer][kv_head * self.group : (kv_head + 1) * self.group, -rows:].sum(dim=1)

    def begun(self, select, **params):
        """A selection that has chosen, and its document."""
        document = self.engine.attach(self.full)
        made = self.engine.select(document, select, question_tokens=len(self.query), tokens=BUDGET, params=params)
        self.engine.batch().step([self.engine.start(document, self.query, Sampling(2), made)])
        return made, document

    def answer(self, select, **params):
        return self.engine.answer(
            self.full, QUESTION, max_new_tokens=8, select=select, select_tokens=BUDGET, select_params=params
        )

    def by_hand(self, reads, guess, merged=None):
        """The answer of plain transformers in fp64, of which the question sees all tokens and each answer token those
        of `reads`, by layer and head, and the states `merged` behind them."""
        layers, masks = [], []
        for layer, (keys, values) in enumerate(self.states):
            extra = [(keys[:, :0], values[:, :0])] if merged is None else [merged[layer]]
            layers.append(
                tuple(torch.cat([own, more], dim=1) for own, more in zip((keys, values), *extra, strict=True))
            )
            masks.append(torch.ones(layers[-1][0].shape[:2], dtype=torch.bool))
        asking, tokens = len(self.query), len(self.ids)

        def chosen(layer, queries, _keys, visible):
            shown = torch.zeros(*queries.shape[:2], visible.shape[1], dtype=torch.bool)
            shown[:, :asking, :tokens] = True
            for head in range(len(queries)):
                shown[head, asking:, reads[layer][head // self.group]] = True
            return shown

        position = self.full.next_position
        return greedy(self.model, Prefix(layers, masks), self.query, position, 8, chosen, guess=guess)


@cache
def question_of(kind, group):
    return Question(kind, group)


def h2o_by_hand(case, layer, kv_head):
    """Half of the budget are the last entries, the others those with the largest sums."""
    tokens = len(case.ids)
    always = {*range(case.protected), *range(tokens - BUDGET // 2, tokens)}
    return best(case.sums(layer, kv_head).mean(dim=0).tolist(), always, BUDGET)


def sablock_by_hand(case, layer, _kv_head):
    """Eq. 3 to 13 over the sentences, whose ends the tokens' own text says."""
    s, segments = case.weights[layer][:, -WINDOW:].mean(dim=(0, 1)).tolist(), [[]]
    for j in range(case.protected, len(s)):
        segments[-1].append(j)
        if tokenizer().decode([case.ids[j]]).strip()[-1:] in (".", "?") or len(segments[-1]) == 64:
            segments.append([])
    return filled(*guided(s, [segment for segment in segments if segment]), len(s), BUDGET)


def scores_of_ems(case, layer, kv_head, kernel=5):
    total = torch.zeros(len(case.ids), dtype=torch.float64)
    for everywhere, local in zip(case.sums(layer, kv_head), case.sums(layer, kv_head, WINDOW), strict=True):
        total += torch.maximum(everywhere * local.mean() / everywhere.mean(), local) / case.group
    padded = [0.0] * (kernel // 2) + total.tolist() + [0.0] * (kernel // 2)
    return [sum(padded[j : j + kernel]) / kernel for j in range(len(total))]


def ems_by_hand(case, layer, kv_head, ours, tau, gamma):
    """The states of each token that takes part, by its position, and the centers: eq. 2 and 5, one token at a time.
    ours: the center of each token, which decides among equal ones: those of the same word, as far on either side."""
    scores, keys, values = scores_of_ems(case, layer, kv_head), *(of[kv_head] for of in case.states[layer])
    centers = best(scores, set(range(case.protected)), BUDGET)
    open_to = [j for j in centers if j >= case.protected]
    of_keys, of_values = (rows @ rows.T for rows in (normalize(keys, dim=1), normalize(values, dim=1)))  # cosines
    classes = {j: [j] for j in centers}
    for i in set(best(scores, set(range(case.protected)), int(gamma * BUDGET))) - set(centers):
        alike = {j: float(of_keys[i, j] * of_values[i, j]) for j in open_to}
        most = max(alike.values())
        nearest = ours[i] if alike.get(ours.get(i), -1.0) > most - 1e-5 else max(open_to, key=lambda j: (alike[j], -j))
        if alike[nearest] >= tau and of_keys[i, nearest] > 0:
            classes[nearest].append(i)
    states = {}
    for members in classes.values():
        total = sum(scores[i] for i in members)
        direction = sum(scores[i] * keys[i] / keys[i].norm() for i in members)
        value = sum(scores[i] * values[i] for i in members) / total
        states |= {i: (keys[i].norm() * direction / direction.norm(), value) for i in members}
    return states, centers


@pytest.mark.parametrize(("kind", "group"), SHAPES)
@pytest.mark.parametrize(
    ("select", "params", "by_hand"), [("policy:h2o", {}, h2o_by_hand), ("policy:sablock", SIZES, sablock_by_hand)]
)
def test_an_answer_reads_what_the_formulas_say_of_the_question_s_rows(kind, group, select, params, by_hand):
    case = question_of(kind, group)
    made, document = case.begun(select, **params)
    expected = [[by_hand(case, layer, head) for head in range(2)] for layer in range(len(case.states))]
    assert [read_positions(made, document, layer, 2) for layer in range(len(expected))] == expected
    ours = case.answer(select, **params)
    right = case.by_hand(expected, ours.token_ids)[: len(ours.token_ids)]
    assert ours.token_ids[: len(right)] == right
    assert ours.usage.read_tokens == BUDGET
    assert right


@pytest.mark.parametrize(("kind", "group"), SHAPES)
def test_ems_merges_for_the_question_and_the_answer_reads_what_it_merged(kind, group):
    case, sizes = question_of(kind, group), {"tau": 0.3, "gamma": 2.5}
    before = case.full.to_bytes()
    made, _ = case.begun("policy:ems", kernel=5, **SIZES, **sizes)
    most, tokens, merged, reads, joined = 0, len(case.ids), [], [], 0
    for layer in range(len(case.states)):
        (prefix,) = made.prefixes(layer)
        assert isinstance(prefix, MergedPrefix)
        counted = made.counted(layer)[0].chosen
        members = [counted.rows[head, : int(counted.counts[head])].tolist() for head in range(2)]
        heads = []
        for head, (own, (*_, classes)) in enumerate(zip(members, prefix.heads, strict=True)):
            scores = scores_of_ems(case, layer, head)
            centers = best(scores, set(range(case.protected)), BUDGET)
            ours = {i: centers[at] for i, at in zip(own, classes.tolist(), strict=True)}
            heads.append(ems_by_hand(case, layer, head, ours, **sizes))
        for (states, centers), (keys, values, scales, classes) in zip(heads, prefix.heads, strict=True):
            assert len(keys) == len(centers) == BUDGET
            joined += len(states) - len(centers)
            slots = [states[i] for i in sorted(states)]
            torch.testing.assert_close(
                scales.double()[:, None] * keys[classes].double(), torch.stack([key for key, _ in slots]), **NEAR
            )
            torch.testing.assert_close(values[classes].double(), torch.stack([value for _, value in slots]), **NEAR)
        most = max(len(states) for states, _ in heads)
        rows = [[states[i] for i in sorted(states)] for states, _ in heads]
        rows = [[*own, *own[:1] * (most - len(own))] for own in rows]
        merged.append(tuple(torch.stack([torch.stack([slot[of] for slot in own]) for own in rows]) for of in (0, 1)))
        reads.append([[tokens + i for i in range(len(states))] for states, _ in heads])
        assert members == [sorted(states) for states, _ in heads]
    assert joined, "nothing merged, so nothing was tested"
    ours = case.answer("policy:ems", kernel=5, **SIZES, **sizes)
    right = case.by_hand(reads, ours.token_ids, merged)[: len(ours.token_ids)]
    assert ours.token_ids[: len(right)] == right
    assert ours.usage.read_tokens == BUDGET
    assert case.full.to_bytes() == before


NEAR = {"rtol": 1e-3, "atol": 1e-3}
"""Keys are some 5 long, and their fp32 of three layers of sharp attention is off by up to 2e-4."""


@pytest.mark.parametrize("select", ["policy:h2o", "policy:ems", "policy:sablock", "policy:sentencekv"])
def test_a_budget_for_all_is_the_answer_without_a_selector(select):
    case = question_of("qwen2", 4)
    dense = case.engine.answer(case.full, QUESTION, max_new_tokens=8)
    chosen = {"select": select, "select_tokens": len(case.ids)}
    assert case.engine.answer(case.full, QUESTION, max_new_tokens=8, **chosen) == dense


@pytest.mark.parametrize(
    ("policy", "params", "of_policy"),
    [
        ("sablock", SIZES, {"segments": "sentences"}),
        ("sentencekv", {"semantic_factor": 2.0, "sink": 4, **SIZES}, {}),
        ("ems", {"score": "local", "merge": False, **SIZES}, {}),
        ("ems", {"score": "local", "tau": 0.3, **SIZES}, {}),
    ],
)
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_with_the_question_expected_the_policy_stores_the_same(policy, params, of_policy, codec):
    case = question_of("llama", 4)
    sized = {"budget_tokens": BUDGET, "expected_questions": [QUESTION]}
    stored = case.engine.compress(TEXT, policy=policy, **sized, **params, **of_policy)
    full = case.full.encoded(codec)
    document = case.engine.attach(full)
    made = case.engine.select(
        document, f"policy:{policy}", question_tokens=len(case.query), tokens=BUDGET, params=params
    )
    case.engine.batch().step([case.engine.start(document, case.query, Sampling(2), made)])
    for layer, record in enumerate(stored.layers):
        if codec == "none" and record.kind == "merged":
            ours, theirs = made.prefixes(layer)[0], record.prefixes()[0]
            for name in ("keys", "values", "slot_scales", "slot_classes"):
                assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        elif codec == "none":
            assert read_positions(made, document, layer, 2) == [own.tolist() for own in record.positions]
        else:
            assert sum(prefix.lengths[0] for prefix in made.prefixes(layer)) >= BUDGET


def test_sentences_of_several_documents_do_not_join():
    """Segments end with each document; the answer reads of both."""
    case = question_of("llama", 1)
    other = case.engine.compress("The tide turns, and the boats wait. " * 6, policy="full")
    answer = case.engine.answer(
        [case.full, other], QUESTION, max_new_tokens=4, select="policy:sablock", select_tokens=BUDGET
    )
    assert answer.usage.read_tokens == BUDGET


def test_what_no_question_can_decide_is_refused_by_name():
    for method, name, why in (
        ("policy:h2o", "normalize", "sees all entries"),
        ("policy:ems", "pos", "have their rotation"),
        ("policy:ems", "probe", "observes the question"),
        ("policy:sablock", "segments", "ends of sentences alone"),
    ):
        with pytest.raises(InvalidRequest, match=f"takes no {name}: .*{why}") as refused:
            selectors.build(method, {name: 1})
        assert refused.value.param == f"select.params.{name}"
    assert not {"policy:arkv", "policy:cam", "policy:dapq"} & {*selectors.names()}


def test_caches_without_the_ends_of_sentences_are_refused():
    case = question_of("llama", 1)
    ask = partial(case.engine.answer, select="policy:sablock", select_tokens=BUDGET)
    with pytest.raises(PolicyUnsupported, match="has no sentence ends") as refused:
        ask(replace(case.full, sentence_ends=()), QUESTION)
    assert refused.value.param == "select.method"
    with pytest.raises(PolicyUnsupported, match="heads of layer 0 keep different tokens"):
        ask(case.engine.compress(TEXT, policy="snapkv", compression_ratio=0.25), QUESTION)
