"""Models with latent attention (MLA): caches hold the latents, and what they say behind a stored document is what they
say when they read it again."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.records import Kept, Latents, Parts
from kvshelf.engine import quality
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.attention.latents import Absorbed, latent_modules
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.engine import Engine
from kvshelf.errors import BlobError, InvalidRequest, PolicyUnsupported, StateConflict
from kvshelf.model import calibration
from kvshelf.model.calibration import Calibration, Origin
from kvshelf.model.layers import layer_kinds
from kvshelf.model.prepacking import prepack
from kvshelf.model.source import bundled_folder
from kvshelf.store.url import open_store
from kvshelf.training import head_search
from kvshelf.training.head_search import Needle
from kvshelf.workers.replica.create.sizes import Dimensions
from kvshelf.workers.replica.inspect import kept_tokens
from tests.amounts import few, in_turn
from tests.engine.asking import ids, logits_behind

OLD = Version(transformers.__version__) < Version("5.24")
pytestmark = pytest.mark.skipif(OLD, reason="older versions of transformers cache expanded keys and values")

RANK, ROPE, LAYERS = 16, 8, 4
USUAL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": None,
    "kv_lora_rank": RANK, "q_lora_rank": 32, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": 16, "v_head_dim": 12,
}  # fmt: skip
EXPERTS = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1,
}  # fmt: skip
USUAL_LAYERS = {"num_hidden_layers": LAYERS}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": USUAL_LAYERS | EXPERTS,
    "deepseek_v3": USUAL_LAYERS | EXPERTS,
    "glm4_moe_lite": USUAL_LAYERS | EXPERTS,
    "longcat_flash": {
        "num_layers": LAYERS // 2, "head_dim": ROPE, "ffn_hidden_size": 128, "expert_ffn_hidden_size": 64,
        "moe_topk": 2, "zero_expert_num": 2, "n_routed_experts": 4,
    },
    "minicpm3": USUAL_LAYERS,
    "youtu": USUAL_LAYERS,
}  # fmt: skip
TEXT = "The harbour master keeps the tide tables in a green book. " * 12
SOME = ["deepseek_v2", "deepseek_v3", "longcat_flash"]


def made(family: str, **more: object) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **USUAL | FAMILIES[family] | more)).eval()
    with torch.no_grad():  # logits that differ, and norms as training leaves them
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    return model.requires_grad_(False)


@pytest.fixture(params=SOME)
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(made(request.param), name="m")


@pytest.fixture
def one() -> Engine:
    return Engine(made("deepseek_v3"), name="m")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_says_what_it_says_when_it_is_read_again(family: str) -> None:
    """Through bytes; a token at a time and many, beyond the first capacity of the suffix."""
    model, document, behind = made(family), ids(100), ids(90, seed=2)
    engine = Engine(model, name="m")
    with torch.no_grad():
        expected = model(torch.tensor([document + behind]), use_cache=False).logits[0, 100:]
    cache = CompressedCache.from_bytes(engine.compress(document, policy="full").to_bytes())
    assert all(isinstance(layer, Latents) for layer in cache.layers)
    assert [tuple(layer[:3]) for layer in cache.shape.layers] == [(1, RANK, ROPE)] * LAYERS
    for pieces in ([90], [1] * 90, [5, 1, 70, 1, 13]):
        found = logits_behind(engine, cache, behind, pieces)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_differ_by_rounding(dtype: torch.dtype) -> None:
    """No more than two ways to read the document in the model itself: at once and token by token."""
    model, document, behind = made("deepseek_v3").to(dtype), ids(60), ids(20, seed=2)
    engine = Engine(model, name="m")
    with torch.no_grad():
        expected = model(torch.tensor([document + behind]), use_cache=False).logits[0, 60:].float()
    found = logits_behind(engine, engine.compress(document, policy="full"), behind, [5] + [1] * 15).float()
    assert float((found - expected).abs().max()) < (0.05 if dtype == torch.bfloat16 else 0.01) * expected.abs().max()


def test_two_rows_of_a_call_continue_the_document_each(one: Engine) -> None:
    document, behind = ids(60), [ids(7, seed=3), ids(7, seed=4)]
    cache = one.compress(document, policy="full")
    with torch.no_grad(), one.attached(cache) as past:
        found = [one.model(piece, **{CACHE_ARGUMENT: past}).logits for piece in torch.split(torch.tensor(behind), 4, 1)]
        past.batch_select_indices(torch.tensor([1]))
        after = one.model(torch.tensor([[9]]), **{CACHE_ARGUMENT: past}).logits[0, 0]
    with torch.no_grad():
        expected = [one.model(torch.tensor([document + each]), use_cache=False).logits[0, 60:] for each in behind]
        last = one.model(torch.tensor([document + behind[1] + [9]]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(torch.cat(found, dim=1), torch.stack(expected), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(after, last, atol=2e-5, rtol=1e-4)


POLICIES = [
    "keydiff", "knorm", "snapkv", "pyramidkv", "cake", "kvzip", "kvcues", "tova", "streaming_llm", "h2o",
    "layer_defensivekv", "defensivekv", "pyramidinfer", "sirllm",
]  # fmt: skip


@pytest.mark.parametrize("policy", few(5, POLICIES))
def test_policies_keep_as_many_tokens_as_the_budget_has(one: Engine, policy: str) -> None:
    """In one head of each layer; policies that share a budget among layers in all layers together."""
    cache = one.compress(ids(100), policy=policy, compression_ratio=0.5)
    assert cache.kept_tokens == 50
    assert sum(layer.entries for layer in cache.layers) == 50 * LAYERS
    read = CompressedCache.from_bytes(cache.to_bytes())
    full = one.compress(ids(100), policy="full")
    for layer, whole in zip(read.layers, full.layers, strict=True):
        assert isinstance(layer, Latents)
        rows = layer.positions[0].long()
        torch.testing.assert_close(layer.keys, whole.keys[rows], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(layer.values, whole.values[rows], atol=1e-5, rtol=1e-4)
    assert one.answer(read, ids(5, seed=3), max_new_tokens=4).usage.completion_tokens == 4


@pytest.mark.parametrize(("policy", "params"), [("sablock", {}), ("chunkkv", {"chunk": 4}), ("dapq", {})])
def test_policies_that_read_the_text_keep_the_same_tokens_in_all_heads(policy: str, params: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder("kvshelf-tiny"))
    engine = Engine(made("minicpm3", vocab_size=len(tokenizer)), tokenizer, name="m")
    job = engine.prepare(TEXT, policy=policy, compression_ratio=0.5, policy_params=params)
    cache = CompressedCache.from_bytes(engine.run(job).cache.to_bytes())
    assert abs(cache.kept_tokens - job.budget.tokens) <= (0 if job.policy.exact else 4)
    assert engine.answer(cache, "Who keeps them?", max_new_tokens=4).usage.completion_tokens == 4


def test_policies_that_rank_each_head_by_itself_are_refused_with_text() -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder("kvshelf-tiny"))
    engine = Engine(made("minicpm3", vocab_size=len(tokenizer)), tokenizer, name="m")
    with pytest.raises(PolicyUnsupported, match="chooses other tokens in each head"):
        engine.prepare(TEXT, policy="sentencekv", compression_ratio=0.5)


def test_retrieval_heads_are_searched_and_choose_for_all_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder("kvshelf-tiny"))
    engine = Engine(made("deepseek_v3", vocab_size=len(tokenizer)), tokenizer, name="m")
    text = "The green book is on the table. " * 9
    needle = Needle("set", text, 0, 31, "Where is the green book?")
    answered = head_search.answered_share(engine, needle)
    sample = head_search.head_sample(engine, needle, answered["asked"], answered["answer"])
    assert head_search.retrieval_scores(engine, sample).shape == (LAYERS, 4)
    origin = Origin(model="m", documents=1, tokens=1, answered=1.0, compression_ratio=0.5)
    scores = tuple((1.0, 0.5, 0.2, 0.1) for _ in range(LAYERS))
    made_up = Calibration(weights="w", head_scores=scores, origin=origin, layer_errors=(0.4, 0.3, 0.2, 0.1))
    errors = head_search.layer_errors(engine, sample, made_up)
    assert errors.shape == (LAYERS,)
    assert bool((errors > 0).all())
    monkeypatch.setattr(calibration, "find", lambda *_: made_up)
    cache = engine.compress(ids(200), policy="compresskv", compression_ratio=0.5)
    kept = [layer.entries for layer in cache.layers]
    assert sum(kept) == 100 * LAYERS
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[-1]


@in_turn({"policy": ["keydiff", "snapkv", "cake", "kvzip", "streaming_llm"], "family": SOME})
def test_what_was_evicted_is_not_seen_and_the_rest_is(family: str, policy: str) -> None:
    """The logits are those of the model under a mask that hides what each layer evicted."""
    engine, document, behind = Engine(made(family), name="m"), ids(60), ids(9, seed=2)
    cache = engine.compress(document, policy=policy, compression_ratio=0.4)
    hidden = torch.zeros(LAYERS, 60, dtype=torch.bool)
    for layer, record in enumerate(cache.layers):
        hidden[layer] = True
        hidden[layer, record.positions[0].long()] = False
    expected = masked_logits(engine.model, document + behind, hidden)[60:]
    torch.testing.assert_close(logits_behind(engine, cache, behind, [4, 1, 4]), expected, atol=2e-5, rtol=1e-4)


def masked_logits(model: Any, tokens: list[int], hidden: Tensor) -> Tensor:
    """Logits of tokens, of which those behind the document do not see what is hidden of it in each layer. hidden:
    `[layers, N]` bool."""
    count, document = len(tokens), hidden.shape[1]
    plain = torch.full((count, count), -torch.inf).triu(1)

    def mask(module: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        own = plain.clone()
        own[document:, :document].masked_fill_(hidden[module.layer_idx], -torch.inf)
        return args, given | {"attention_mask": own[None, None]}

    modules = latent_modules(model)
    hooks = [module.register_forward_pre_hook(mask, with_kwargs=True) for module in modules]
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    model.set_attn_implementation(before)
    for hook in hooks:
        hook.remove()
    return logits


def test_a_token_stays_by_the_mean_of_its_scores_over_the_heads(one: Engine) -> None:
    job = one.prepare(ids(80), policy="keydiff", compression_ratio=0.5)
    scores = one.compressor.scores(job)
    assert [tuple(each.shape) for each in scores] == [(1, 80)] * LAYERS
    for layer, score in zip(one.run(job).cache.layers, scores, strict=True):
        assert layer.positions[0].tolist() == sorted(score[0].topk(40).indices.tolist())


@pytest.mark.parametrize("codec", few(2, ["int8", "int4", "int2", "mixed"]))
def test_codecs_take_latents_as_any_entries(engine: Engine, codec: str) -> None:
    cache = engine.compress(ids(150), policy="snapkv", compression_ratio=0.3)
    coded = CompressedCache.from_bytes(cache.to_bytes(codec))
    for layer, before in zip(coded.layers, cache.layers, strict=True):
        parts = layer.parts if isinstance(layer, Parts) else (layer,)
        assert all(isinstance(part, Latents) for part in parts)
        assert layer.nbytes < (0.7 if codec == "int8" else 0.65) * before.nbytes
        assert layer.positions[0].tolist() == before.positions[0].tolist()
    behind = ids(9, seed=2)
    found, exact = (logits_behind(engine, each, behind, [4, 1, 4]) for each in (coded, cache))
    assert float((found - exact).abs().max()) < {"int8": 0.05, "int4": 0.5, "int2": 2, "mixed": 2}[codec] * float(
        exact.abs().max()
    )
    dense = replace(cache, layers=tuple(_dequantized(layer) for layer in coded.layers))
    torch.testing.assert_close(found, logits_behind(engine, dense, behind, [9]), atol=2e-5, rtol=1e-4)


def _dequantized(layer: Any) -> Latents:
    keys, values, _ = layer.dense()
    return Latents(keys[0], values[0], layer.positions[0].int(), (0, keys.shape[1]))


@pytest.mark.slow
@pytest.mark.parametrize("family", SOME)
def test_answers_in_a_batch_are_those_alone(family: str) -> None:
    """Rows on several documents, full, reduced and quantized, that join one after the other."""
    plain, engine = (Engine(made(family), name="m") for _ in range(2))
    documents = [
        (ids(count, seed=count), policy, codec)
        for count in (10, 200)
        for policy, codec in (({"policy": "full"}, "none"), ({"policy": "keydiff", "compression_ratio": 0.5}, "int8"))
    ]
    questions = [ids(1 + 9 * i % 40, seed=50 + i) for i in range(5)]
    expected = []
    for i, question in enumerate(questions):
        document, policy, codec = documents[i % len(documents)]
        cache = plain.compress(document, **policy).encoded(codec)
        expected.append(plain.answer(cache, question, max_new_tokens=70).token_ids)
    batch = engine.batch()
    caches = [engine.compress(document, **policy).encoded(codec) for document, policy, codec in documents]
    asked = [engine.start(caches[i % len(caches)], question, Sampling(70)) for i, question in enumerate(questions)]
    for step in range(120):
        if open_ones := [g for i, g in enumerate(asked) if not g.finished and step >= 3 * i]:
            batch.step(open_ones)
            assert batch.nbytes <= 2 * 64 * 16 * LAYERS * (RANK + ROPE) * 4
    assert [generation.token_ids for generation in asked] == expected


def test_a_step_that_was_abandoned_can_be_taken_again(one: Engine) -> None:
    cache, question = one.compress(ids(60), policy="tova"), ids(5, seed=3)
    expected = one.answer(cache, question, max_new_tokens=9).token_ids
    batch, asked, calls = one.batch(), one.start(cache, question, Sampling(9)), 0

    def stop() -> None:
        nonlocal calls
        calls += 1
        if calls % 7 == 3:
            raise InterruptedError

    for _ in range(40):
        with suppress(InterruptedError):
            batch.step([asked], stop)
        if asked.finished:
            break
    assert asked.token_ids == expected
    assert calls > 9 * LAYERS


def test_a_model_in_panels_runs_by_its_modules() -> None:
    """Its recording would miss the latents."""
    plain, packed = (Engine(made("minicpm3"), name="m") for _ in range(2))
    prepack(packed.model)
    assert packed.passes.program is None
    cache = packed.compress(ids(60), policy="keydiff")
    expected = plain.answer(plain.compress(ids(60), policy="keydiff"), ids(5, seed=3), max_new_tokens=20)
    assert packed.answer(cache, ids(5, seed=3), max_new_tokens=20).token_ids == expected.token_ids


def test_generate_says_what_it_says_without_kvshelf(engine: Engine) -> None:
    document, question = ids(60), ids(7, seed=4)
    whole = torch.tensor([document + question])
    cache = engine.compress(document, policy="full")
    for options in ({"max_new_tokens": 16}, {"max_new_tokens": 9, "num_beams": 3}):
        expected = engine.model.generate(whole, **options, do_sample=False)[0, whole.shape[1] :]
        with engine.attached(cache) as past:
            given = past.with_document(torch.tensor([question]))
            found = engine.model.generate(given, **{CACHE_ARGUMENT: past}, **options, do_sample=False)
        assert found[0, given.shape[1] :].tolist() == expected.tolist()


def test_an_export_is_what_transformers_caches_itself(engine: Engine) -> None:
    document, question = ids(60), ids(7, seed=4)
    whole = torch.tensor([document + question])
    expected = engine.model.generate(whole, max_new_tokens=8, do_sample=False)
    exported = engine.export(engine.compress(document, policy="full"))
    found = engine.model.generate(whole, **{CACHE_ARGUMENT: exported}, max_new_tokens=8, do_sample=False)
    assert found.tolist() == expected.tolist()
    reduced = engine.compress(document, policy="tova", compression_ratio=0.5)
    assert engine.export(reduced, "absolute").get_seq_length() == 30
    with pytest.raises(PolicyUnsupported, match="rotary embedding"):
        engine.export(reduced)


def test_the_quality_of_a_cache_is_measured(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the document decided all that is predicted: random weights decide nothing."""
    monkeypatch.setattr(quality, "decides", lambda own, *_: torch.ones_like(own, dtype=torch.bool))
    job = engine.prepare(ids(200), policy="kvzip", compression_ratio=0.5)
    assert engine.probe(job) is not None
    prefill = engine.compressor.prefill([engine.compressor.level(job)], cues=150)
    assert prefill.reference is not None
    full = engine.compress(ids(200), policy="full")
    level = engine.compressor.level(engine.prepare(ids(200), policy="full"))
    for layer in engine.compressor.prefill([level], cues=150).compressions[0].cache.layers:
        assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes, "nothing of the cues stays in memory"
    of_the_full_cache = engine.compressor.measure(full, prefill.reference)
    assert of_the_full_cache.kl < 1e-4
    assert of_the_full_cache.cues == of_the_full_cache.asked > 0
    assert of_the_full_cache.agreement == 1
    reduced = engine.compressor.measure(prefill.compressions[0].cache, prefill.reference)
    assert reduced.asked == of_the_full_cache.asked
    assert reduced.kl > 10 * of_the_full_cache.kl
    assert reduced.agreement < 1


