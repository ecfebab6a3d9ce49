"""Answers whose suffix a policy bounds: what stays the same, how much is stored, and what a step may not leave
behind."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.attention.states import SUPPORTED
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.engine import Engine
from kvshelf.errors import CacheUnusable, InvalidRequest, PolicyUnsupported
from kvshelf.kernels.rowwise import available
from kvshelf.methods.suffixes.registry import SUFFIX_POLICIES, untrained
from kvshelf.model.prepacking import prepack
from kvshelf_bench.models.small import small_model
from tests.amounts import few
from tests.engine.asking import ids

LATENTS = pytest.mark.skipif(CACHE_ARGUMENT != "cache", reason="older transformers cache expanded keys and values")

SMALL = {
    "window": {"every": 8},
    "lagkv": {"lag": 12},
    "h2o": {"every": 8},
    "ems": {"every": 8, "window": 8, "tau": 0.1},
    "d2o": {"every": 8},
    "arkv": {"every": 8, "window": 8},
    "lazy_eviction": {"window": 10, "alpha": 0.01},
    "cam": {"every": 8, "merge": 4},
    "ngc_schedule": {"every": 16, "block": 4, "queries": 3},
}
INTERVALS = {"lagkv": 12, "lazy_eviction": 10, "ngc_schedule": 16} | dict.fromkeys(
    ("window", "h2o", "ems", "d2o", "arkv", "cam"), 8
)
BUDGET = 40

NAMES = sorted(untrained())


def test_every_policy_is_here():
    assert set(SMALL) == set(NAMES)


@pytest.fixture(scope="module")
def caches(llama):
    return [
        llama.engine.compress(llama.ids[:180], policy="full"),
        llama.engine.compress(llama.ids[20:200], policy="keydiff", compression_ratio=0.5).encoded(
            "int4:group=32,residual=16"
        ),
        llama.engine.compress(llama.ids[9:150], policy="ems", compression_ratio=0.75),
    ]


@dataclass
class Told:
    """What an answer's steps gave: the logits of each, the positions that ran, and how much was stored after."""

    logits: list
    positions: list
    stored: list


@pytest.fixture
def followed(llama, monkeypatch):
    """Runs answers alone, endless, and tells their steps."""
    monkeypatch.setattr(llama.engine.facts, "end_ids", frozenset)

    def run(cache, question, tokens, suffix=None, selection=None):
        engine, told = llama.engine, Told([], [], [])
        passed = engine.passes.continuing

        def continuing(token_ids, positions, *rest):
            logits = passed(token_ids, positions, *rest)
            told.logits.append(logits.clone())
            told.positions += positions.flatten().tolist()
            return logits

        with monkeypatch.context() as patched:
            patched.setattr(engine.passes, "continuing", continuing)
            batch, answer = engine.batch(), begun(engine, cache, question, tokens, suffix, selection)
            while not answer.finished:
                (said,) = batch.step([answer])
                assert isinstance(said, str), said
                told.stored.append(answer.row.stored)
        return answer.answer(), told

    return run


def begun(engine, cache, question, tokens, suffix=None, selection=None):
    reducer = None
    if suffix is not None:
        name, budget = suffix
        reducer = engine.bound(name, question_tokens=len(question), budget=budget, params=SMALL[name])
    return engine.start(cache, question, Sampling(tokens), selection, reducer=reducer)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_budget_for_all_changes_no_bit(llama, caches, followed, name):
    """The logits, too, and over plain, quantized and merged documents."""
    for cache in caches:
        plain, expected = followed(cache, llama.ids[3:10], 60)
        bounded, told = followed(cache, llama.ids[3:10], 60, (name, 66))
        assert bounded == plain
        assert all(torch.equal(a, b) for a, b in zip(told.logits, expected.logits, strict=True))
        assert told.positions == expected.positions


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_is_stored_is_bounded_and_positions_go_on(llama, caches, followed, name):
    question = llama.ids[3:12]
    plain, expected = followed(caches[0], question, 150)
    bounded, told = followed(caches[0], question, 150, (name, BUDGET))
    assert max(told.stored) <= BUDGET + INTERVALS[name]
    assert sum(b < a for a, b in zip(told.stored, told.stored[1:], strict=False)) > 4
    assert told.positions == expected.positions == list(range(180, 180 + 9 + 149))
    usage = bounded.usage
    assert (usage.prefill_tokens, usage.completion_tokens) == (9, 150)
    assert (usage.suffix_tokens, plain.usage.suffix_tokens) == (told.stored[-1], 158)
    assert not all(torch.equal(a, b) for a, b in zip(told.logits, expected.logits, strict=True))


