"""Models with recurrent and convolution states: what they say behind a stored document is what they say when they read
it again, and what is stored never changes."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.records import State, States, entries_of, states_of
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.attention.function import CONTEXT, Attended, kvshelf_attention
from kvshelf.engine.attention.states import SUPPORTED
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.engine import Engine
from kvshelf.engine.prefill.stateful import Read
from kvshelf.errors import BlobError, CacheUnusable, InvalidRequest, PolicyUnsupported
from kvshelf.model.caches import own_class
from kvshelf.model.layers import layer_kinds
from kvshelf.model.loading import state_bytes
from kvshelf.model.source import bundled_folder
from kvshelf.store.url import open_store
from kvshelf.workers.replica.create.sizes import Dimensions
from kvshelf.workers.replica.inspect import kept_tokens
from kvshelf_bench.models.small import small_model
from tests.amounts import SOAK, amount, few
from tests.engine.asking import ids, logits_behind

pytestmark = pytest.mark.skipif(
    not SUPPORTED, reason="this transformers has caches of its own for each of these models"
)

FAMILIES = [
    "qwen3_next", "qwen3_5_text", "falcon_h1", "bamba", "granitemoehybrid", "nemotron_h", "lfm2", "olmo_hybrid", "zaya",
    "minimax", "jamba", "bailing_hybrid",
]  # fmt: skip
"""Gated delta rule, the second Mamba, convolutions, lightning attention, the first Mamba; beside attention in other
layers, in each, beside MLPs alone; beside latent attention."""


def engine_of(family: str) -> Engine:
    return Engine(small_model(family), name="m")


MECHANISMS = ["qwen3_next", "falcon_h1", "lfm2", "minimax"]


@pytest.fixture(scope="module", params=MECHANISMS)
def engine(request: pytest.FixtureRequest) -> Engine:
    return engine_of(request.param)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [2, 100])
def test_a_document_says_what_it_says_when_it_is_read_again(family: str, tokens: int) -> None:
    """Through bytes; a token at a time and many. A document shorter than the convolution's kernel, too."""
    engine, document, behind = engine_of(family), ids(tokens), ids(40, seed=2)
    with torch.no_grad():
        expected = engine.model(torch.tensor([document + behind]), use_cache=False).logits[0, tokens:]
    cache = CompressedCache.from_bytes(engine.compress(document, policy="full").to_bytes())
    assert any(isinstance(layer, States) and layer.states for layer in cache.layers)
    for pieces in ([40], [1] * 40, [5, 1, 20, 1, 13]):
        found = logits_behind(engine, cache, behind, pieces)
        torch.testing.assert_close(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-3)


POLICIES = [
    "keydiff", "snapkv", "pyramidkv", "cake", "kvzip", "kvcues", "ems", "tova", "streaming_llm", "expected_attention",
    "dapq", "lagkv", "knorm", "sage", "localkv", "h2o", "pyramidinfer", "sirllm", "cam",
]  # fmt: skip
KINDS = ["keydiff", "snapkv", "pyramidkv", "kvzip", "ems"]
"""One of scores alone, one that reads queries, one of budgets by layer, one of probe passes, one that merges."""


@pytest.mark.parametrize(
    ("engine", "policy"),
    few(
        12,
        [(each, policy) for each in MECHANISMS for policy in (POLICIES if each == MECHANISMS[0] or SOAK else KINDS)],
    ),
    indirect=["engine"],
)
def test_policies_reduce_entries_and_leave_states(engine: Engine, policy: str) -> None:
    document = ids(100)
    cache = engine.compress(document, policy=policy, compression_ratio=0.5)
    full = engine.compress(document, policy="full")
    assert cache.kept_tokens == 50
    for layer, whole in zip(cache.layers, full.layers, strict=True):
        if isinstance(layer, States):
            assert isinstance(whole, States)
            assert layer.states
            for state, same in zip(layer.states, whole.states, strict=True):
                assert torch.equal(state.tensor, same.tensor)
    assert CompressedCache.from_bytes(cache.to_bytes()).kept_tokens == 50
    assert engine.answer(cache, ids(5, seed=3), max_new_tokens=4).usage.completion_tokens == 4


