"""Models with sliding windows, attention sinks and soft caps: what they say behind a stored document is what they say
when they read it again."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.records import SlidingWindow, entries_of
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.engine import Engine
from kvshelf.errors import BlobError, PolicyUnsupported
from kvshelf.model.prepacking import prepack
from kvshelf.model.source import bundled_folder
from kvshelf.store.url import open_store
from kvshelf.workers.replica.create.sizes import Dimensions
from kvshelf.workers.replica.inspect import kept_tokens
from kvshelf_bench.models.small import small_model
from tests.amounts import SOAK, few
from tests.engine.asking import ids, logits_behind

WINDOW = 24
USUAL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": None, "sliding_window": WINDOW,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": ALTERNATING, "gemma3_text": ALTERNATING, "gpt_oss": ALTERNATING | EXPERTS, "cohere2": ALTERNATING,
    "olmo3": ALTERNATING, "exaone4": ALTERNATING, "ministral": ALTERNATING,
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "mistral": {}, "smollm3": ALTERNATING | {"use_sliding_window": True}, "starcoder2": {}, "phi3": {},
}  # fmt: skip
ALL_SLIDE = {"mistral", "starcoder2", "phi3"}
AT_EVERY_LENGTH = {"gemma2", "gpt_oss", "mistral"}
"""One with soft caps, one with sinks, and one whose layers all slide."""


def made(family: str, **more: object) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **USUAL | FAMILIES[family] | more)).eval()
    with torch.no_grad():  # logits that differ, and sinks and norms as training leaves them
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    return model.requires_grad_(False)


@pytest.mark.parametrize(
    ("family", "tokens"),
    few(
        12,
        [
            (family, tokens)
            for family in FAMILIES
            for tokens in (
                [WINDOW // 2, WINDOW - 1, WINDOW, 100] if family in AT_EVERY_LENGTH or SOAK else [WINDOW, 100]
            )
        ],
    ),
)
def test_a_document_says_what_it_says_when_it_is_read_again(family: str, tokens: int) -> None:
    """Questions that go on for two windows, through bytes; a token at a time and many."""
    model, document, behind = made(family), ids(tokens), ids(2 * WINDOW, seed=2)
    engine = Engine(model, name="m")
    with torch.no_grad():
        expected = model(torch.tensor([document + behind]), use_cache=False).logits[0, tokens:]
    cache = CompressedCache.from_bytes(engine.compress(document, policy="full").to_bytes())
    assert any(isinstance(layer, SlidingWindow) for layer in cache.layers)
    for pieces in ([2 * WINDOW], [1] * (2 * WINDOW), [5, 1, WINDOW + 7, 1, WINDOW - 14]):
        found = logits_behind(engine, cache, behind, pieces)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.fixture(scope="module", params=["gemma2", "gpt_oss", "olmo3", "cohere2"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(made(request.param), name="m")


@pytest.mark.parametrize(
    "policy",
    few(4, ["keydiff", "snapkv", "pyramidkv", "cake", "kvzip", "ems", "tova", "pyramidinfer", "sirllm", "cam"]),
)
def test_policies_reduce_the_other_layers_alone(engine: Engine, policy: str) -> None:
    """The budget is that of these layers, and what they keep is what the policy chooses among them."""
    document = ids(100)
    cache = engine.compress(document, policy=policy, compression_ratio=0.5)
    windows = [isinstance(layer, SlidingWindow) for layer in cache.layers]
    assert windows == [True, False] * 2
    assert cache.kept_tokens == 50
    for layer in cache.layers[::2]:
        assert [head.tolist() for head in layer.positions] == [list(range(100 - WINDOW + 1, 100))] * 2
    full = engine.compress(document, policy="full")
    for layer, whole in zip(cache.layers[::2], full.layers[::2], strict=True):
        assert torch.equal(layer.keys, whole.keys)
    assert CompressedCache.from_bytes(cache.to_bytes()).kept_tokens == 50
    assert engine.answer(cache, ids(5, seed=3), max_new_tokens=4).usage.completion_tokens == 4


QUESTIONS = [ids(1 + 9 * i % 40, seed=50 + i) for i in range(8)]


def caches_of(engine: Engine, family: str) -> list[CompressedCache]:
    """Documents shorter and longer than the window, whole and reduced."""
    policies = [{"policy": "full"}]
    if family not in ALL_SLIDE:
        policies.append({"policy": "keydiff", "compression_ratio": 0.5})
    return [engine.compress(ids(count, seed=count), **policy) for count in (10, 60, 200) for policy in policies]


@cache
def answers_alone(family: str) -> list[list[int]]:
    engine = Engine(made(family), name="m")
    caches = caches_of(engine, family)
    return [
        engine.answer(caches[i % len(caches)], question, max_new_tokens=WINDOW + 4).token_ids
        for i, question in enumerate(QUESTIONS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["by modules", "recorded"])
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gpt_oss", "olmo3", "mistral"])
def test_answers_in_a_batch_are_those_alone(family: str, packed: bool) -> None:
    """Rows on documents shorter and longer than the window, whose answers leave the document behind."""
    engine = Engine(made(family), name="m")
    if packed:
        prepack(engine.model)
        assert (engine.passes.program is not None) == (family != "gpt_oss")  # experts run by their modules
    batch, caches = engine.batch(), caches_of(engine, family)
    asked = [
        engine.start(caches[i % len(caches)], question, Sampling(WINDOW + 4)) for i, question in enumerate(QUESTIONS)
    ]
    for step in range(200):
        if open_ones := [g for i, g in enumerate(asked) if not g.finished and step >= 3 * i]:
            batch.step(open_ones)
    assert [generation.token_ids for generation in asked] == answers_alone(family)


def test_generate_says_what_it_says_without_kvshelf(engine: Engine) -> None:
    document, question = ids(60), ids(7, seed=4)
    whole = torch.tensor([document + question])
    expected = engine.model.generate(whole, max_new_tokens=2 * WINDOW, do_sample=False)[0, whole.shape[1] :]
    with engine.attached(engine.compress(document, policy="full")) as past:
        given = past.with_document(torch.tensor([question]))
        found = engine.model.generate(given, **{CACHE_ARGUMENT: past}, max_new_tokens=2 * WINDOW, do_sample=False)
    assert found[0, given.shape[1] :].tolist() == expected.tolist()


@pytest.mark.parametrize("codec", ["int8", "int4", "mixed"])
def test_codecs_leave_windows_verbatim(engine: Engine, codec: str) -> None:
    cache = engine.compress(ids(150), policy="snapkv", compression_ratio=0.3)
    coded = CompressedCache.from_bytes(cache.to_bytes(codec))
    for index, (layer, before) in enumerate(zip(coded.layers, cache.layers, strict=True)):
        if index % 2 == 0:
            assert isinstance(layer, SlidingWindow)
            assert torch.equal(layer.keys, before.keys)
            assert torch.equal(layer.values, before.values)
        else:
            assert layer.nbytes < 0.6 * before.nbytes
    assert engine.answer(coded, ids(5), max_new_tokens=4).usage.completion_tokens == 4


@pytest.mark.usefixtures("all_decided")
def test_the_quality_of_a_reduced_cache_is_measured(engine: Engine) -> None:
    job = engine.prepare(ids(200), policy="keydiff", compression_ratio=0.5)
    probe = engine.probe(job)
    assert probe is not None
    prefill = engine.compressor.prefill([engine.compressor.level(job)], cues=150)
    assert prefill.reference is not None
    full = engine.compress(ids(200), policy="full")
    assert engine.compressor.measure(full, prefill.reference).agreement == 1.0
    assert 0 <= engine.compressor.measure(prefill.compressions[0].cache, prefill.reference).agreement <= 1


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("lagkv", "reads the document in chunks"),
        ("streaming_llm", "rotary embedding"),
        ("compresskv", "needs a calibration"),
    ],
)
def test_policies_that_windows_do_not_go_with_are_refused_before_any_work(
    engine: Engine, policy: str, said: str
) -> None:
    params = {"streaming_llm": {"positions": "cache"}, "lagkv": {"prefill": "chunked"}}.get(policy, {})
    with pytest.raises(PolicyUnsupported, match=said):
        engine.prepare(ids(100), policy=policy, compression_ratio=0.5, policy_params=params)


def test_a_model_of_windows_alone_has_nothing_to_reduce() -> None:
    engine = Engine(made("mistral"), name="m")
    with pytest.raises(PolicyUnsupported, match="nothing to reduce; take policy full"):
        engine.prepare(ids(100), policy="keydiff")
    cache = engine.compress(ids(100), policy="full")
    assert cache.kept_tokens == WINDOW - 1
    with pytest.raises(PolicyUnsupported, match="sliding window, of which only the last tokens"):
        engine.export(cache)


@pytest.mark.parametrize("window", [USUAL["max_position_embeddings"], 1024])
def test_a_window_as_long_as_the_longest_sequence_is_none(window: int) -> None:
    """Phi-3-mini-128k has a window of 262,144 tokens and takes 131,072."""
    windowed, plain = (Engine(made("phi3", sliding_window=each), name="m") for each in (window, None))
    ours, theirs = (engine.compress(ids(100), policy="snapkv", budget_tokens=40) for engine in (windowed, plain))
    assert ours.kept_tokens == theirs.kept_tokens == 40
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.entry_positions, other.entry_positions)
    assert Engine(made("phi3", sliding_window=511), name="m").kinds[0].window == 511


def test_a_configuration_that_tells_another_window_than_the_layer_is_refused() -> None:
    engine = Engine(made("olmo3"), name="m")
    engine.model.base_model.layers[2].self_attn.sliding_window = 30
    with pytest.raises(PolicyUnsupported, match=r"layer 2 attends with a sliding window of 30, .* says 24"):
        engine.compress(ids(100), policy="full")
    with pytest.raises(PolicyUnsupported, match="layer 2"):
        _ = engine.passes.layer_shapes


def test_a_cache_whose_windows_are_not_its_models_is_refused() -> None:
    """Of the same identity: as a forged blob may claim."""
    engine = Engine(made("olmo3"), name="m")
    cache = engine.compress(ids(20), policy="full")
    first, second, *rest = cache.layers
    with pytest.raises(BlobError, match=r"in layer 0 the window None; its model makes 24"):
        engine.attach(replace(cache, layers=(second, second, *rest)))
    with pytest.raises(BlobError, match=r"in layer 1 the window 24; its model makes None"):
        engine.attach(replace(cache, layers=(first, first, *rest)))


@pytest.mark.skipif(CACHE_ARGUMENT != "cache", reason="older transformers copy the keys and values of shared layers")
@pytest.mark.parametrize("options", [{"policy": "full"}, {"policy": "keydiff", "compression_ratio": 0.5}])
def test_layers_that_use_the_keys_and_values_of_others_store_none(options: dict[str, Any]) -> None:
    """Gemma 3n: the last two of four layers, one of which sees through a window."""
    engine, document, behind = Engine(small_model("gemma3n_text"), name="m"), ids(100), ids(2 * WINDOW, seed=2)
    cache = CompressedCache.from_bytes(engine.compress(document, **options).to_bytes())
    assert [entries_of(layer) is not None for layer in cache.layers] == [True, True, False, False]
    assert cache.bytes_full == Dimensions.of(engine.model).full_bytes(100)
    with torch.no_grad():
        expected = engine.model(torch.tensor([document + behind]), use_cache=False).logits[0, 100:]
    found = logits_behind(engine, cache, behind, [5, 1, WINDOW, WINDOW - 6])
    alike = torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-3)
    assert alike == (options["policy"] == "full")
    asked = [(cache, ids(5)), (cache, ids(9))]
    together = engine.answer_all(asked, max_new_tokens=4)
    assert [each.token_ids for each in together] == [engine.answer(*one, max_new_tokens=4).token_ids for one in asked]


@pytest.fixture
def readers() -> tuple[Engine, Engine]:
    """Two engines of one model with a tokenizer, as before and after a restart."""
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder("kvshelf-tiny"))
    one, other = (Engine(made("gemma2", vocab_size=len(tokenizer)), tokenizer, name="m") for _ in range(2))
    return one, other


def test_a_shelf_counts_what_policies_choose_from_and_answers_after_a_restart(
    readers: tuple[Engine, Engine], tmp_path: Path
) -> None:
    text = "The harbour master keeps the tide tables in a green book. " * 12
    before, after = readers
    cache = before.compress(text, policy="keydiff", compression_ratio=0.5)
    said = before.answer(cache, "Who keeps them?", max_new_tokens=12).token_ids
    with open_store(f"disk://{tmp_path}/shelf") as store:
        manifest = store.put(cache, source=text)
    with open_store(f"disk://{tmp_path}/shelf") as store:
        found = kept_tokens(after, store, manifest.id, None, tenant="default")
        with store.open_cache(manifest.id, tenant="default") as arriving:
            after.attachments.require_own(arriving)
            arriving.read(together=True)
            assert after.answer(arriving.cache(), "Who keeps them?", max_new_tokens=12).token_ids == said
    of_layers = [layer for layer in cache.layers if not isinstance(layer, SlidingWindow)]
    assert sum(found.counts) == sum(layer.entries for layer in of_layers)
    assert (found.num_heads, found.num_layers, len(found.layers)) == (4, 4, 4)
    assert "sliding window" in found.meaning
    shape = Dimensions.of(before.model)
    tokens = 2 * cache.num_tokens + 2 * (WINDOW - 1)
    assert manifest.bytes["full"] == shape.full_bytes(cache.num_tokens) == tokens * 2 * 2 * 16 * 4
    for codec in ("none", "int4"):
        stored = len(cache.to_bytes(codec))
        assert abs(shape.stored_bytes(cache.num_tokens, cache.kept_tokens, codec) / stored - 1) < 0.1
