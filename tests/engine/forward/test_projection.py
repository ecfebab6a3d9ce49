"""Residuals in place of keys and values (policy kvdirect): what the model makes of them are its own keys and values."""

from __future__ import annotations

import copy
import gc
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from kvshelf.artifact import blob
from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.coder import plain_record
from kvshelf.artifact.records import Kept, Recent, Residuals, entries_of, parts_of
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.attention.latents import close
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.engine import Engine
from kvshelf.engine.forward.calls import Calls
from kvshelf.engine.forward.projection import RUN, Projection
from kvshelf.engine.inputs.job import Level
from kvshelf.engine.soft import Soft, soft_tokens
from kvshelf.errors import BlobError, InvalidRequest, PolicyUnsupported, StateConflict
from kvshelf.integrations.vllm.model import ReadingModel
from kvshelf.kernels.quantize.rows import plain as plain_rows
from kvshelf.store.disk import DiskStore
from kvshelf_bench.models.small import small_model

KINDS = ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "cohere2", "olmo2", "glm4"]
"""Norms of keys, biases, norms behind the attention, heads that rotate in part, parallel blocks, some with windows."""
TOKENS = 60
QUESTION = [7, 300, 12]


def many_heads(kind: str, dtype: torch.dtype = torch.float32) -> Engine:
    """A model whose query heads have keys and values of their own."""
    torch.manual_seed(0)
    config = small_model(kind).config
    config = type(config)(**{**config.to_dict(), "num_key_value_heads": config.num_attention_heads})
    config.name_or_path = kind
    model = type(small_model(kind))(config).eval().requires_grad_(False).to(dtype)
    with torch.no_grad():
        for weight in model.parameters():  # norms and biases, too
            weight.add_(torch.randn(weight.shape).to(dtype) * 0.05)
    return Engine(model)