@pytest.mark.parametrize("policy", ["defensivekv", "layer_defensivekv"])
def test_policies_find_the_output_weights_of_the_layers_that_attend(policy: str) -> None:
    assert engine_of("qwen3_next").compress(ids(100), policy=policy, compression_ratio=0.5).kept_tokens == 50


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_in_a_batch_are_those_alone(family: str) -> None:
    """Rows on several documents and levels, with questions of one length and of others, that begin and end apart."""
    plain, engine = engine_of(family), engine_of(family)
    documents = [
        (ids(count, seed=count), policy)
        for count in (10, 60, 200)
        for policy in ({"policy": "full"}, {"policy": "keydiff", "compression_ratio": 0.5})
    ]
    questions = [ids(1 + 9 * i % 40, seed=50 + i) for i in range(8)]
    alone = [plain.compress(document, **policy) for document, policy in documents]
    expected = [
        plain.answer(alone[i % len(alone)], question, max_new_tokens=6).token_ids
        for i, question in enumerate(questions)
    ]
    batch = engine.batch()
    caches = [engine.compress(document, **policy) for document, policy in documents]
    asked = [engine.start(caches[i % len(caches)], question, Sampling(6)) for i, question in enumerate(questions)]
    for step in range(60):
        if open_ones := [g for i, g in enumerate(asked) if not g.finished and step >= 2 * i]:
            batch.step(open_ones)
    assert [generation.token_ids for generation in asked] == expected


@pytest.mark.slow
def test_many_questions_leave_the_stored_bytes_as_they_are(engine: Engine) -> None:
    """Two documents, whose questions come in turn: also conversations do not see each other."""
    caches = [engine.compress(ids(60, seed=n), policy="full") for n in (1, 2)]
    before = [cache.to_bytes() for cache in caches]
    first = [engine.answer(cache, ids(5), max_new_tokens=6).token_ids for cache in caches]
    for turn in range(amount(14, 50)):  # with questions of each length twice, in a soak a hundred
        asked = [(cache, ids(1 + turn % 7, seed=turn)) for cache in caches]
        engine.answer_all(asked, max_new_tokens=3)
    assert [cache.to_bytes() for cache in caches] == before
    assert [engine.answer(cache, ids(5), max_new_tokens=6).token_ids for cache in caches] == first


def test_two_conversations_interleaved_say_what_they_say_one_after_the_other(engine: Engine) -> None:
    cache = engine.compress(ids(60), policy="full")
    turns = [[ids(4, seed=10 * who + turn) for turn in range(4)] for who in (1, 2)]
    with torch.no_grad():
        alone = [logits_behind(engine, cache, list(chain(*each)), [4] * 4) for each in turns]
        with engine.attached(cache) as one, engine.attached(cache) as other:
            together: list[list[torch.Tensor]] = [[], []]
            for turn in range(4):
                for who, past in enumerate((one, other)):
                    given = torch.tensor([turns[who][turn]])
                    together[who].append(engine.model(given, **{CACHE_ARGUMENT: past}).logits[0])
    for found, expected in zip(together, alone, strict=True):
        assert torch.equal(torch.cat(found), expected)


def test_a_pass_of_other_rows_than_the_one_before_is_refused(engine: Engine) -> None:
    with torch.no_grad(), engine.attached(engine.compress(ids(60), policy="full")) as past:
        for piece in past.pieces(torch.tensor([ids(3), ids(3)])):
            engine.model(piece, **{CACHE_ARGUMENT: past})
        with pytest.raises(InvalidRequest, match="has 1 rows, and the recurrent states before it are of 2"):
            engine.model(torch.tensor([[5]]), **{CACHE_ARGUMENT: past})
        past.reset()
        assert engine.model(torch.tensor([[5]]), **{CACHE_ARGUMENT: past}).logits.shape[0] == 1


