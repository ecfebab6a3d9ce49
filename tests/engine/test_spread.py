"""Models whose layers are on several devices, or whose weights are offloaded: what they store and say is what they
store and say on one device. The other devices are made of the CPU (`elsewhere`); hooks and maps are accelerate's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.records import entries_of, states_of
from kvshelf.artifact.transforms import Transforms
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.attention.states import SUPPORTED
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.model import loading
from kvshelf.model.devices import Devices, hooked, layer_devices
from kvshelf.model.language import language_part
from kvshelf.model.prepacking import prepack
from kvshelf.model.source import bundled_folder
from kvshelf.training.transform_search import find_transforms
from kvshelf_bench.models.small import small_model
from tests.engine.asking import ids
from tests.engine.elsewhere import ONE, OTHER, devices
from tests.model.test_language import made as made_of_several

accelerate = pytest.importorskip("accelerate")

NEWER = pytest.mark.skipif(not SUPPORTED, reason="this transformers has caches of its own for recurrent states")
LATENTS = pytest.mark.skipif(CACHE_ARGUMENT != "cache", reason="older transformers cache expanded keys")


@pytest.fixture
def elsewhere() -> Iterator[None]:
    with devices():
        yield


def spread(model: Any, first: object, last: object, main: object = ONE) -> Any:
    """`model` with its first two layers, and what is beside layers, on one device, and the others on another. main:
    where weights that are offloaded compute."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others ask a tensor's device which numbers they may count
    layers = next(name for name, each in model.named_modules() if isinstance(each, torch.nn.ModuleList))
    stem = layers.rpartition(".")[0]
    placed = {name: first for name, _ in model.named_children() if name != stem.partition(".")[0]}
    placed |= {f"{stem}.{name}": first for name, _ in model.get_submodule(stem).named_children()}
    del placed[layers]
    for name, _ in model.get_submodule(layers).named_children():
        placed[f"{layers}.{name}"] = first if int(name) < 2 else last
    skip = model._skip_keys_device_placement
    return accelerate.dispatch_model(model, placed, main_device=main, force_hooks=True, skip_keys=skip)


def both(family: str, first: object = ONE, last: object = OTHER) -> tuple[Engine, Engine]:
    """An engine of a model that is spread, and of the same model on one device."""
    found, expected = (Engine(spread(small_model(family), first, at), name="m") for at in (last, first))
    assert found.identity == expected.identity
    return found, expected


def level(policy: str) -> dict[str, Any]:
    return {"policy": policy} | ({} if policy == "full" else {"compression_ratio": 0.5})


def require_alike(found: Engine, expected: Engine, policy: str) -> list[CompressedCache]:
    """The same bytes, and the same answers of a batch over two documents. Returns the caches of the first engine."""
    options = level(policy)
    caches = [[engine.compress(ids(n), **options) for n in (60, 150)] for engine in (found, expected)]
    for mine, other in zip(*caches, strict=True):
        assert mine.to_bytes() == other.to_bytes()
    told = []
    for engine, (short, long) in zip((found, expected), caches, strict=True):
        asked = [(short, ids(7, seed=3)), (long, ids(1, seed=4)), (long, ids(20, seed=5)), (short, ids(70, seed=6))]
        told.append([each.token_ids for each in engine.answer_all(asked, max_new_tokens=5)])
    assert told[0] == told[1]
    return caches[0]


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("family", "policy"),
    [
        *(("llama", policy) for policy in (
            "full", "keydiff", "snapkv", "pyramidkv", "cake", "layer_defensivekv", "kvzip", "ems", "expected_attention",
            "pyramidinfer", "sirllm", "cam",
        )),
        ("gemma3_text", "keydiff"), ("llama4_text", "keydiff"), ("gpt2", "keydiff"),
        pytest.param("qwen3_next", "keydiff", marks=NEWER), pytest.param("falcon_h1", "snapkv", marks=NEWER),
        pytest.param("deepseek_v3", "keydiff", marks=LATENTS),
    ],
)  # fmt: skip
def test_layers_on_two_devices_are_as_on_one(family: str, policy: str) -> None:
    found, expected = both(family)
    assert found.passes.devices == Devices(ONE, (ONE, ONE, OTHER, OTHER))
    assert found.passes.program is None
    for cache in require_alike(found, expected, policy):
        for index, record in enumerate(cache.layers):
            entries, device = entries_of(record), ONE if index < 2 else OTHER
            assert entries is None or entries.to(device) is entries
            assert {state.tensor.device for state in states_of(record)} <= {device}


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("first", [ONE, "cpu"])
@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("llama", "defensivekv"),
        pytest.param("qwen3_next", "keydiff", marks=NEWER),
        pytest.param("deepseek_v3", "full", marks=LATENTS),
    ],
)
def test_weights_in_the_memory_of_the_cpu_compute_on_the_device(family: str, policy: str, first: object) -> None:
    found = Engine(spread(small_model(family), first, "cpu" if first == ONE else ONE), name="m")
    expected = Engine(spread(small_model(family), ONE, ONE), name="m")
    assert found.identity == expected.identity
    assert found.passes.devices == Devices(ONE, (ONE,) * 4)
    assert any(parameter.is_meta for parameter in found.model.parameters())
    require_alike(found, expected, policy)