def ids(count: int, seed: int = 1) -> list[int]:
    return torch.randint(5, 500, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def kept(engine: Engine, policy: str, document: Any = None, **more: Any) -> CompressedCache:
    cache = engine.compress(ids(TOKENS) if document is None else document, policy=policy, **more)
    return CompressedCache.from_bytes(cache.to_bytes())


def require_alike(one: CompressedCache, other: CompressedCache, share: float) -> None:
    """Equal positions, and keys and values that differ by no more than this share of the largest; 0: in no bit."""
    for ours, theirs in zip(map(entries_of, one.layers), map(entries_of, other.layers), strict=True):
        assert ours is not None
        assert theirs is not None
        assert [head.tolist() for head in ours.positions] == [head.tolist() for head in theirs.positions]
        for mine, exact in zip(ours.dense(), theirs.dense(), strict=True):
            assert torch.equal(mine, exact) if not share else close(mine.float(), exact.float(), share)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_values_are_those_of_full(kind: str, dtype: torch.dtype) -> None:
    """To the bit where the same operations made both: by the model's modules. A recording rounds otherwise in fp32."""
    engine = many_heads(kind, dtype)
    job, other = engine.prepare(ids(TOKENS), policy="kvdirect"), engine.prepare(ids(TOKENS), policy="full")
    direct, full = (each.cache for each in engine.compressor.prefill([Level(job), Level(other)]).compressions)
    kinds = {type(entries_of(layer)) for layer in direct.layers}
    assert Residuals in kinds
    assert all(issubclass(each, Residuals | Recent) for each in kinds)
    require_alike(engine.decoded(CompressedCache.from_bytes(direct.to_bytes())), full, 0)
    alone = kept(engine, "full")
    require_alike(engine.decoded(direct), alone, 1e-5 if dtype == torch.float32 else 0.05)
    assert direct.bytes_full == full.bytes_full
    assert direct.shape == full.shape
    answers = [engine.answer(cache, QUESTION, max_new_tokens=5).token_ids for cache in (direct, full)]
    assert answers[0] == answers[1]


def test_passes_behind_a_document_leave_it_as_it_is(llama: Engine) -> None:
    """Cues, by which quality is measured: it is not taken for 1, as that of the full cache."""
    document = ids(120)
    policies = [llama.compressor.level(llama.prepare(document, policy=name)) for name in ("kvdirect", "full")]
    assert [level.loses_nothing for level in policies] == [False, True]
    direct, full = llama.compressor.levels(policies, cues=2)
    assert direct.quality is not None
    assert full.quality is not None
    assert (direct.quality.full, full.quality.full) == (False, True)
    assert direct.quality.asked == 2
    assert direct.quality.kl == pytest.approx(0, abs=1e-6)
    entries = [part for layer in direct.cache.layers for part in parts_of(entries_of(layer))]
    assert {part.keys.shape for part in entries} == {(120, llama.model.config.hidden_size)}
    require_alike(llama.decoded(direct.cache), full.cache, 1e-5)


def naive(engine: Engine, layer: int, residuals: Tensor, positions: list[int]) -> tuple[Tensor, Tensor]:
    """Keys and values `[heads, N, D]` of residuals `[N, width]`, a token and a head at a time, in fp64."""
    config, module = engine.model.config, engine.model.model.layers[layer]
    attention, one = module.self_attn, float(config.model_type == "gemma")
    dim, heads = attention.head_dim, config.num_key_value_heads
    theta = config.rope_parameters["rope_theta"]

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x / math.sqrt(sum(float(a) ** 2 for a in x) / len(x) + config.rms_norm_eps) * (weight.double() + one)

    def projected(linear: Any, x: Tensor, head: int) -> Tensor:
        rows = range(head * dim, (head + 1) * dim)
        bias = [0.0] * (heads * dim) if linear.bias is None else linear.bias.double()
        return torch.stack([linear.weight[row].double() @ x + bias[row] for row in rows])

    def rotated(x: Tensor, position: int) -> Tensor:
        out, half = x.clone(), dim // 2
        for i in range(half):
            angle = position * theta ** (-2 * i / dim)
            out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return out

    keys, values = torch.zeros(2, heads, len(residuals), dim, dtype=torch.float64)
    for at, (row, position) in enumerate(zip(residuals.double(), positions, strict=True)):
        x = normed(row, module.input_layernorm.weight)
        for head in range(heads):
            key = projected(attention.k_proj, x, head)
            key = normed(key, attention.k_norm.weight) if hasattr(attention, "k_norm") else key
            keys[head, at] = rotated(key, position)
            values[head, at] = projected(attention.v_proj, x, head)
    return keys, values


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma"])
def test_they_are_those_of_a_loop_in_fp64(kind: str) -> None:
    engine = many_heads(kind)
    cache = kept(engine, "kvdirect", ids(12))
    made = engine.decoded(cache).layers
    for index in (0, 1):
        stored, plain = cache.layers[index], made[index]
        assert isinstance(stored, Residuals)
        assert isinstance(stored.keys, Tensor)
        assert isinstance(plain, Kept)
        expected = naive(engine, index, stored.keys, stored.positions[0].tolist())
        for ours, exact in zip(plain.dense(), expected, strict=False):
            assert close(ours.double(), exact, 1e-5)


@pytest.fixture(scope="module")
def llama() -> Engine:
    return many_heads("llama")


@pytest.mark.parametrize(("codec", "share"), [("lossless", 0), ("int8", 0.02), ("int4", 0.3), ("mixed:low=int4", 0.3)])
def test_codecs_store_residuals_in_fewer_bytes(llama: Engine, codec: str, share: float) -> None:
    plain = kept(llama, "kvdirect")
    coded = (
        plain.encoded(codec) if codec[:5] != "mixed" else llama.compress(ids(TOKENS), policy="kvdirect").encoded(codec)
    )
    read = CompressedCache.from_bytes(coded.to_bytes())
    assert len(read.to_bytes()) < len(plain.to_bytes())
    assert read.coded
    header = blob.inspect(read.to_bytes()).header
    assert header.projected
    decoded = llama.decoded(read)
    require_alike(decoded, llama.decoded(plain), share)
    pairs = zip(map(entries_of, read.layers), map(entries_of, decoded.layers), strict=True)
    for index, (stored, made) in enumerate(pairs):
        for part, other in zip(parts_of(stored), parts_of(made), strict=True):  # the rounded residuals, and no others
            rows = plain_record(part).keys
            pair = llama.passes.projection.project(index, plain_rows(rows), part.positions[0])
            for head, own in enumerate(other.heads()):
                assert all(torch.equal(ours, exact[head]) for ours, exact in zip(own, pair, strict=True))
    assert llama.answer(read, QUESTION).token_ids == llama.answer(decoded, QUESTION).token_ids
    spare = sum(part.entries for layer in read.layers for part in parts_of(entries_of(layer))) * 4  # of positions
    for counted, held in ((read.attached_bytes, decoded.nbytes), (header.attached_bytes, decoded.nbytes - spare)):
        assert counted == pytest.approx(held, rel=0.02)


def test_it_takes_half_of_the_bytes(llama: Engine) -> None:
    """64 numbers for 128 in each layer."""
    direct, full = (
        sum(spans["keys"].nbytes + spans.get("values", spans["keys"]).nbytes * ("values" in spans) for spans in rows)
        for rows in (
            [spans for layer in blob.inspect(kept(llama, policy).to_bytes()).header.layers for spans in layer.arrays]
            for policy in ("kvdirect", "full")
        )
    )
    assert direct * 2 == full


def test_a_stored_cache_is_asked_while_it_arrives(llama: Engine, tmp_path: Path) -> None:
    direct, full = kept(llama, "kvdirect"), kept(llama, "full")
    with DiskStore.open(tmp_path) as store, store.open_cache(store.put(direct).id) as arriving:
        document = llama.attach(arriving)
        assert not document.arrived
        reading = threading.Thread(target=arriving.read)
        reading.start()
        answers, batch = [llama.start(each, QUESTION, Sampling(8)) for each in (document, full)], llama.batch()
        while not all(answer.finished for answer in answers):
            batch.step([answer for answer in answers if not answer.finished])
        reading.join()
    assert answers[0].token_ids == answers[1].token_ids
    assert document.stored("none") is None, "what it holds are keys and values"


def test_what_is_done_to_a_cache_of_full_is_done_to_it(llama: Engine) -> None:
    """Append, ask together, attach, export, select, bound, decode in a batch."""
    both = [kept(llama, policy) for policy in ("kvdirect", "full")]
    grown = [llama.extend(cache, ids(20, seed=2), policy="full") for cache in both]
    assert {type(part) for layer in grown[0].layers for part in parts_of(layer)} == {Residuals, Kept}
    require_alike(llama.decoded(CompressedCache.from_bytes(grown[0].to_bytes())), grown[1], 1e-5)
    other = kept(llama, "keydiff", ids(50, seed=3), compression_ratio=0.5)
    options: list[tuple[Any, dict[str, Any]]] = [
        (both, {}), (grown, {}), ([[cache, other] for cache in both], {}),
        (both, {"select": "quest", "select_tokens": 32}), (both, {"suffix": {"policy": "window", "budget": 64}}),
    ]  # fmt: skip
    for asked, more in options:
        one, two = (llama.answer(each, QUESTION, max_new_tokens=6, **more).token_ids for each in asked)
        assert one == two
    together = llama.answer_all([(cache, QUESTION) for cache in (*both, *grown)], max_new_tokens=6)
    assert together[0].token_ids == together[1].token_ids
    assert together[2].token_ids == together[3].token_ids
    exported = [llama.export(cache) for cache in both]
    for ours, theirs in zip(exported[0].layers, exported[1].layers, strict=True):
        assert close(ours.keys, theirs.keys, 1e-5)
        assert close(ours.values, theirs.values, 1e-5)
    logits = []
    for cache in both:
        with torch.no_grad(), llama.attached(cache) as past:
            logits.append(llama.model(torch.tensor([QUESTION]), **{CACHE_ARGUMENT: past}).logits)
    assert close(logits[0], logits[1], 1e-4)


def wide(kind: str, group: int) -> Engine:
    """Two KV heads, so wide for the model that a residual is smaller than they are with grouped queries, too."""
    config, model = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[kind]
    sizes = {"vocab_size": 512, "hidden_size": 56, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 32}
    torch.manual_seed(group)
    heads = {"num_attention_heads": 2 * group, "num_key_value_heads": 2, "initializer_range": 0.2}
    engine = Engine(model(config(**sizes, **heads)).eval().requires_grad_(False), name=kind)
    engine.facts.end_ids = frozenset  # type: ignore[method-assign]  # endless
    return engine


def held(rows: int) -> int:
    """Bytes of all tensors of keys or values of so many tokens, of all heads or of one."""
    gc.collect()
    found = (each for each in gc.get_objects() if type(each) is Tensor and each.dim() >= 2 and each.shape[-1] == 32)
    return sum({each.data_ptr(): each.nbytes for each in found if each.numel() in (rows * 32, 2 * rows * 32)}.values())


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("codec", ["none", "int8:residual=0", "lossless"])
@pytest.mark.parametrize(("kind", "group"), [(kind, group) for kind in ("llama", "qwen2") for group in (1, 4, 7)])
def test_at_every_step_they_are_made_again_and_nothing_else_is_held(
    monkeypatch: pytest.MonkeyPatch, kind: str, group: int, codec: str
) -> None:
    """Logits are those of a model in fp64 that has no cache and reads document, question and answer at once."""
    engine, tokens, steps = wide(kind, group), 301, 6
    cache = engine.compress(ids(tokens), policy="kvdirect", made="step").encoded(codec)
    once = engine.compress(ids(tokens), policy="kvdirect").encoded(codec)
    layers, of_layer = 2, 2 * 2 * tokens * 32 * 4
    before = held(tokens)
    makes, made, passed, logits = [], Projection.project, engine.passes.continuing, []
    monkeypatch.setattr(Projection, "project", lambda *given: makes.append((given[1], len(given[2]))) or made(*given))
    monkeypatch.setattr(engine.passes, "continuing", lambda *given: logits.append(passed(*given)) or logits[-1])
    document = engine.attach(CompressedCache.from_bytes(cache.to_bytes()))
    answer, batch = engine.start(document, QUESTION, Sampling(steps)), engine.batch()
    while not answer.finished:
        batch.step([answer])
        assert held(tokens) == before, "of what is attached, residuals alone are left between two steps"
    # One token of each layer is tried as it arrives.
    assert [each for each in makes if each[1] > 1] == [(layer, tokens) for layer in range(layers)] * steps
    read = engine.compress(ids(tokens), policy="kvdirect") if codec == "lossless" else cache  # its rows are decoded
    assert document.nbytes == cache.attached_bytes == read.nbytes + of_layer < once.attached_bytes
    header = blob.inspect(cache.to_bytes()).header
    assert header.attached_bytes - header.body_bytes == cache.attached_bytes - cache.nbytes
    plain = engine.attach(engine.compress(ids(tokens), policy="kvdirect"))
    assert [plain.prefixes(layer) for layer in range(layers)]
    assert held(tokens) == before + layers * of_layer
    if codec[:4] != "int8":
        whole = torch.tensor([[*ids(tokens), *QUESTION, *answer.token_ids[:-1]]])
        right = copy.deepcopy(engine.model).double()(whole).logits[0, -steps:]
        assert all(close(ours[0, -1].double(), own, 1e-4) for ours, own in zip(logits, right, strict=True))


def test_what_reads_keys_refuses_those_that_are_made_at_every_step() -> None:
    engine = wide("llama", 4)
    cache, full = (engine.compress(ids(TOKENS), policy=policy, **more) for policy, more in STEP.items())
    selected = {"select": "quest", "select_tokens": 32}, {"suffix": {"policy": "h2o", "scope": "cache"}}
    for more in selected:
        with pytest.raises(PolicyUnsupported, match=r"makes its keys at every step \(policy kvdirect, made=step\)"):
            engine.answer(cache, QUESTION, **more)
    for asked in (
        lambda each: engine.answer([each, engine.compress(ids(50, seed=3), policy="full")], QUESTION).token_ids,
        lambda each: engine.answer(engine.extend(each, ids(20, seed=2), policy="full"), QUESTION).token_ids,
        lambda each: [answer.token_ids for answer in engine.answer_all([(each, QUESTION), (each, ids(9))])],
        lambda each: engine.export(each).layers[1].keys.round(decimals=3).tolist(),
    ):
        assert asked(cache) == asked(full)


STEP: dict[str, dict[str, str]] = {"kvdirect": {"made": "step"}, "full": {}}


# Refused


def test_a_residual_that_is_no_smaller_is_refused_with_both_sizes() -> None:
    engine = Engine(small_model("llama"))  # 64 numbers, and 2 * 2 heads * 16
    with pytest.raises(PolicyUnsupported, match=r"residuals of 64 numbers .* keys and values of 64; take policy full"):
        engine.prepare(ids(TOKENS), policy="kvdirect")


def test_keys_of_more_than_the_residual_are_refused() -> None:
    """A model whose second layer attends to what the first was given: by hooks, which a document's own keys show."""
    engine = many_heads("llama")
    layers, before = engine.model.model.layers, list[Tensor]()

    def added(_module: Any, given: Any, named: dict[str, Any]) -> Any:
        more = before[0] if before else 0.0
        return given, {**named, "hidden_states": named["hidden_states"] + more}

    layers[0].register_forward_hook(lambda _, given, __: before.__setitem__(slice(None), [given[0]]))
    layers[1].self_attn.register_forward_pre_hook(added, with_kwargs=True)
    layers[-1].register_forward_hook(lambda *_: before.clear())
    with pytest.raises(PolicyUnsupported, match="layer 1 of LlamaModel makes keys and values of more than the res"):
        engine.run(engine.prepare(ids(TOKENS), policy="kvdirect"))


class Scaling(torch.nn.Module):
    """A product that scales rows by all of a call, as some quantized ones do."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        step = x.abs().max() / 127
        made: Tensor = self.inner((x / step).round() * step)
        return made


class Late(torch.nn.Module):
    """Adds what came before, at late positions alone."""

    def __init__(self, inner: torch.nn.Module, memory: list[Tensor]) -> None:
        super().__init__()
        self.inner, self.memory = inner, memory

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x)
        added = made + self.memory[-1] if self.memory and len(self.memory[-1][0]) == x.shape[1] == 3 else made
        self.memory.append(x.mean(dim=-1, keepdim=True))
        return added


def test_keys_that_change_with_the_rows_of_a_call_are_refused() -> None:
    engine = many_heads("llama")
    attention = engine.model.model.layers[1].self_attn
    attention.k_proj = Scaling(attention.k_proj)
    with pytest.raises(PolicyUnsupported, match="layer 1 of LlamaModel makes keys and values of more than the res"):
        engine.run(engine.prepare(ids(TOKENS), policy="kvdirect"))


def test_a_cache_is_refused_where_its_model_makes_keys_of_more() -> None:
    """By a trial of its own, before anything is attached; also to export, to decode and to append to."""
    cache, other = kept(many_heads("llama"), "kvdirect"), many_heads("llama")
    attention = other.model.model.layers[1].self_attn
    attention.k_proj = Late(attention.k_proj, [])
    for read in (other.attach, other.export, other.decoded, lambda c: other.prepare_append(c, ids(9), policy="full")):
        with pytest.raises(PolicyUnsupported, match="layer 1 of LlamaModel makes keys and values of more than the res"):
            read(cache)


def test_what_refuses_the_policy_refuses_its_caches() -> None:
    """A model that runs by accelerate's hooks has the identity of one that does not."""
    accelerate = pytest.importorskip("accelerate")
    plain = many_heads("llama")
    cache = kept(plain, "kvdirect")
    spread = Engine(accelerate.dispatch_model(plain.model, {"": "cpu"}, force_hooks=True))
    for read in (
        spread.attach,
        spread.export,
        spread.decoded,
        lambda c: spread.prepare_append(c, ids(9), policy="full"),
    ):
        with pytest.raises(PolicyUnsupported, match=r"\(policy kvdirect\), and .* is spread over several devices"):
            read(cache)


def test_a_module_with_another_forward_is_refused_by_name() -> None:
    engine = many_heads("llama")
    norm = engine.model.model.layers[1].input_layernorm
    norm.forward = type(norm).forward.__get__(norm)
    with pytest.raises(PolicyUnsupported, match="a LlamaRMSNorm of the model has been given another forward"):
        engine.run(engine.prepare(ids(TOKENS), policy="kvdirect"))


def test_a_prefill_and_an_attach_do_not_see_each_other(llama: Engine) -> None:
    """An attach on another thread while a prefill has hooks on the model's layers, and learned tokens."""
    cache, model = kept(llama, "kvdirect"), llama.model
    expected = llama.decoded(cache)
    modules = [*model.model.modules()]
    calls = Calls(model, modules)
    width = model.config.hidden_size
    tensors = {
        "soft": torch.randn(2, width),
        "0.self_attn.k_proj.a": torch.randn(4, width), "0.self_attn.k_proj.b": torch.randn(width, 4),
    }  # fmt: skip
    attached: list[CompressedCache] = []
    with calls.recorded(), soft_tokens(model, Soft(tensors, slice(0, 2))):
        other = threading.Thread(target=lambda: attached.append(llama.decoded(cache)))
        other.start()
        other.join()
        for module in modules:
            with pytest.raises(KeyError):
                calls.take(module)
        learned = model(torch.arange(5, 15)[None]).logits
    assert not torch.allclose(learned, model(torch.arange(5, 15)[None]).logits), "learned tokens act"
    require_alike(attached[0], expected, 0)


def test_a_cache_of_the_plain_model_is_attached_where_the_model_has_hooks(llama: Engine) -> None:
    cache, other = kept(llama, "kvdirect"), many_heads("llama")
    expected = llama.decoded(cache)
    other.model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda _, __, out: out * 2)
    require_alike(other.decoded(cache), expected, 0)