def parts_of(row):
    """The bits of a row's slot at all layers."""
    return [states.clone() for layer in range(2) for states in row.slab.of_row(layer, row)]


@pytest.mark.parametrize("name", few(4, NAMES))
def test_the_question_stays_bit_by_bit(llama, caches, name):
    batch, answer = llama.engine.batch(), begun(llama.engine, caches[0], llama.ids[3:12], 100, (name, BUDGET))
    batch.step([answer])
    before = [states[:, :9] for states in parts_of(answer.row)]
    for _ in range(80):
        batch.step([answer])
    after = [states[:, :9] for states in parts_of(answer.row)]
    assert answer.row.stored < answer.row.logical
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.slow
def test_every_answer_is_the_one_it_is_alone(llama, caches, monkeypatch):
    """All policies and rows without one in one batch, with questions of 1 to 70 tokens."""
    monkeypatch.setattr(llama.engine.facts, "end_ids", frozenset)
    asked = []
    for i, name in enumerate([*NAMES, None] * 2):
        question = llama.ids[i * 7 : i * 7 + 1 + (i * 13) % 70]
        suffix = None if name is None else (name, len(question) + 30)
        asked.append((caches[i % len(caches)], question, 70 + i, suffix))
    alone = []
    for each in asked:
        answer, batch = begun(llama.engine, *each), llama.engine.batch()
        while not answer.finished:
            batch.step([answer])
        alone.append(answer.answer())
    batch, together = llama.engine.batch(), [begun(llama.engine, *each) for each in asked]
    while open_ones := [answer for answer in together if not answer.finished]:
        assert all(isinstance(told, str) for told in batch.step(open_ones))
    assert [answer.answer() for answer in together] == alone
    for answer in together:
        batch.leave(answer)
    assert batch.nbytes == 0


@pytest.mark.parametrize("name", few(3, NAMES))
def test_an_abandoned_step_leaves_state_and_slab_as_they_were(llama, caches, monkeypatch, name):
    monkeypatch.setattr(llama.engine.facts, "end_ids", frozenset)
    begin = lambda: begun(llama.engine, caches[0], llama.ids[3:12], 70, (name, BUDGET))  # noqa: E731
    expected, batch = begin(), llama.engine.batch()
    while not expected.finished:
        batch.step([expected])
    answer, layers = begin(), 0

    def fail_in_the_second_layer():
        nonlocal layers
        layers += 1
        if layers % 2 == 0:
            raise ZeroDivisionError

    batch.leave(expected)
    while not answer.finished:
        if answer.row.slab is not None:
            stored, before = answer.row.stored, [states[:, : answer.row.stored] for states in parts_of(answer.row)]
            layers = 1 if llama.engine.passes.program is not None else 0  # a planned step calls once, behind all layers
            with pytest.raises(ZeroDivisionError):
                batch.step([answer], fail_in_the_second_layer)
            after = [states[:, :stored] for states in parts_of(answer.row)]
            assert answer.row.stored == stored
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        batch.step([answer])
    assert answer.answer() == expected.answer()


@pytest.fixture(scope="module")
def recorded():
    """A model that runs by its program: its steps are planned, all layers in one call of C."""
    engine = Engine(small_model("llama"), name="m")
    prepack(engine.model)
    assert engine.passes.program is not None
    return engine


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="no library was compiled for this CPU")
def test_planned_steps(recorded, monkeypatch):
    """Every step of every policy is planned until tokens share entries, also those that ask for weights, and says what
    it says without; rows in one batch are those that they are alone; a step that is abandoned behind its only call
    changes nothing."""
    monkeypatch.setattr(recorded.facts, "end_ids", frozenset)
    monkeypatch.setattr(recorded.passes, "_by_layer", None)
    cache, question = recorded.compress(ids(60), policy="full"), ids(7, seed=2)
    plain = recorded.answer(cache, question, max_new_tokens=60)
    bounded = {}
    for name in NAMES:
        suffix = {"policy": name, "budget": 66, "params": SMALL[name]}
        assert recorded.answer(cache, question, max_new_tokens=60, suffix=suffix) == plain
        if not SUFFIX_POLICIES[name].slotted:
            bounded[name] = recorded.answer(cache, question, max_new_tokens=60, suffix=suffix | {"budget": BUDGET})
    batch = recorded.batch()
    together = {name: begun(recorded, cache, question, 60, (name, BUDGET)) for name in bounded}
    together["none"] = begun(recorded, cache, question, 60)
    steps = 0

    def abandon():
        raise ZeroDivisionError

    while open_ones := [answer for answer in together.values() if not answer.finished]:
        steps += 1
        if steps % 3 == 0:
            with pytest.raises(ZeroDivisionError):
                batch.step(open_ones, abandon)
        batch.step(open_ones)
    assert {name: answer.answer() for name, answer in together.items()} == bounded | {"none": plain}


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="no library was compiled for this CPU")
def test_steps_are_not_planned_once_tokens_share_entries(recorded, monkeypatch):
    """Their weights are made by torch, from the queries of each layer."""
    monkeypatch.setattr(recorded.facts, "end_ids", frozenset)
    run, planned, expected = recorded.passes.program.run_planned, [], 0
    monkeypatch.setattr(recorded.passes.program, "run_planned", lambda *args: planned.append(1) or run(*args))
    cache, batch = recorded.compress(ids(60), policy="full"), recorded.batch()
    answer = begun(recorded, cache, ids(7, seed=2), 60, ("ems", BUDGET))
    while not answer.finished:
        expected += answer.seen is answer.document
        batch.step([answer])
        assert len(planned) == expected
    assert 0 < expected < 59