def test_a_step_that_fails_leaves_every_answer_where_it_was(engine: Engine) -> None:
    cache = engine.compress(ids(60), policy="full")
    expected = engine.answer(cache, ids(5), max_new_tokens=8).token_ids
    batch, answer = engine.batch(), engine.start(cache, ids(5), Sampling(8))

    def broken() -> None:
        raise CacheUnusable("the step is abandoned")

    while not answer.finished:
        with pytest.raises(CacheUnusable):
            batch.step([answer], checkpoint=broken)
        batch.step([answer])
    assert answer.token_ids == expected


@pytest.mark.parametrize("options", few(1, [{}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}]))
def test_generate_says_what_it_says_without_kvshelf(engine: Engine, options: dict[str, Any]) -> None:
    question = ids(7, seed=4)
    cache = engine.compress(ids(60), policy="full")
    whole = torch.tensor([ids(60) + question])
    options = {"max_new_tokens": 16, "do_sample": False} | options
    torch.manual_seed(0)
    expected = engine.model.generate(whole, **options)[:, whole.shape[1] :]
    with engine.attached(cache) as past:
        given = past.with_document(torch.tensor([question]))
        torch.manual_seed(0)
        found = engine.model.generate(given, **{CACHE_ARGUMENT: past}, **options)
    assert found[:, given.shape[1] :].tolist() == expected.tolist()


@pytest.mark.parametrize("codec", ["int8", "int4", "mixed"])
def test_codecs_leave_states_verbatim(engine: Engine, codec: str) -> None:
    cache = engine.compress(ids(150), policy="snapkv", compression_ratio=0.3)
    coded = CompressedCache.from_bytes(cache.to_bytes(codec))
    for layer, before in zip(coded.layers, cache.layers, strict=True):
        own, other = (states.states if isinstance(states, States) else () for states in (layer, before))
        assert all(torch.equal(one.tensor, two.tensor) for one, two in zip(own, other, strict=True))
        if (entries := entries_of(layer)) is not None:
            plain = entries_of(before)
            assert plain is not None
            assert entries.nbytes < 0.6 * plain.nbytes
    assert engine.answer(coded, ids(5), max_new_tokens=4).usage.completion_tokens == 4


@pytest.mark.usefixtures("all_decided")
def test_the_quality_of_a_reduced_cache_is_measured_and_leaves_no_trace(engine: Engine) -> None:
    """Cues and probe passes begin with copies: the cache is the one that is made without them."""
    for policy in ("keydiff", "kvzip", "snapkv"):
        job = engine.prepare(ids(200), policy=policy, compression_ratio=0.5)
        assert engine.probe(job) is not None
        prefill = engine.compressor.prefill([engine.compressor.level(job)], cues=150)
        assert prefill.reference is not None
        full = engine.compress(ids(200), policy="full")
        assert engine.compressor.measure(full, prefill.reference).agreement == 1.0
        cache = prefill.compressions[0].cache
        assert 0 <= engine.compressor.measure(cache, prefill.reference).agreement <= 1
        assert cache.to_bytes() == engine.compress(ids(200), policy=policy, compression_ratio=0.5).to_bytes()


def test_probe_passes_behind_states_see_what_they_see_in_one_sequence() -> None:
    """Of a model without states both ways can be had: passes of one length and of others."""
    engine = Engine(small_model("qwen3"), name="m")
    job = engine.prepare(ids(100), policy="kvzip", compression_ratio=0.5, policy_params={"chunk": 64})
    assert len({len(each.token_ids) for each in job.passes}) > 1
    seen: list[Attended] = []

    class Observer:
        probe_lengths = tuple(len(each.token_ids) for each in job.passes)
        hides = False
        reads_attention = True

        def after_attention(self, layer: Attended) -> None:
            seen.append(layer)

    with torch.no_grad(), kvshelf_attention(engine.model):
        engine.model.base_model(**job.inputs(engine.model.device), use_cache=False, **{CONTEXT: Observer()})
        document = Read.of(engine.passes, job, lambda: None, queries=True)
        apart = list(document.probed(job.passes))
    for found, expected in zip(apart, seen, strict=True):
        for name in ("queries", "keys", "values"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("policy", "params", "said"),
    [
        ("lagkv", {"prefill": "chunked"}, "reads the document in chunks"),
        ("compresskv", {}, "needs a calibration"),
    ],
)
def test_policies_that_states_do_not_go_with_are_refused_before_any_work(
    engine: Engine, policy: str, params: dict[str, Any], said: str
) -> None:
    with pytest.raises(PolicyUnsupported, match=said):
        engine.prepare(ids(100), policy=policy, compression_ratio=0.5, policy_params=params)