def test_many_rows_are_made_in_runs(llama: Engine) -> None:
    tokens = 2 * RUN + 5
    rows, positions = torch.randn(tokens, llama.model.config.hidden_size), torch.arange(tokens) * 3
    most, projection = list[int](), llama.passes.projection
    probe = projection._layers[1].self_attn.k_proj.register_forward_hook(lambda _, x, __: most.append(x[0].shape[1]))
    made = projection.project(1, rows, positions)
    probe.remove()
    assert most == [RUN, RUN, 5]
    for first, count in ((0, 7), (RUN - 3, 9), (tokens - 4, 4)):
        part = slice(first, first + count)
        for ours, alone in zip(made, projection.project(1, rows[part], positions[part]), strict=True):
            assert close(ours[:, part], alone, 1e-5)


def test_what_cannot_be_is_refused_by_name(llama: Engine) -> None:
    cache = kept(llama, "kvdirect")
    job = llama.prepare(ids(TOKENS), policy="kvdirect")
    for made in (lambda: llama.compressor.level(job, "klt"), lambda: cache.encoded("klt")):
        with pytest.raises(
            InvalidRequest, match="policy kvdirect stores residuals in their place; take none"
        ) as refused:
            made()
        assert refused.value.param == "codec"
    with pytest.raises(PolicyUnsupported, match="stores what the layers are given in one pass"):
        llama.extend(cache, ids(9))
    record = cache.layers[0]
    assert isinstance(record, Residuals)
    for read in (record.dense, record.prefixes, record.heads):
        with pytest.raises(StateConflict, match=r"has residuals .* Engine.decoded"):
            read()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda r: replace(r, keys=r.keys[:, :32].clone()),
            "the cache has residuals of 32 numbers; its model makes 64",
        ),
        (lambda r: replace(r, full_dims=(8, 16)), "in layer 0 the key_dim 8; its model makes 16"),
    ],
    ids=["width", "dims"],
)
def test_forged_residuals_are_refused_by_name(llama: Engine, change: Any, message: str) -> None:
    cache = kept(llama, "kvdirect")
    layers = (change(cache.layers[0]), *cache.layers[1:])
    forged = CompressedCache.from_bytes(replace(cache, layers=layers).to_bytes())
    with pytest.raises(BlobError, match=message) as refused:
        llama.attach(forged)
    assert refused.value.details["reason"] == "wrong_shape"


def test_vllm_takes_none(llama: Engine, tmp_path: Path) -> None:
    cache = kept(llama, "kvdirect")
    model = ReadingModel(llama.identity, llama.passes.layer_shapes, llama.rope, {})
    refused = pytest.raises(PolicyUnsupported, match="compress the document by policy full")
    with DiskStore.open(tmp_path) as store, refused, store.open_cache(store.put(cache).id) as arriving:
        model.require_own(arriving, {})
