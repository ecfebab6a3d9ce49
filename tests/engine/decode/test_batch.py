"""Many answers in one forward: what each one says is what it says alone."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvshelf.api.options import Ask
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.decode import batch as batch_module
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.engine import Engine
from kvshelf.errors import CacheUnusable
from kvshelf.store.url import open_store

KINDS = (
    {"policy": "full"},
    {"policy": "keydiff", "compression_ratio": 0.5},
    {"policy": "lagkv", "compression_ratio": 0.75},
    {"policy": "ada", "base": "keydiff", "compression_ratio": 0.5},  # heads of different lengths
    {"policy": "ems", "compression_ratio": 0.75},
    {"policy": "ems", "compression_ratio": 0.75, "pos": "pre"},
    {"policy": "think", "compression_ratio": 0.5},  # keys of fewer channels
)

CLOSE = 1e-4
"""Where the two best logits lie closer than this, sums in another order may choose the other one."""


@pytest.fixture(scope="module")
def caches(llama):
    made = [llama.engine.compress(llama.ids[i * 20 : i * 20 + 160 + 10 * i], **kind) for i, kind in enumerate(KINDS)]
    return [
        *made,
        made[-1].encoded("int4:group=32,residual=16"),
        made[1].encoded("int4:group=32,residual=16"),
        made[1].encoded("mixed"),
    ]


def run(batch, generations):
    """Step all of them until each is finished, as many together as are left."""
    while open_ones := [g for g in generations if not g.finished]:
        for told in batch.step(open_ones):
            assert isinstance(told, str)


def alone(engine, cache, query, sampling):
    generation = engine.start(cache, query, sampling)
    run(engine.batch(), [generation])
    return generation.answer()


def close_calls(engine, cache, query, answer):
    """Steps of an answer at which the second best token was as good as the best."""
    with engine.attached(cache) as past, torch.no_grad():
        logits = engine.model(torch.tensor([query + answer.token_ids[:-1]]), **{CACHE_ARGUMENT: past}).logits[0]
    best = logits[len(query) - 1 :].float().topk(2).values
    return [step for step, (first, second) in enumerate(best.tolist()) if first - second < CLOSE]


def require_equal(engine, cache, query, together, expected):
    """Token-equal, but from a step on at which two tokens were equally good: such steps are counted and printed."""
    if together.token_ids == expected.token_ids:
        assert together == expected
        return
    at = next(i for i, (a, b) in enumerate(zip(together.token_ids, expected.token_ids, strict=False)) if a != b)
    close = close_calls(engine, cache, query, expected)
    print(f"differs at step {at}; close calls at {close}")
    assert at in close


@pytest.mark.parametrize(
    "sampling", [Sampling(24), Sampling(12, Ask(temperature=0.8, top_p=0.9, seed=5))], ids=["greedy", "drawn"]
)
def test_every_answer_is_the_one_it_is_alone(llama, caches, sampling):
    """Rows on eight kinds of documents, several on one, with questions of 1 to 70 tokens."""
    questions = [llama.ids[i * 7 : i * 7 + 1 + (i * 13) % 70] for i in range(20)]
    asked = [(caches[i % len(caches)], question) for i, question in enumerate(questions)]
    expected = [alone(llama.engine, cache, question, sampling) for cache, question in asked]
    batch = llama.engine.batch()
    together = [llama.engine.start(cache, question, sampling) for cache, question in asked]
    run(batch, together)
    for (cache, question), generation, answer in zip(asked, together, expected, strict=True):
        require_equal(llama.engine, cache, question, generation.answer(), answer)
    assert len({tuple(answer.token_ids) for answer in expected}) > 10  # equal answers could not tell a mix-up


def test_joining_and_leaving_at_any_step_changes_nothing(llama, caches):
    """A seeded storm: answers begin, are abandoned, and end between others' steps."""
    rng = random.Random(3)
    batch, open_ones, finished = llama.engine.batch(), [], []
    for i in range(60):
        if rng.random() < 0.6:
            cache, question = rng.choice(caches), llama.ids[i : i + rng.choice([1, 3, 40])]
            sampling = Sampling(rng.choice([1, 5, 30]), Ask(temperature=rng.choice([0.0, 0.7]), seed=i))
            open_ones.append((llama.engine.start(cache, question, sampling), cache, question, sampling))
        stepped = [entry for entry in open_ones if rng.random() < 0.8]
        if stepped:
            batch.step([generation for generation, *_ in stepped])
        for entry in list(open_ones):
            if entry[0].finished or rng.random() < 0.05:
                batch.leave(entry[0])
                open_ones.remove(entry)
                finished += [entry] * entry[0].finished
    for generation, *_ in open_ones:
        batch.leave(generation)
    assert len(finished) > 10
    for generation, cache, question, sampling in finished:
        expected = alone(llama.engine, cache, question, sampling)
        require_equal(llama.engine, cache, question, generation.answer(), expected)
    assert batch.nbytes == 0


def test_only_new_tokens_run_through_the_model(llama, caches):
    """Counted from outside: a step of N answers is one forward of N tokens, and no token is run twice."""
    counted = []
    handle = llama.model.get_input_embeddings().register_forward_hook(lambda *call: counted.append(call[1][0].numel()))
    batch = llama.engine.batch()
    together = [llama.engine.start(cache, llama.ids[:9], Sampling(5)) for cache in caches]
    run(batch, together)
    handle.remove()
    assert counted == [9 * len(caches)] + [len(caches)] * 4
    assert all(generation.usage().prefill_tokens == 9 for generation in together)


