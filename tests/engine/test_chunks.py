"""Layers with chunked attention (Llama 4), beside layers without RoPE whose queries have a temperature by position:
what a model says behind a stored document is what it says when it reads it again."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.records import Chunk, Kept
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.attention.function import kvshelf_attention
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.engine import Engine
from kvshelf.errors import BlobError, PolicyUnsupported
from kvshelf.model.prepacking import prepack
from kvshelf.workers.replica.create.sizes import Dimensions
from tests.amounts import SOAK, few
from tests.engine.asking import ids, logits_behind

CHUNK = 24
USUAL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "intermediate_size_mlp": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": None,
    "num_local_experts": 4, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 2,
    "attention_chunk_size": CHUNK, "floor_scale": 10, "attn_scale": 2.0,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "chunks and temperature": {},
    "chunks": {"attn_temperature_tuning": False, "use_qk_norm": False},
    "temperature": {"layer_types": ["full_attention"] * 4},
    "dense": {"moe_layers": [9], "attn_temperature_tuning": False},
    "all chunks": {"no_rope_layers": [1, 1, 1, 1]},
}


def made(variant: str = "chunks and temperature", **more: object) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama4_text", **USUAL | VARIANTS[variant] | more)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # logits that differ, and norms as training leaves them
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    return model.requires_grad_(False)


LENGTHS = [CHUNK - 1, CHUNK, 100, 1, CHUNK // 2, CHUNK + 1, CHUNK * 3 // 2, 4 * CHUNK]


@pytest.mark.parametrize(
    ("variant", "tokens"),
    few(
        8,
        [
            (variant, tokens)
            for variant in VARIANTS
            for tokens in (LENGTHS if variant == "chunks and temperature" or SOAK else LENGTHS[:3])
        ],
    ),
)
def test_a_document_says_what_it_says_when_it_is_read_again(variant: str, tokens: int) -> None:
    """Questions that go on for two chunks, through bytes; a token at a time and many."""
    model, document, behind = made(variant), ids(tokens), ids(2 * CHUNK, seed=2)
    engine = Engine(model, name="m")
    with torch.no_grad():
        expected = model(torch.tensor([document + behind]), use_cache=False).logits[0, tokens:]
    cache = CompressedCache.from_bytes(engine.compress(document, policy="full").to_bytes())
    chunked = [kind == "chunked_attention" for kind in model.config.layer_types]
    assert [isinstance(layer, Chunk) for layer in cache.layers] == chunked
    for layer in (layer for layer in cache.layers if isinstance(layer, Chunk)):
        assert [head.tolist() for head in layer.positions] == [list(range(tokens // CHUNK * CHUNK, tokens))] * 2
    for pieces in ([2 * CHUNK], [1] * (2 * CHUNK), [5, 1, CHUNK + 7, 1, CHUNK - 14]):
        found = logits_behind(engine, cache, behind, pieces)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(made(), name="m")


@pytest.mark.parametrize(
    "policy", ["keydiff", "snapkv", "pyramidkv", "cake", "kvzip", "ems", "tova", "pyramidinfer", "sirllm", "cam"]
)
def test_policies_reduce_the_other_layers_alone(engine: Engine, policy: str) -> None:
    document = ids(100)
    cache = engine.compress(document, policy=policy, compression_ratio=0.5)
    assert [isinstance(layer, Chunk) for layer in cache.layers] == [True, False] * 2
    assert cache.kept_tokens == 50
    full = engine.compress(document, policy="full")
    for layer, whole in zip(cache.layers[::2], full.layers[::2], strict=True):
        torch.testing.assert_close(layer.keys, whole.keys, atol=1e-5, rtol=0)  # passes of other lengths round otherwise
    assert CompressedCache.from_bytes(cache.to_bytes()).kept_tokens == 50
    assert engine.answer(cache, ids(5, seed=3), max_new_tokens=4).usage.completion_tokens == 4


QUESTIONS = [ids(1 + 9 * i % 40, seed=50 + i) for i in range(10)]


def caches_of(engine: Engine) -> list[CompressedCache]:
    """Documents shorter and longer than a chunk and of whole chunks, whole and reduced."""
    policies = [{"policy": "full"}, {"policy": "keydiff", "compression_ratio": 0.5}]
    return [engine.compress(ids(count, seed=count), **policy) for count in (10, 48, 61, 200) for policy in policies]


@cache
def answers_alone(variant: str) -> list[list[int]]:
    engine = Engine(made(variant), name="m")
    caches = caches_of(engine)
    return [alone(engine, caches[i % len(caches)], question, CHUNK + 4) for i, question in enumerate(QUESTIONS)]


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["by modules", "prepacked"])
@pytest.mark.parametrize("variant", ["chunks and temperature", "temperature", "dense"])
def test_answers_in_a_batch_are_those_alone(variant: str, packed: bool) -> None:
    """Rows whose answers leave the last chunk of their document behind."""
    engine = Engine(made(variant), name="m")
    if packed:
        prepack(engine.model)
    batch, caches = engine.batch(), caches_of(engine)
    asked = [
        engine.start(caches[i % len(caches)], question, Sampling(CHUNK + 4)) for i, question in enumerate(QUESTIONS)
    ]
    for step in range(200):
        if open_ones := [g for i, g in enumerate(asked) if not g.finished and step >= 3 * i]:
            batch.step(open_ones)
    assert [generation.token_ids for generation in asked] == answers_alone(variant)


def alone(engine: Engine, cache: CompressedCache, question: list[int], count: int) -> list[int]:
    """An answer by an attached cache, whose length is its own."""
    with engine.attached(cache) as past:
        given = past.with_document(torch.tensor([question]))
        found = engine.model.generate(given, **{CACHE_ARGUMENT: past}, max_new_tokens=count, do_sample=False)
    tokens: list[int] = found[0, given.shape[1] :].tolist()
    return tokens


@pytest.mark.parametrize("tokens", [48, 60])
def test_generate_says_what_it_says_without_kvshelf(engine: Engine, tokens: int) -> None:
    document, question = ids(tokens), ids(7, seed=4)
    whole = torch.tensor([document + question])
    expected = engine.model.generate(whole, max_new_tokens=2 * CHUNK, do_sample=False)[0, whole.shape[1] :]
    assert alone(engine, engine.compress(document, policy="full"), question, 2 * CHUNK) == expected.tolist()


@pytest.mark.parametrize("codec", ["int8", "int4", "mixed"])
def test_codecs_leave_chunks_verbatim(engine: Engine, codec: str) -> None:
    cache = engine.compress(ids(150), policy="snapkv", compression_ratio=0.3)
    coded = CompressedCache.from_bytes(cache.to_bytes(codec))
    for index, (layer, before) in enumerate(zip(coded.layers, cache.layers, strict=True)):
        if index % 2 == 0:
            assert isinstance(layer, Chunk)
            assert torch.equal(layer.keys, before.keys)
            assert torch.equal(layer.values, before.values)
        else:
            assert layer.nbytes < 0.6 * before.nbytes
    assert engine.answer(coded, ids(5), max_new_tokens=4).usage.completion_tokens == 4


@pytest.mark.usefixtures("all_decided")
@pytest.mark.parametrize("tokens", [192, 200])
def test_the_quality_of_a_cache_is_measured_at_the_positions_of_its_cues(engine: Engine, tokens: int) -> None:
    """The prefill has many passes behind the document, each from the document's end on."""
    job = engine.prepare(ids(tokens), policy="keydiff", compression_ratio=0.5)
    probe = engine.probe(job)
    assert probe is not None
    prefill = engine.compressor.prefill([engine.compressor.level(job)], cues=150)
    assert prefill.reference is not None
    full = engine.compress(ids(tokens), policy="full")
    assert engine.compressor.measure(full, prefill.reference).agreement == 1.0
    assert engine.compressor.measure(full, prefill.reference).kl < 1e-6
    assert 0 <= engine.compressor.measure(prefill.compressions[0].cache, prefill.reference).agreement <= 1