@pytest.mark.parametrize(
    ("policy", "params", "said"),
    [
        ("ems", {}, "chooses other tokens in each head"),
        ("lagkv", {}, "chooses other tokens in each head"),
        ("lagkv", {"prefill": "chunked"}, "chooses other tokens in each head"),
        ("localkv", {}, "chooses other tokens in each head"),
        ("sage", {}, "chooses other tokens in each head"),
        ("ada", {}, "gives each head a budget of its own"),
        ("think", {}, "removes channels of each head's keys"),
        ("expected_attention", {}, "rotary embedding"),
        ("streaming_llm", {"positions": "cache"}, "rotary embedding"),
    ],
)
def test_policies_that_cannot_choose_for_all_heads_are_refused_before_any_work(
    one: Engine, policy: str, params: dict[str, Any], said: str
) -> None:
    with pytest.raises(PolicyUnsupported, match=said):
        one.prepare(ids(300), policy=policy, compression_ratio=0.5, policy_params=params)


def test_codec_klt_is_refused_before_any_work(one: Engine) -> None:
    with pytest.raises(PolicyUnsupported, match="cannot be undone; use int4"):
        one.compressor.level(one.prepare(ids(100)), "klt")


def test_another_attention_function_is_refused(one: Engine) -> None:
    """It would get keys and values of this call's tokens, and answer without the document."""
    cache, question = one.compress(ids(60), policy="full"), torch.tensor([ids(5)])
    other = made("deepseek_v3")
    with torch.no_grad(), one.attached(cache) as past:
        one.model(question, **{CACHE_ARGUMENT: past})
        with pytest.raises(StateConflict, match="does not run kvshelf's attention"):
            other(question, **{CACHE_ARGUMENT: past})
        for name in ("sdpa", "eager"):
            one.model.set_attn_implementation(name)
            with pytest.raises(StateConflict, match="does not run kvshelf's attention"):
                one.model(question, **{CACHE_ARGUMENT: past})
            one.model.set_attn_implementation("kvshelf")
    with torch.no_grad(), pytest.raises(StateConflict, match="does not run kvshelf's attention"):
        one.model(question, **{CACHE_ARGUMENT: past})


