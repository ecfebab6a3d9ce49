"""A cache exported as a plain `DynamicCache` answers without kvshelf's attention as the formula says it must."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.records import Merged, Parts
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, ModelMismatch, PolicyUnsupported
from kvshelf.samples.tasks import make_document
from tests.amounts import pairwise
from tests.by_hand import Prefix, frequencies, greedy, turned
from tests.recorded import ARCHITECTURES
from tests.store.caches import from_heads

TOKENS, QUESTION, ANSWER = 400, 20, 8
PLAIN = ["sdpa", "eager"]
POLICIES = ["keydiff", "lagkv"]
OPTIONS = {"max_new_tokens": ANSWER, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def relative_error(ours, expected):
    return float((ours.double() - expected.double()).abs().max() / expected.double().abs().max())


def plain(model, implementation):
    """The same weights under an attention of transformers' own; no module of kvshelf has touched it."""
    model = copy.deepcopy(model)
    model.set_attn_implementation(implementation)
    return model


def generated(model, past, question, **extra):
    """`generate()` as for any prefix: stand-ins for the cached tokens, then the question."""
    ids = torch.tensor([[0] * past.get_seq_length() + question])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **{CACHE_ARGUMENT: past}, **OPTIONS, **extra)
    return out[0, ids.shape[1] :].tolist()


