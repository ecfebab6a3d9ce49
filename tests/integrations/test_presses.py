"""Policies `press:NAME` keep what kvpress's own hooks keep, with its own models and on a plain transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import save_file
from transformers import DynamicCache

from kvshelf import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.methods.catalog import catalog
from kvshelf.methods.policies import POLICIES, build
from kvshelf.model.loading import load
from tests.recorded import load_oracle

kvpress = pytest.importorskip(
    "kvpress", reason="kvpress is not installed: it takes transformers below 5.3; .ci/run has both"
)
if Version(transformers.__version__) >= Version("5.3"):
    pytest.skip("kvpress's own hooks need transformers below 5.3", allow_module_level=True)

SNAPKV = {"window_size": 16}


def snapkv(ratio):
    return kvpress.SnapKVPress(ratio, **SNAPKV)


PRESSES = {
    "block": (
        lambda ratio: kvpress.BlockPress(kvpress.KeyDiffPress(ratio), block_size=64),
        {"base": "keydiff", "block_size": 64},
    ),
    "cap": (lambda ratio: kvpress.CapPress(ratio, n_future_positions=128), {"n_future_positions": 128}),
    "chunk": (
        lambda ratio: kvpress.ChunkPress(kvpress.KnormPress(ratio), chunk_length=100),
        {"base": "knorm", "chunk_length": 100},
    ),
    "compactor": (lambda ratio: kvpress.CompactorPress(ratio, chunk_size=64), {"chunk_size": 64}),
    "criticaladakv": (lambda ratio: kvpress.CriticalAdaKVPress(snapkv(ratio)), SNAPKV),
    "criticalkv": (lambda ratio: kvpress.CriticalKVPress(snapkv(ratio)), SNAPKV),
    "criticalkv over keydiff": (
        lambda ratio: kvpress.CriticalKVPress(kvpress.KeyDiffPress(ratio), first_stage_ratio=0.25),
        {"base": "keydiff", "first_stage_ratio": 0.25},
    ),
    "cur": (lambda ratio: kvpress.CURPress(ratio, leverage_type="key"), {"leverage_type": "key"}),
    "entropygatedchunkkv": (lambda ratio: kvpress.EntropyGatedChunkKVPress(snapkv(ratio)), SNAPKV),
    "leveragescore": (lambda ratio: kvpress.LeverageScorePress(ratio), {}),
    "noncausalattn": (lambda ratio: kvpress.NonCausalAttnPress(ratio, chunk_size=100), {"chunk_size": 100}),
    "qfilter": (lambda ratio: kvpress.QFilterPress(ratio), {}),
    "random": (lambda ratio: kvpress.RandomPress(ratio, seed=7), {"seed": 7}),
}
"""A press of each kind that kvshelf has no method of its own for, and the parameters of its policy."""


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request):
    return load_oracle(request.param)


@pytest.fixture(scope="module")
def filters(tmp_path_factory, model):
    """Filters for the press `qfilter`, in the place where it looks for them."""
    folder = tmp_path_factory.mktemp("filters")
    model.model.config.name_or_path = model.architecture
    own = folder / "nthngdy" / f"{model.architecture}_qfilt"
    own.mkdir(parents=True)
    config = model.model.config
    sizes = [config.num_hidden_layers, config.num_key_value_heads, config.head_dim]
    (own / "config.json").write_text(
        json.dumps(dict(zip(("num_layers", "num_kv_heads", "kv_head_dim"), sizes, strict=True)))
    )
    save_file({"q_filters": torch.randn(sizes, generator=torch.Generator().manual_seed(3))}, own / "model.safetensors")
    return folder


def kept_by_hooks(model, ids, press):
    """The positions that kvpress keeps, `[kv_heads][kept]` of each layer: all rows of a cache are different."""
    plain, hook = DynamicCache(), press.forward_hook

    def seeded(module, given, named, output):
        torch.manual_seed(module.layer_idx)
        return hook(module, given, named, output)

    press.forward_hook = seeded
    past, tokens = DynamicCache(), torch.tensor([ids])
    with torch.no_grad():
        model(input_ids=tokens, past_key_values=plain)
        with press(model):
            model(input_ids=tokens, past_key_values=past)
    found = []
    for index, (full, left) in enumerate(zip(plain.layers, past.layers, strict=True)):
        same = (left.keys[0].unsqueeze(2) == full.keys[0].unsqueeze(1)).all(-1)  # [kv_heads, kept, N]
        assert (same.sum(2) == 1).all()
        mask = same.any(1)
        module = model.model.layers[index].self_attn
        if (hidden := getattr(module, "masked_key_indices", None)) is not None:
            mask[hidden[1], hidden[2]] = False
        module.masked_key_indices = None
        found.append([row.nonzero().flatten().tolist() for row in mask])
    return found


@pytest.mark.parametrize("ratio", [0.5, 0.75])
@pytest.mark.parametrize("name", PRESSES)
def test_a_press_keeps_what_its_own_hooks_keep(model, filters, monkeypatch, name, ratio):
    monkeypatch.chdir(filters)
    made, params = PRESSES[name]
    expected = kept_by_hooks(model.model, model.ids, made(ratio))
    policy = f"press:{name.split()[0]}"
    cache = model.engine.compress(model.ids, policy=policy, compression_ratio=ratio, **params)
    assert [[own.tolist() for own in layer.positions] for layer in cache.layers] == expected
    assert cache.identity.policy == policy
    assert cache.identity.policy_params.items() >= params.items()
    attention = model.model.model.layers[0].self_attn
    assert getattr(attention, "masked_key_indices", None) is None, "the model is as it was"


def test_a_press_by_a_threshold_takes_no_budget(model):
    made = kvpress.DMSPress(kvpress.KeyDiffPress(), threshold=-0.2, sliding_window_size=100)
    expected = kept_by_hooks(model.model, model.ids, made)
    assert 100 < len(expected[0][0]) < len(model.ids)
    params = {"base": "keydiff", "threshold": -0.2, "sliding_window_size": 100}
    cache = model.engine.compress(model.ids, policy="press:dms", **params)
    assert [[own.tolist() for own in layer.positions] for layer in cache.layers] == expected
    with pytest.raises(InvalidRequest, match="takes no compression_ratio"):
        model.engine.compress(model.ids, policy="press:dms", compression_ratio=0.5, **params)


def test_weights_that_were_laid_out_anew_are_read_as_they_were():
    """`Engine.load` packs linear layers, and criticalkv reads the output projection."""
    text = "The access code of the amber falcon is 482913. " + "The tide turns and the boats wait. " * 40
    engine = Engine.load("kvshelf-tiny")
    plain = Engine(*load("kvshelf-tiny", device="cpu", dtype="auto"), name="kvshelf-tiny")
    ids = engine.encode_document(text, layout="plain").token_ids
    for budget in (100, 64):
        ours, theirs = (
            each.compress(ids, policy="press:criticalkv", base="keydiff", budget_tokens=budget)
            for each in (engine, plain)
        )
        assert [layer.positions[0].tolist() for layer in ours.layers] == [
            layer.positions[0].tolist() for layer in theirs.layers
        ]
        assert {len(own) for layer in ours.layers for own in layer.positions} == {budget}
    told = engine.answer(engine.compress(text, policy="press:criticalkv", budget_tokens=200), "What is the code?")
    assert told.usage.cache_read_tokens > 200


def test_the_chat_templates_tokens_stay():
    engine = Engine.load("kvshelf-tiny")
    text = "The access code of the amber falcon is 482913. " + "The tide turns and the boats wait. " * 40
    first = engine.encode_document(text).protected_prefix
    assert first > 0
    cache = engine.compress(text, policy="press:knorm", budget_tokens=64)
    for layer in cache.layers:
        for own in layer.positions:
            assert own[:first].tolist() == list(range(first))
            assert len(own) == 64


def test_what_cannot_be_is_refused_by_name(model):
    for name, params, problem, param in [
        ("press:nothing", {}, "unknown policy 'press:nothing'", "policy"),
        ("press:criticalkv", {"base": "criticalkv"}, "must be one of", "policy_params.base"),
        ("press:snapkv", {"window_size": "wide"}, "must be int", "policy_params.window_size"),
        ("press:snapkv", {"compression_ratio": 0.1}, "has no parameter", "policy_params.compression_ratio"),
        ("press:criticaladakv", {"alpha_safeguard": 7.0}, "AssertionError", "policy_params"),
    ]:
        with pytest.raises(InvalidRequest, match=problem) as refusal:
            build(name, params)
        assert refusal.value.param == param
    for name, problem in [("press:keyrerotation", "changes the entries"), ("press:observedattention", "Assertion")]:
        with pytest.raises(PolicyUnsupported, match=problem) as refusal:
            model.engine.compress(model.ids, policy=name)
        assert refusal.value.param == "policy"
    cache = model.engine.compress(model.ids, policy="full")
    with pytest.raises(PolicyUnsupported, match="sees the calls"):
        model.engine.extend(cache, model.ids[:100], policy="press:knorm")


def test_presses_are_listed_behind_the_policies():
    names = [info.name for info in catalog()]
    assert names[: len(POLICIES)] == list(POLICIES)
    assert set(names[len(POLICIES) :]) >= {f"press:{name.split()[0]}" for name in PRESSES}
    assert not {"press:perlayercompression", "press:composed", "press:scorer", "press:think"} & set(names)
    stats = next(info for info in catalog() if info.name == "press:expectedattentionstats")
    assert not {"stats_folder", "dataset_name"} & stats.parameters.keys(), "no request names a path"


def test_kvpress_wraps_no_attention_of_ours():
    """It wraps every attention function there is when it is imported, in a process that has answered before."""
    program = """
from kvshelf import Engine
engine = Engine.load("kvshelf-tiny")
text = "The access code of the amber falcon is 482913. " + "The tide turns and the boats wait. " * 20
cache = engine.compress(text, policy="full")
first = engine.answer(cache, "What is the code?").text
kept = engine.compress(text, policy="press:knorm")
assert engine.answer(cache, "What is the code?").text == first
engine.answer(kept, "What is the code?")

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

assert not [name for name in ALL_ATTENTION_FUNCTIONS._local_mapping if name.startswith("kvshelf")]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