def test_a_layer_that_another_function_attends_is_refused(one: Engine) -> None:
    cache, question = one.compress(ids(60), policy="full"), torch.tensor([ids(5)])
    config = one.model.config.__class__.from_dict(one.model.config.to_dict())
    config._attn_implementation = "sdpa"
    one.model.base_model.layers[0].self_attn.config = config
    with torch.no_grad(), one.attached(cache) as past, pytest.raises(StateConflict, match="does not run kvshelf's"):
        one.model(question, **{CACHE_ARGUMENT: past})


def test_positions_that_do_not_continue_the_document_are_refused(one: Engine) -> None:
    cache, question = one.compress(ids(60), policy="full"), torch.tensor([ids(5)])
    with torch.no_grad(), one.attached(cache) as past, pytest.raises(InvalidRequest, match="continue at position 60"):
        one.model(question, position_ids=torch.arange(5)[None], **{CACHE_ARGUMENT: past})


@pytest.mark.parametrize("spoilt", ["bias", "square", "rope first"])
def test_a_module_that_does_more_than_a_product_is_refused(spoilt: str) -> None:
    model = made("deepseek_v3")
    module = model.base_model.layers[1].self_attn
    expand = type(module).expand_kv

    def other(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = expand(module, latents**3 if spoilt == "square" else latents, rotated)
        if spoilt == "rope first":
            keys = keys.roll(ROPE, dims=-1)
        return keys, values + (0.1 if spoilt == "bias" else 0)

    module.expand_kv = other
    with pytest.raises(PolicyUnsupported, match="by more than a product of matrices"):
        Engine(model, name="m").compress(ids(60), policy="full")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_read_from_the_modules(dtype: torch.dtype) -> None:
    """Exactly, in each dtype."""
    module = latent_modules(made("deepseek_v2").to(dtype))[0]
    absorbed = Absorbed.of(module, dtype, torch.device("cpu"))
    weight = module.kv_b_proj.weight.view(4, 16 + 12, RANK)
    assert torch.equal(absorbed.into, weight[:, :16])
    assert torch.equal(absorbed.back, weight[:, 16:].transpose(1, 2))


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_models_with_an_indexer_are_refused(family: str) -> None:
    from kvshelf_bench.models.small import small_model

    with pytest.raises(PolicyUnsupported, match="has an indexer"):
        Engine(small_model(family), name="m")


@pytest.mark.parametrize("kind", ["sliding_attention", "hybrid"])
def test_latents_of_layers_with_windows_or_states_of_their_own_are_refused(kind: str) -> None:
    config = SimpleNamespace(
        model_type="m", kv_lora_rank=16, qk_rope_head_dim=8, sliding_window=24, layer_types=["full_attention", kind]
    )
    with pytest.raises(PolicyUnsupported, match=f"beside layers of kind {kind}"):
        layer_kinds(config)


def test_a_cache_of_another_kind_of_layer_is_refused(one: Engine) -> None:
    """Of the same identity: as a forged blob may claim."""
    cache = one.compress(ids(20), policy="full")
    first, second, *rest = cache.layers
    plain = Kept(second.keys, second.values, second.entry_positions, second.offsets)
    forged = replace(cache, layers=(first, plain, *rest))
    for each in (forged, CompressedCache.from_bytes(forged.to_bytes())):
        with pytest.raises(BlobError, match="in layer 1 the latent False; its model makes True"):
            one.attach(each)
    shifted = Latents(second.values, second.keys, second.entry_positions, second.offsets)
    with pytest.raises(BlobError, match=rf"in layer 1 the key_dim {ROPE}; its model makes {RANK}"):
        one.attach(replace(cache, layers=(first, shifted, *rest)))


def test_a_shelf_answers_after_a_restart_and_sizes_are_known_before(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder("kvshelf-tiny"))
    before, after = (Engine(made("deepseek_v2", vocab_size=len(tokenizer)), tokenizer, name="m") for _ in range(2))
    cache = before.compress(TEXT, policy="keydiff", compression_ratio=0.5)
    said = before.answer(cache, "Who keeps them?", max_new_tokens=12).token_ids
    with open_store(f"disk://{tmp_path}/shelf") as store:
        manifest = store.put(cache, source=TEXT)
    with open_store(f"disk://{tmp_path}/shelf") as store:
        found = kept_tokens(after, store, manifest.id, None, tenant="default")
        with store.open_cache(manifest.id, tenant="default") as arriving:
            after.attachments.require_own(arriving)
            held = after.attach(arriving).nbytes  # with positions as their bitmap
            assert cache.attached_bytes - 4 * LAYERS * cache.kept_tokens <= held <= cache.attached_bytes
            arriving.read(together=True)
            assert after.answer(arriving.cache(), "Who keeps them?", max_new_tokens=12).token_ids == said
    assert (found.num_heads, found.num_layers, sum(found.counts)) == (LAYERS, LAYERS, LAYERS * cache.kept_tokens)
    assert "share one latent" in found.meaning
    shape, numbers = Dimensions.of(before.model), LAYERS * (RANK + ROPE)
    assert manifest.bytes["full"] == shape.full_bytes(cache.num_tokens) == cache.num_tokens * numbers * 4
    assert before.kv_bytes_per_token == numbers * 4
    assert cache.attached_bytes == cache.nbytes + cache.kept_tokens * numbers * 4
    for codec in ("none", "int4", "int8"):
        stored = len(cache.to_bytes(codec))
        assert abs(shape.stored_bytes(cache.num_tokens, cache.kept_tokens, codec) / stored - 1) < 0.1