@pytest.mark.slow
def test_a_row_takes_no_more_memory_than_its_bound(llama, caches, monkeypatch):
    monkeypatch.setattr(llama.engine.facts, "end_ids", frozenset)
    sizes = {}
    for suffix in (None, ("window", 120)):
        batch, answer = llama.engine.batch(), begun(llama.engine, caches[0], llama.ids[3:12], 300, suffix)
        while not answer.finished:
            batch.step([answer])
        assert answer.row.slab.capacity == (512 if suffix is None else 128)
        sizes[suffix] = batch.nbytes
    assert sizes[None] == 4 * sizes["window", 120]


def test_a_huge_budget_takes_no_more_memory_than_the_answer(llama, caches, monkeypatch):
    """Whatever a caller gives: what the policy notes grows with the row."""
    policy, sizes = SUFFIX_POLICIES["h2o"], []

    def observe(self, columns, *rest):
        sizes.append(columns["sum"].untyped_storage().nbytes())
        noted(self, columns, *rest)

    noted = policy.observe
    monkeypatch.setattr(policy, "observe", observe)
    monkeypatch.setattr(llama.engine.facts, "end_ids", frozenset)
    batch, answer = llama.engine.batch(), begun(llama.engine, caches[0], llama.ids[3:12], 150, ("h2o", 1 << 20))
    while not answer.finished:
        batch.step([answer])
    heads = llama.engine.model.config.num_key_value_heads
    assert (sizes[0], sizes[-1]) == (heads * 64 * 4, heads * 256 * 4)


def test_a_row_that_became_short_moves_to_a_smaller_slab(llama, caches):
    """Without its question, whose 400 tokens need not stay."""
    params = {"every": 8, "protect_question": False}
    reducer = llama.engine.bound("window", question_tokens=400, budget=BUDGET, params=params)
    answer = llama.engine.start(caches[0], (llama.ids * 3)[:400], Sampling(40), reducer=reducer)
    batch = llama.engine.batch()
    batch.step([answer])
    assert (answer.row.stored, answer.row.slab.capacity) == (400, 448)  # 400 + 8, in steps of 64
    for _ in range(8):
        batch.step([answer])
    assert (answer.row.stored, answer.row.logical, answer.row.slab.capacity) == (BUDGET, 408, 64)


@pytest.mark.parametrize("method", ["observe", "reduce"])
def test_an_error_of_a_policy_ends_its_answer_alone(llama, caches, monkeypatch, method):
    batch = llama.engine.batch()
    together = [begun(llama.engine, caches[0], llama.ids[3:12], 60, (name, BUDGET)) for name in ("window", "h2o")]

    def broken(*_):
        raise CacheUnusable("broken")

    monkeypatch.setattr(SUFFIX_POLICIES["h2o"], method, broken)
    ended = None
    for _ in range(59):
        told = batch.step([answer for answer in together if answer is not ended])
        ended = together[1] if any(isinstance(text, CacheUnusable) for text in told) else ended
    assert ended is together[1]
    assert len(together[0].token_ids) == 59


@pytest.mark.parametrize("name", few(1, ["window", "h2o", "ems"]))
def test_with_a_selector(llama, caches, followed, name):
    """A selector chooses what is read of the document, the policy what stays behind it."""
    question = llama.ids[3:12]

    def selection():
        document = llama.engine.attach(caches[0])
        return llama.engine.select(document, "quest", question_tokens=len(question), tokens=80)

    selected, expected = followed(caches[0], question, 60, None, selection())
    both, told = followed(caches[0], question, 60, (name, 70), selection())
    assert both == selected
    assert all(torch.equal(a, b) for a, b in zip(told.logits, expected.logits, strict=True))
    bounded, told = followed(caches[0], question, 60, (name, BUDGET), selection())
    assert bounded.usage.suffix_tokens <= BUDGET + INTERVALS[name]
    assert bounded.usage.read_tokens <= 80