@pytest.mark.parametrize(
    ("policy", "said"),
    [("lagkv", "reads the document in chunks .* chunked attention"), ("compresskv", "needs a calibration")],
)
def test_policies_that_chunks_do_not_go_with_are_refused_before_any_work(
    engine: Engine, policy: str, said: str
) -> None:
    params = {"lagkv": {"prefill": "chunked"}}.get(policy, {})
    with pytest.raises(PolicyUnsupported, match=said):
        engine.prepare(ids(100), policy=policy, compression_ratio=0.5, policy_params=params)


def test_a_model_of_chunks_alone_has_nothing_to_reduce() -> None:
    engine = Engine(made("all chunks"), name="m")
    with pytest.raises(PolicyUnsupported, match=r"chunked attention, .* nothing to reduce; take policy full"):
        engine.prepare(ids(100), policy="keydiff")
    cache = engine.compress(ids(100), policy="full")
    assert cache.kept_tokens == 100 % CHUNK
    with pytest.raises(PolicyUnsupported, match="chunked attention, of which only the last tokens"):
        engine.export(cache)


def test_a_cache_whose_chunks_are_not_its_models_is_refused(engine: Engine) -> None:
    """Of the same identity: as a forged blob may claim."""
    cache = engine.compress(ids(20), policy="full")
    first, second, *rest = cache.layers
    assert isinstance(first, Chunk)
    with pytest.raises(BlobError, match=r"in layer 0 the chunk None; its model makes 24"):
        engine.attach(replace(cache, layers=(second, second, *rest)))
    with pytest.raises(BlobError, match=r"in layer 1 the chunk 24; its model makes None"):
        engine.attach(replace(cache, layers=(first, first, *rest)))
    with pytest.raises(BlobError, match=r"in layer 0 the chunk 32; its model makes 24"):
        engine.attach(replace(cache, layers=(replace(first, chunk=32), second, *rest)))


def test_chunks_of_no_size_are_refused() -> None:
    model = made()
    model.config.attention_chunk_size = None
    with pytest.raises(PolicyUnsupported, match="chunked attention and no attention_chunk_size"):
        Engine(model, name="m")


def test_another_chunk_is_another_model(engine: Engine) -> None:
    other = Engine(made(attention_chunk_size=32), name="m")
    assert engine.identity.attention != other.identity.attention
    assert engine.identity.weights == other.identity.weights


def test_sizes_count_what_questions_see(engine: Engine) -> None:
    shape = Dimensions.of(engine.model)
    for tokens in (48, 60, 300):
        cache = engine.compress(ids(tokens), policy="full")
        seen = 2 * tokens + 2 * (tokens % CHUNK)
        assert cache.bytes_full == shape.full_bytes(tokens) == seen * 2 * 2 * 16 * 4
        for codec in ("none", "int4"):
            assert abs(shape.stored_bytes(tokens, tokens, codec) / len(cache.to_bytes(codec)) - 1) < 0.15
        assert sum(layer.entries for layer in cache.layers if type(layer) is Kept) == 2 * 2 * tokens


def test_a_cache_of_transformers_does_not_tell_its_chunks(engine: Engine) -> None:
    with kvshelf_attention(engine.model), pytest.raises(PolicyUnsupported, match="nothing says where its chunks begin"):
        engine.model.generate(torch.tensor([ids(30)]), max_new_tokens=4)