def test_an_export_says_what_the_cache_says_and_is_a_copy(engine: Engine) -> None:
    cache, behind = engine.compress(ids(60), policy="full"), ids(9, seed=2)
    before = cache.to_bytes()
    exported = engine.export(cache)
    given = {"position_ids": torch.arange(60, 69)[None], CACHE_ARGUMENT: exported}
    with torch.no_grad():
        found = engine.model(torch.tensor([behind]), **given).logits[0]
    expected = logits_behind(engine, cache, behind, [9])
    torch.testing.assert_close(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-3)
    assert cache.to_bytes() == before


def test_the_codec_klt_is_refused(engine: Engine) -> None:
    with pytest.raises(PolicyUnsupported, match="recurrent states besides; use int4"):
        engine.encoded(engine.compress(ids(100), policy="full"), "klt")


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("mamba2", "says no longest sequence"),
    ],
)
def test_models_whose_states_cannot_be_had_are_refused(family: str, said: str) -> None:
    with pytest.raises(PolicyUnsupported, match=said):
        _ = engine_of(family).passes.layer_shapes


def test_a_model_that_forgets_states_takes_one_token_at_a_time_behind_a_document() -> None:
    """Jamba: its pass over several tokens would answer without the document's states, and say nothing."""
    engine = engine_of("jamba")
    cache = engine.compress(ids(60), policy="full")
    question = torch.tensor([ids(7, seed=4)])
    with torch.no_grad(), engine.attached(cache) as past:
        with pytest.raises(InvalidRequest, match="give it 1 at a time"):
            engine.model(question, **{CACHE_ARGUMENT: past})
        assert [piece.shape for piece in past.pieces(question)] == [(1, 1)] * 7
    expected = engine.model.generate(torch.tensor([ids(60) + ids(7, seed=4)]), max_new_tokens=8, do_sample=False)
    with engine.attached(cache) as past:
        given, options = past.with_document(question), {"max_new_tokens": 8, "do_sample": False}
        found = engine.model.generate(given, **{CACHE_ARGUMENT: past}, prefill_chunk_size=1, **options)
    assert found[:, given.shape[1] :].tolist() == expected[:, 67:].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["jamba", "bailing_hybrid"])
@pytest.mark.usefixtures("all_decided")
def test_the_quality_of_such_models_is_measured_too(family: str) -> None:
    """The cues behind the full cache, in the prefill and over the stored cache, and what a policy's probes saw."""
    engine = engine_of(family)
    for policy in ("keydiff", "kvzip"):
        job = engine.prepare(ids(80), policy=policy, compression_ratio=0.5)
        prefill = engine.compressor.prefill([engine.compressor.level(job)], cues=10)
        assert prefill.reference is not None
        assert engine.compressor.measure(engine.compress(ids(80), policy="full"), prefill.reference).agreement == 1.0
        assert prefill.compressions[0].cache.kept_tokens == 40


def test_a_class_of_caches_that_asks_for_states_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("minimax")
    own = own_class(model)
    assert own is not None
    monkeypatch.delattr(own, "set_linear_cache")
    with pytest.raises(PolicyUnsupported, match="class of caches of its own"):
        Engine(model, name="m")