@pytest.mark.parametrize("policy", ["full", "defensivekv"])
def test_weights_on_the_disk_are_read_where_they_lie(policy: str, tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path / "model")
    placed = {"lm_head": "disk", "model.layers.1": "disk", "model.layers.2": "disk"}
    placed |= {f"model.{name}": "cpu" for name in ("embed_tokens", "layers.0", "layers.3", "norm", "rotary_emb")}
    options = {"device_map": placed, "offload_folder": tmp_path / "offloaded"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **options)
    assert model.lm_head.weight.is_meta
    prepack(model)
    found, expected = Engine(model, name="m"), Engine(small_model("llama"), name="m")
    assert found.identity.weights == expected.identity.weights
    assert found.passes.devices == Devices(torch.device("cpu"), (torch.device("cpu"),) * 4)
    caches = [engine.compress(ids(100), **level(policy)) for engine in (found, expected)]
    for mine, other in zip(*(cache.layers for cache in caches), strict=True):
        assert torch.equal(mine.keys, other.keys)
        assert torch.equal(mine.entry_positions, other.entry_positions)
    asked = [(each, ids(5)) for each in caches]
    assert found.answer(*asked[0], max_new_tokens=5).token_ids == expected.answer(*asked[1], max_new_tokens=5).token_ids


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
def test_what_else_an_engine_does_is_the_same() -> None:
    """The quality, codecs, export with keys that move, chunks, scores, and generate()."""
    told = []
    for engine in both("llama"):
        job = engine.prepare(ids(200), policy="snapkv", compression_ratio=0.5)
        prefill = engine.compressor.prefill([engine.compressor.level(job)], cues=20)
        assert prefill.reference is not None
        cache = prefill.compressions[0].cache
        quality = engine.compressor.measure(cache, prefill.reference)
        exported = engine.export(cache)
        assert tuple(layer.keys.device for layer in exported.layers) == engine.passes.devices.layers
        coded = [engine.encoded(engine.compress(ids(100), **level("snapkv")), codec) for codec in ("int4", "mixed")]
        chunked = engine.compress(ids(300), prefill="chunked", **level("lagkv"))
        with engine.attached(cache) as past:
            given = past.with_document(torch.tensor([ids(5)], device=ONE))
            said = engine.model.generate(
                given, **{CACHE_ARGUMENT: past}, max_new_tokens=4, num_beams=2, do_sample=False
            )
        told.append(
            [quality.agreement, quality.kl, chunked.to_bytes(), said.tolist()]
            + [each.tolist() for layer in exported.layers for each in (layer.keys, layer.values)]
            + [each.tolist() for each in engine.compressor.scores(job)]
            + [engine.answer(each, ids(5), max_new_tokens=4).token_ids for each in coded]
        )
    assert told[0] == told[1]


@pytest.mark.usefixtures("elsewhere")
def test_codec_klt_has_the_transforms_of_the_model() -> None:
    text = "The harbour master keeps the tide tables in a green book. " * 20
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder("kvshelf-tiny"))
    found, expected = (
        Engine(spread(AutoModelForCausalLM.from_pretrained(bundled_folder("kvshelf-tiny")), ONE, last), tokenizer)
        for last in (OTHER, ONE)
    )
    caches = [engine.encoded(engine.compress(text, policy="full"), "klt") for engine in (found, expected)]
    assert caches[0].to_bytes() == caches[1].to_bytes()
    said = [
        e.answer(c, "Who keeps them?", max_new_tokens=8).text for e, c in zip((found, expected), caches, strict=True)
    ]
    assert said[0] == said[1]