@pytest.mark.parametrize("name", few(1, ["lagkv", "lazy_eviction", "ems"]))
def test_several_documents(llama, caches, monkeypatch, name):
    monkeypatch.setattr(llama.engine.facts, "end_ids", frozenset)
    plain = llama.engine.answer(caches[:2], llama.ids[3:10], max_new_tokens=60)
    for budget, same in ((66, True), (BUDGET, False)):
        suffix = {"policy": name, "budget": budget, "params": SMALL[name]}
        bounded = llama.engine.answer(caches[:2], llama.ids[3:10], max_new_tokens=60, suffix=suffix)
        assert (bounded == plain) is same
        assert bounded.sources == plain.sources


LEAST = [
    ({"policy": "window"}, 8),  # one more than the question has
    ({"policy": "lagkv"}, 136),
    ({"policy": "lazy_eviction"}, 182),
    ({"policy": "h2o", "params": {"recent": 20}}, 27),
    ({"policy": "ems"}, 39),
    ({"policy": "arkv"}, 39),
    ({"policy": "ngc_schedule"}, 39),
]
"""The smallest budgets behind a question of 7 tokens."""


@pytest.mark.parametrize(("suffix", "least"), LEAST)
def test_the_smallest_budget_is_taken(llama, caches, suffix, least):
    assert llama.engine.answer(caches[0], llama.ids[3:10], max_new_tokens=1, suffix={**suffix, "budget": least})


@pytest.mark.parametrize(
    ("suffix", "param"),
    [
        ({"policy": "windo"}, "suffix.policy"),
        ({"budget": 100}, "suffix.policy"),
        ({"policy": "window", "params": {"evry": 3}}, "suffix.params.evry"),
        ({"policy": "window", "params": {"every": 0}}, "suffix.params.every"),
        ({"policy": "window", "params": 3}, "suffix.params"),
        ({"policy": "window", "tokens": 3}, "suffix.tokens"),
        ({"policy": "window", "budget": 0}, "suffix.budget"),
        ({"policy": "window", "scope": "all"}, "suffix.scope"),
        ({"policy": "window", "budget": "many"}, "suffix.budget"),
        *(({**suffix, "budget": least - 1}, "suffix.budget") for suffix, least in LEAST),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(llama, caches, monkeypatch, suffix, param):
    monkeypatch.setattr(llama.engine.passes, "continuing", None)
    with pytest.raises(InvalidRequest) as refused:
        llama.engine.answer(caches[0], llama.ids[3:10], suffix=suffix)
    assert refused.value.param == param


def test_the_default_budget_has_room_for_any_question_and_parameters(llama, caches):
    question = (llama.ids * 3)[:600]
    for name in NAMES:
        suffix = {"policy": name, "params": {"window": 700} if name in ("ems", "lazy_eviction") else {}}
        assert llama.engine.answer(caches[0], question, max_new_tokens=2, suffix=suffix).usage.suffix_tokens == 601


@pytest.mark.slow
@pytest.mark.skipif(not SUPPORTED, reason="this transformers has caches of its own for each of these models")
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
@pytest.mark.parametrize("name", ["lagkv", "h2o", "ems"])
def test_models_with_states(monkeypatch, family, name):
    """Their states go on; the layers that attend store what the policy keeps."""
    engine = Engine(small_model(family), name="m")
    monkeypatch.setattr(engine.facts, "end_ids", frozenset)
    cache = engine.compress(ids(60), policy="full")
    plain = engine.answer(cache, ids(7, seed=2), max_new_tokens=60)
    for budget, most in ((66, 66), (BUDGET, BUDGET + INTERVALS[name])):
        suffix = {"policy": name, "budget": budget, "params": SMALL[name]}
        bounded, other = engine.answer_all(
            [(cache, ids(7, seed=2)), (cache, ids(5, seed=3))], max_new_tokens=60, suffix=suffix
        )
        assert other == engine.answer(cache, ids(5, seed=3), max_new_tokens=60, suffix=suffix)
        assert bounded == plain if budget == 66 else bounded.usage.suffix_tokens <= most


@pytest.mark.parametrize(
    "model_type", ["gemma2", "gpt_oss", "mistral", "llama4_text", pytest.param("deepseek_v3", marks=LATENTS)]
)
def test_models_that_it_does_not_suit_are_refused_by_name(model_type):
    engine = Engine(small_model(model_type))
    with pytest.raises(PolicyUnsupported) as refused:
        engine.bound("window", question_tokens=4)
    assert refused.value.param == "suffix.policy"