@pytest.mark.parametrize("family", ["minimax", "qwen3_next"])
def test_the_size_of_states_is_known_without_weights(family: str) -> None:
    model = small_model(family)
    engine = Engine(model, name="m")
    held = [state for layer in engine.compress(ids(20), policy="full").layers for state in states_of(layer)]
    assert state_bytes(model) == sum(state.tensor.nbytes for state in held)
    assert 0 < state_bytes(model.to("meta")) <= state_bytes(small_model(family))


def test_a_model_without_attention_has_nothing_to_compress() -> None:
    config = SimpleNamespace(model_type="mamba2", num_hidden_layers=2, layer_types=["linear_attention"] * 2)
    with pytest.raises(PolicyUnsupported, match="mamba2 has no layer that attends"):
        layer_kinds(config)


def test_a_cache_whose_states_are_not_its_models_is_refused(engine: Engine) -> None:
    """Of the same identity: as a forged blob may claim."""
    cache = engine.compress(ids(20), policy="full")
    at = next(i for i, layer in enumerate(cache.layers) if isinstance(layer, States) and layer.states)
    layer = cache.layers[at]
    assert isinstance(layer, States)
    role, number, tensor = layer.states[0]
    forged: list[tuple[State, ...]] = [
        (),
        (State(role, number, tensor[1:]), *layer.states[1:]),
        (State(role, number, tensor.half()), *layer.states[1:]),
        (State(role, number + 1, tensor), *layer.states[1:]),
    ]
    for states in forged:
        layers = list(cache.layers)
        layers[at] = States(states, layer.beside)
        with pytest.raises(BlobError, match=rf"in layer {at} the states"):
            engine.attach(replace(cache, layers=tuple(layers)))


def test_a_blob_holds_each_state_once_and_in_order(engine: Engine) -> None:
    cache = engine.compress(ids(20), policy="full")
    at = next(i for i, layer in enumerate(cache.layers) if isinstance(layer, States) and layer.states)
    layer = cache.layers[at]
    assert isinstance(layer, States)
    layers = list(cache.layers)
    layers[at] = States(layer.states * 2, layer.beside)
    with pytest.raises(InvalidRequest, match="not in order, or one is there twice"):
        replace(cache, layers=tuple(layers)).to_bytes()


@pytest.fixture(params=["qwen3_5_text", "falcon_h1"])
def readers(request: pytest.FixtureRequest) -> tuple[Engine, Engine]:
    """Two engines of one model with a tokenizer, as before and after a restart."""
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder("kvshelf-tiny"))
    models = [small_model(request.param) for _ in range(2)]
    for model in models:
        torch.manual_seed(0)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    one, other = (Engine(model, tokenizer, name="m") for model in models)
    return one, other


def test_a_shelf_answers_after_a_restart_and_knows_the_size(readers: tuple[Engine, Engine], tmp_path: Path) -> None:
    text = "the harbour master keeps the tide tables in a green book. " * 12
    before, after = readers
    cache = before.compress(text, policy="keydiff", compression_ratio=0.5)
    said = before.answer(cache, "who keeps them?", max_new_tokens=12).token_ids
    with open_store(f"disk://{tmp_path}/shelf") as store:
        manifest = store.put(cache, source=text)
    with open_store(f"disk://{tmp_path}/shelf") as store:
        found = kept_tokens(after, store, manifest.id, None, tenant="default")
        with store.open_cache(manifest.id, tenant="default") as arriving:
            after.attachments.require_own(arriving)
            arriving.read(together=True)
            assert after.answer(arriving.cache(), "who keeps them?", max_new_tokens=12).token_ids == said
    assert sum(found.counts) == sum(layer.entries for layer in cache.reduced)
    assert found.num_heads == sum(layer.kv_heads for layer in cache.reduced)
    assert "states are kept whole" in found.meaning
    shape = Dimensions.of(before.model)
    assert manifest.bytes["full"] == shape.full_bytes(cache.num_tokens) == cache.bytes_full
    for codec in ("none", "int4"):
        stored = len(cache.to_bytes(codec))
        assert abs(shape.stored_bytes(cache.num_tokens, cache.kept_tokens, codec) / stored - 1) < 0.1