def test_a_long_question_takes_several_steps_and_its_neighbours_go_on(llama, caches, monkeypatch):
    monkeypatch.setattr(batch_module, "MAX_NEW_TOKENS", 32)
    long, short = llama.ids[:100], llama.ids[:3]
    expected = [alone(llama.engine, caches[0], long, Sampling(8)), alone(llama.engine, caches[1], short, Sampling(8))]
    batch = llama.engine.batch()
    asking = llama.engine.start(caches[0], long, Sampling(8))
    answering = llama.engine.start(caches[1], short, Sampling(8))
    told = [batch.step([asking, answering]) for _ in range(4)]
    assert len(answering.token_ids) == 4
    assert len(asking.token_ids) == 1  # 100 tokens beside one or three of the other, 32 a step
    assert all(text[0] == "" for text in told)
    run(batch, [asking, answering])
    assert [asking.answer(), answering.answer()] == expected


def test_a_step_that_fails_leaves_every_answer_as_it_was(llama, caches):
    batch = llama.engine.batch()
    together = [llama.engine.start(cache, llama.ids[:9], Sampling(6)) for cache in caches[:3]]
    expected = [alone(llama.engine, cache, llama.ids[:9], Sampling(6)) for cache in caches[:3]]
    layers = 0

    def fail_in_the_second_layer():
        nonlocal layers
        layers += 1
        if layers % 2 == 0:
            raise ZeroDivisionError

    for _ in range(6):
        with pytest.raises(ZeroDivisionError):
            batch.step(together, fail_in_the_second_layer)
        batch.step(together)
    assert [generation.answer() for generation in together] == expected


def test_rows_on_one_document_read_it_once(llama, caches):
    """However the answers are ordered, those of one document share one read of its prefix."""
    plans = []

    class Spy(batch_module._Step):
        def __init__(self, *args):
            super().__init__(*args)
            plans.append(self)

    batch = llama.engine.batch()
    together = [llama.engine.start(caches[i % 3], llama.ids[:2], Sampling(4)) for i in range(9)]
    original = batch_module._Step
    batch_module._Step = Spy
    try:
        run(batch, together)
    finally:
        batch_module._Step = original
    assert [plan.here[0].layout.shares for plan in plans] == [(6, 6, 6)] + [(3, 3, 3)] * 3


def test_the_rope_of_a_row_does_not_depend_on_the_longest_row():
    """LongRoPE changes with the largest position of a call: beside a long row a short one would turn."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0 + i for i in range(8)]}
    config = AutoConfig.for_model(
        "llama", hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128, max_position_embeddings=256, eos_token_id=None,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64} | factors,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    engine = Engine(model)
    short, long = (engine.compress([i % 128 for i in range(n)], policy="full") for n in (20, 150))
    alone_tokens = alone(engine, short, [5, 6, 7], Sampling(12)).token_ids
    batch = engine.batch()
    together = [engine.start(cache, [5, 6, 7], Sampling(12)) for cache in (short, long)]
    run(batch, together)
    assert together[0].token_ids == alone_tokens
    mixed = Engine(model).batch()
    mixed._one_by_one = False  # what would happen: the test can fail
    together = [engine.start(cache, [5, 6, 7], Sampling(12)) for cache in (short, long)]
    hidden = []
    handle = model.model.rotary_emb.register_forward_hook(lambda *call: hidden.append(call[2][0][0, 0].clone()))
    mixed.step(together)
    engine.batch().step([engine.start(short, [5, 6, 7])])
    handle.remove()
    assert not torch.allclose(hidden[0], hidden[1])


def test_logits_that_are_no_numbers_are_an_error_of_their_row(llama, caches):
    batch = llama.engine.batch()
    together = [llama.engine.start(cache, llama.ids[:4], Sampling(3)) for cache in caches[:3]]

    def poison(*call):
        logits = call[2].clone()
        logits[0, 1] = torch.nan
        return logits

    handle = llama.model.get_output_embeddings().register_forward_hook(poison)
    order = sorted(range(3), key=lambda i: together[i].document.number)
    told = batch.step(together)
    handle.remove()
    assert [isinstance(told[i], CacheUnusable) for i in order] == [False, True, False]
    sound = together[order[0]]
    run(batch, [sound])
    assert sound.token_ids == alone(llama.engine, caches[order[0]], llama.ids[:4], Sampling(3)).token_ids


def test_a_document_can_be_asked_while_it_arrives(llama, caches, tmp_path):
    """The forward passes a layer as soon as it is there, and steps other answers while it waits for the next."""
    store = open_store(f"disk://{tmp_path}/home")
    arriving = store.open_cache(store.put(caches[1]).id)
    batch = llama.engine.batch()
    other = llama.engine.start(caches[0], llama.ids[:5], Sampling(40))
    asking = llama.engine.start(llama.engine.attach(arriving), llama.ids[:9], Sampling(6))
    waited = []

    def wait(record):
        waited.append(len([layer for layer in arriving.layers if layer.done()]))
        batch.step([other])
        if len(waited) == 5:
            threading.Thread(target=arriving.read).start()
        if len(waited) > 5:
            record.exception()

    batch.step([asking], None, wait)
    assert waited[:5] == [0] * 5
    assert len(other.token_ids) == len(waited)
    run(batch, [asking, other])
    assert asking.answer() == alone(llama.engine, caches[1], llama.ids[:9], Sampling(6))
    assert other.answer() == alone(llama.engine, caches[0], llama.ids[:5], Sampling(40))
    store.close()