def assert_same(ours, expected, least=ANSWER // 2):
    """`expected` ends early where two tokens are as good as equal. A random model has 512 words: no luck."""
    assert len(expected) >= least
    assert ours[: len(expected)] == expected


EVERY_CACHE = {"oracle": ARCHITECTURES, "cache": POLICIES, "implementation": PLAIN}


@pytest.fixture(scope="module")
def question(oracle):
    return oracle.ids[TOKENS : TOKENS + QUESTION]


@pytest.fixture(scope="module")
def full(oracle):
    return oracle.engine.compress(oracle.ids[:TOKENS], policy="full")


@pytest.fixture(scope="module", params=POLICIES)
def cache(request, oracle):
    return oracle.engine.compress(oracle.ids[:TOKENS], policy=request.param, budget_tokens=120)


@pairwise(EVERY_CACHE, indirect=["oracle", "cache"])
def test_contiguous_is_an_ordinary_prefix(oracle, full, cache, question, implementation):
    past = oracle.engine.export(cache, positions="contiguous")
    assert type(past) is DynamicCache
    assert past.get_seq_length() == 120
    ours = generated(plain(oracle.model, implementation), past, question)
    by_hand = Prefix.kept(full, cache, slots_by=frequencies(oracle.model))
    assert_same(ours, greedy(oracle.model, by_hand, question, 120, ANSWER, guess=ours))


@pairwise(EVERY_CACHE, indirect=["oracle", "cache"])
def test_absolute_is_right_where_the_position_ids_are(oracle, full, cache, question, implementation):
    past = oracle.engine.export(cache, positions="absolute")
    kept, first = past.get_seq_length(), cache.next_position
    places = torch.cat([torch.arange(kept), torch.arange(first, first + QUESTION)])[None]
    ours = generated(plain(oracle.model, implementation), past, question, position_ids=places)
    assert_same(ours, greedy(oracle.model, Prefix.kept(full, cache), question, TOKENS, ANSWER, guess=ours))


def test_absolute_in_a_loop_of_ones_own(oracle, full, cache, question):
    past, model, tokens = oracle.engine.export(cache, positions="absolute"), plain(oracle.model, "sdpa"), []
    step, position = question, cache.next_position
    while len(tokens) < ANSWER:
        places = torch.arange(position, position + len(step))[None]
        with torch.no_grad():
            logits = model(torch.tensor([step]), position_ids=places, **{CACHE_ARGUMENT: past}).logits
        position, step = position + len(step), [int(logits[0, -1].argmax())]
        tokens += step
    assert_same(tokens, greedy(oracle.model, Prefix.kept(full, cache), question, TOKENS, ANSWER, guess=tokens))


def test_contiguous_keys_are_those_turned_by_hand(oracle, cache):
    past, inv_freq = oracle.engine.export(cache, positions="contiguous"), frequencies(oracle.model)
    for layer, record in zip(past.layers, cache.layers, strict=True):
        for head, ((keys, values), positions) in enumerate(zip(record.heads(), record.positions, strict=True)):
            expected = turned(keys, torch.arange(len(positions)) - positions, inv_freq)
            assert relative_error(layer.keys[0, head], expected) < 1e-5
            assert torch.equal(layer.values[0, head], values)


@pytest.mark.parametrize("positions", ["contiguous", "absolute"])
def test_a_full_cache_is_a_fresh_prefill(oracle, full, positions):
    exported, fresh = oracle.engine.export(full, positions=positions), DynamicCache()
    with torch.no_grad():
        plain(oracle.model, "sdpa")(torch.tensor([oracle.ids[:TOKENS]]), **{CACHE_ARGUMENT: fresh})
    for ours, expected in zip(exported.layers, fresh.layers, strict=True):
        assert relative_error(ours.keys, expected.keys) < 1e-5
        assert relative_error(ours.values, expected.values) < 1e-5


def test_the_bundled_model_finds_the_fact_in_an_exported_cache(tiny):
    """By luck a value of three digits or more is right once in 900."""
    found = 0
    for seed in range(3):
        document = make_document("needle", "prose", 512, seed, tiny.encoder.require_text("document").count_tokens)
        asked = document.questions[0]
        cache = tiny.compress(document.text, policy="keydiff", compression_ratio=0.5)
        full = tiny.compress(document.text, policy="full")
        query = tiny.encode_query(cache, asked.text)
        past = tiny.export(cache, positions="contiguous")
        kept = past.get_seq_length()
        ours = generated(plain(tiny.model, "sdpa"), past, query)
        by_hand = Prefix.kept(full, cache, slots_by=frequencies(tiny.model))
        assert_same(ours, greedy(tiny.model, by_hand, query, kept, ANSWER, guess=ours))
        found += asked.answer in tiny.text.decode(ours)
    assert found >= 2


def llama3_scaled():
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        "llama", hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, max_position_embeddings=2048, initializer_range=0.3, eos_token_id=None,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("implementation", PLAIN)
def test_a_scaled_rotation_is_undone_too(implementation):
    model = llama3_scaled()
    engine, ids = Engine(model), torch.randint(512, (TOKENS + QUESTION,), generator=torch.Generator().manual_seed(4))
    document, question = ids[:TOKENS].tolist(), ids[TOKENS:].tolist()
    cache, full = engine.compress(document, budget_tokens=100), engine.compress(document, policy="full")
    ours = generated(plain(model, implementation), engine.export(cache, positions="contiguous"), question)
    by_hand = Prefix.kept(full, cache, slots_by=frequencies(model))
    assert_same(ours, greedy(model, by_hand, question, 100, ANSWER, guess=ours))


@pytest.mark.parametrize("positions", ["contiguous", "absolute"])
def test_a_cache_that_counts_within_itself_is_exported_as_it_stands(oracle, full, question, positions):
    cache = oracle.engine.compress(oracle.ids[:TOKENS], policy="streaming_llm", budget_tokens=120, positions="cache")
    past = oracle.engine.export(CompressedCache.from_bytes(cache.to_bytes()), positions=positions)
    keys = torch.cat([layer.keys[0].flatten(0, 1) for layer in past.layers])
    assert torch.equal(keys, torch.cat([record.keys for record in cache.layers]))
    by_hand = Prefix.kept(full, cache, slots_by=frequencies(oracle.model))
    ours = generated(plain(oracle.model, "sdpa"), past, question)
    assert_same(ours, greedy(oracle.model, by_hand, question, 120, ANSWER, guess=ours))


@pytest.mark.parametrize("codec", ["int8", "int4:residual=16", "mixed"])
@pytest.mark.parametrize("positions", ["contiguous", "absolute"])
def test_a_quantized_cache_is_dequantized_and_put_in_order(llama, codec, positions):
    """Codecs keep a residual, or what matters more, as a part of its own: merged again by position, head by head."""
    cache = llama.engine.compress(llama.ids[:TOKENS], policy="keydiff", budget_tokens=120)
    encoded = cache.encoded(codec)
    assert any(isinstance(record, Parts) for record in encoded.layers)
    dequantized = []
    for record in encoded.layers:
        keys, values, valid = record.dense()
        assert bool(valid.all())
        dequantized.append(from_heads(list(keys), list(values), record.positions))
    expected = llama.engine.export(replace(cache, layers=tuple(dequantized)), positions=positions)
    ours = llama.engine.export(encoded, positions=positions)
    for a, b in zip(ours.layers, expected.layers, strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)


@pytest.mark.parametrize("codec", ["none", "int4:group=16,residual=16"])
def test_pruned_keys_are_exported_with_zeros(llama, codec):
    """Code without kvshelf answers from them as kvshelf does."""
    cache = llama.engine.compress(llama.ids[:TOKENS], policy="think", budget_tokens=120, whole_keys=40).encoded(codec)
    past = llama.engine.export(cache, positions="absolute")
    for layer, record in zip(past.layers, cache.layers, strict=True):
        keys, values, valid = record.dense()
        assert bool(valid.all())
        assert torch.equal(layer.keys[0], keys)
        assert torch.equal(layer.values[0], values)
        body, *_ = record.parts
        assert all((head == 0).all(dim=0).sum() == 6 for head in body.plain_heads()[0]), "6 of 16 channels"
    question, kept = llama.ids[TOKENS : TOKENS + QUESTION], past.get_seq_length()
    places = torch.cat([torch.arange(kept), torch.arange(TOKENS, TOKENS + QUESTION)])[None]
    ours = generated(plain(llama.model, "sdpa"), past, question, position_ids=places)
    by_hand = Prefix.spelled_out(cache, frequencies(llama.model))
    assert_same(ours, greedy(llama.model, by_hand, question, TOKENS, ANSWER, guess=ours))


def unrotated(engine, cache):
    """The same cache with its keys stored before the rotation."""
    layers = []
    for record in cache.layers:
        keys = [engine.rope.unrotate(k, p) for (k, _), p in zip(record.heads(), record.positions, strict=True)]
        layers.append(replace(record, keys=torch.cat(keys), rope_mode="pre"))
    return replace(cache, layers=tuple(layers))


@pytest.mark.parametrize("positions", ["contiguous", "absolute"])
def test_keys_stored_without_their_rotation_get_it(oracle, cache, positions):
    ours = oracle.engine.export(unrotated(oracle.engine, cache), positions=positions)
    expected = oracle.engine.export(cache, positions=positions)
    for a, b in zip(ours.layers, expected.layers, strict=True):
        assert relative_error(a.keys, b.keys) < 1e-5


def test_an_export_is_a_copy(llama):
    cache = llama.engine.compress(llama.ids[:TOKENS], policy="streaming_llm", budget_tokens=120)
    before = cache.to_bytes()
    for positions in ("absolute", "contiguous"):
        past = llama.engine.export(cache, positions=positions)
        for layer in past.layers:
            layer.keys.zero_()
            layer.values.zero_()
    assert cache.to_bytes() == before


def with_layers(cache, change):
    return replace(cache, layers=tuple(change(index, record) for index, record in enumerate(cache.layers)))


def drop_one(record, head):
    chosen = torch.ones(record.entries, dtype=torch.bool)
    chosen[record.offsets[head]] = False
    return record.select(chosen)


def merged(record):
    slots = torch.cat([torch.arange(length) for length in record.lengths]).to(torch.int32)
    return Merged(
        **{name: getattr(record, name) for name in ("keys", "values", "entries_at", "offsets")},
        slot_scales=torch.ones(record.entries), slot_classes=slots, slot_positions=record.entry_positions,
        slot_offsets=record.offsets,
    )  # fmt: skip


def shorter(record):
    for head in reversed(range(record.kv_heads)):
        record = drop_one(record, head)
    return record


UNSUPPORTED = {
    "different numbers of entries": lambda cache: with_layers(cache, lambda i, r: drop_one(r, 1) if i == 1 else r),
    "its layers keep": lambda cache: with_layers(cache, lambda i, r: shorter(r) if i == 1 else r),
    "merged tokens": lambda cache: with_layers(cache, lambda i, r: merged(r) if i == 1 else r),
    "with and without": lambda cache: with_layers(
        cache, lambda _, r: Parts((drop_one(r, 0), replace(drop_one(r, 1), rope_mode="pre")))
    ),
    "counts positions within the cache": lambda cache: replace(cache, next_position=7),
}


@pytest.mark.parametrize("positions", ["contiguous", "absolute"])
@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_what_is_no_prefix_is_refused_by_name(llama, reason, positions):
    cache = llama.engine.compress(llama.ids[:TOKENS], policy="keydiff", budget_tokens=120)
    llama.engine.export(cache, positions=positions)
    with pytest.raises(PolicyUnsupported, match=reason) as refused:
        llama.engine.export(UNSUPPORTED[reason](cache), positions=positions)
    assert refused.value.param == "positions"


@pytest.mark.parametrize(("change", "reason"), [("dynamic", "change with the length"), (None, "no rotary embedding")])
def test_a_rotation_that_cannot_be_undone_is_refused_where_keys_would_move(llama, change, reason):
    cache = llama.engine.compress(llama.ids[:TOKENS], policy="keydiff", budget_tokens=120)
    engine = Engine(copy.deepcopy(llama.model))
    engine.facts.rope = replace(engine.rope, length_dependent=True) if change else None
    with pytest.raises(PolicyUnsupported, match=reason):
        engine.export(cache, positions="contiguous")
    with pytest.raises(PolicyUnsupported, match=reason):
        engine.export(unrotated(llama.engine, cache), positions="absolute")
    engine.export(cache, positions="absolute")
    engine.export(llama.engine.compress(llama.ids[:90], policy="full"), positions="contiguous")  # nothing moves


def test_bad_positions_and_other_models_are_refused(llama):
    cache = llama.engine.compress(llama.ids[:TOKENS], policy="keydiff", budget_tokens=120)
    with pytest.raises(InvalidRequest, match="absolute, contiguous") as refused:
        llama.engine.export(cache, positions="relative")
    assert refused.value.param == "positions"
    with pytest.raises(ModelMismatch):
        Engine(llama3_scaled()).export(cache)