@pytest.mark.usefixtures("elsewhere")
def test_the_language_part_of_a_model_that_is_spread() -> None:
    whole = made_of_several("gemma3")
    placed: dict[str, object] = {name: ONE for name, _ in whole.model.named_children()} | {"language_model": OTHER}
    placed = {f"model.{name}": device for name, device in placed.items()} | {"lm_head": OTHER}
    skip = whole._skip_keys_device_placement
    part = language_part(accelerate.dispatch_model(whole, placed, main_device=ONE, skip_keys=skip), "m")
    assert (
        Engine(part, name="m").identity.weights
        == Engine(language_part(made_of_several("gemma3"), "m")).identity.weights
    )
    assert set(layer_devices(part)) == {OTHER}
    expected = Engine(spread(language_part(made_of_several("gemma3"), "m"), OTHER, OTHER, OTHER), name="m")
    require_alike(Engine(part, name="m"), expected, "keydiff")


def test_where_one_device_does_spread_is_a_model_on_one_device() -> None:
    engine = Engine.load("kvshelf-tiny", device="spread")
    assert set(layer_devices(engine.model)) == {engine.passes.devices.inputs}
    assert not hooked(engine.model)
    assert engine.identity == Engine.load("kvshelf-tiny").identity


def test_spread_without_accelerate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda _: None)
    with pytest.raises(InvalidRequest, match="needs the package accelerate; run: pip install") as refused:
        Engine.load("kvshelf-tiny", device="spread")
    assert refused.value.param == "device"


def test_layers_on_no_device_are_refused_by_name() -> None:
    model = small_model("llama")
    model.model.layers[2].to("meta")
    with pytest.raises(PolicyUnsupported, match=r"9 weights .* on no device \(model\.layers\.2\.self_attn.*device_map"):
        Engine(model)


@pytest.mark.usefixtures("elsewhere")
def test_an_attention_on_several_devices_is_refused_by_name() -> None:
    model = small_model("llama")
    placed: dict[str, object] = {"lm_head": ONE} | {
        f"model.{name}": ONE for name in ("embed_tokens", "norm", "rotary_emb")
    }
    placed |= {f"model.layers.{i}": ONE for i in (0, 2, 3)}
    placed |= {f"model.layers.1.{name}": ONE for name in ("mlp", "input_layernorm", "post_attention_layernorm")}
    placed |= {f"model.layers.1.self_attn.{name}_proj": OTHER if name == "v" else ONE for name in "qkvo"}
    with pytest.raises(
        PolicyUnsupported, match=r"attention of layer 1 .* several devices \(privateuseone:0, privateuse"
    ):
        Engine(accelerate.dispatch_model(model, placed, main_device=ONE))


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.skipif(CACHE_ARGUMENT != "cache", reason="older transformers copy the keys and values of shared layers")
def test_keys_and_values_that_layers_share_are_refused() -> None:
    with pytest.raises(PolicyUnsupported, match="use the keys and values of others"):
        Engine(spread(small_model("gemma3n_text"), ONE, OTHER))


@pytest.mark.usefixtures("elsewhere")
def test_a_cache_under_klt_is_on_the_cpu_in_all_its_parts() -> None:
    """With transforms made on the CPU: gradients cannot be had of devices that are not there. `scripts/gpu.py` makes
    them on a card."""
    engine, _ = both("llama")
    data = find_transforms(Engine(small_model("llama")), [ids(150)])
    engine.coders.learn(data)
    cache = engine.compress(ids(120), **level("keydiff")).encoded(
        "klt", engine.coders.with_transforms(Transforms.from_bytes(data).digest)
    )
    for record in cache.layers:
        assert record.entry_positions.device.type == "cpu"


@pytest.mark.usefixtures("elsewhere")
def test_a_selector_chooses_on_the_device() -> None:
    told = []
    for engine in both("llama"):
        cache = engine.compress(ids(150), policy="full")
        told.append(engine.answer(cache, ids(5), max_new_tokens=4, select="quest", select_tokens=64).token_ids)
    assert told[0] == told[1]
