"""Rotating and un-rotating outside the model does what the model does inside.

The oracle is the model itself: RoPE only knows differences, so a document read at positions shifted by a constant has
the same hidden states in every layer, and its keys differ by the rotation alone.
"""

from __future__ import annotations

import sys
from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from kvshelf.engine.attention.function import CONTEXT, kvshelf_attention
from kvshelf.model.rope import Rope

TOKENS, SHIFT = 12, 37
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

UNDOABLE = {
    "llama": ("llama", {}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "a part of the head, cut by the function": ("phi3", {"pad_token_id": 0, "rope_parameters": HALF}),
    "a part of the head, cut by the model": ("phi", {"rope_parameters": HALF}),
    "interleaved": ("cohere", {}),
    "interleaved, a part of the head": ("glm", {"pad_token_id": 0, "rope_parameters": HALF}),
    "key norm": ("qwen3", {}),
}


def random_model(model_type, seed=0, **changes):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        model_type,
        **{
            "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "max_position_embeddings": 256,
        }
        | deepcopy(changes),  # some configurations write into what they are given
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


class Keys:
    """Collects each layer's keys, `[kv_heads, T, D]`."""

    probe_lengths = ()
    hides = False

    def __init__(self):
        self.layers = []

    def after_attention(self, layer):
        self.layers.append(layer.keys[0].clone())


def keys_at(model, positions):
    keys, ids = Keys(), torch.arange(5, 5 + TOKENS)[None]
    with torch.no_grad(), kvshelf_attention(model):
        model.base_model(
            input_ids=ids, position_ids=positions[None], attention_mask=torch.ones_like(ids), use_cache=False,
            **{CONTEXT: keys},
        )  # fmt: skip
    return keys.layers


def error(ours, expected):
    return float((ours - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("kind", UNDOABLE)
def test_a_moved_key_is_the_one_the_model_makes_there(kind):
    model_type, changes = UNDOABLE[kind]
    model = random_model(model_type, **changes)
    rope = Rope.of(model)
    assert not rope.length_dependent
    here, there = torch.arange(TOKENS), torch.arange(TOKENS) + SHIFT
    for keys, expected in zip(keys_at(model, here), keys_at(model, there), strict=True):
        assert error(keys, expected) > 0.05, "without a rotation they would differ"
        assert error(rope.rotate(rope.unrotate(keys, here), there), expected) < 1e-5
        assert error(rope.unrotate(keys, here), rope.unrotate(expected, there)) < 1e-5


@pytest.mark.parametrize("kind", UNDOABLE)
def test_partly_rotated_heads_are_partly_rotated(kind):
    model_type, changes = UNDOABLE[kind]
    rope = Rope.of(random_model(model_type, **changes))
    states = torch.randn(2, 9, 16)
    moved = (rope.rotate(states, torch.arange(1, 10)) != states).any(dim=0).any(dim=0)
    assert int(moved.sum()) == (8 if "part" in kind else 16)


@pytest.mark.parametrize("kind", UNDOABLE)
@settings(max_examples=20, deadline=None)
@given(
    first=st.integers(0, 200_000), second=st.integers(0, 200_000), by=st.integers(0, 50_000), seed=st.integers(0, 99)
)
def test_round_trip_and_relative_positions(kind, first, second, by, seed):
    model_type, changes = UNDOABLE[kind]
    rope = Rope.of(cached_model(model_type, changes))
    torch.manual_seed(seed)
    q, k = torch.randn(2, 3, 1, 16)
    at, to = torch.tensor([first]), torch.tensor([second])
    assert error(rope.unrotate(rope.rotate(k, at), at), k) < 1e-5
    logit = (rope.rotate(q, at) * rope.rotate(k, to)).sum(-1)
    shifted = (rope.rotate(q, at + by) * rope.rotate(k, to + by)).sum(-1)
    # Angles are products in fp32: at 250,000 a step of the fastest channel is 0.02 wide.
    assert float((logit - shifted).abs().max()) < 1e-5 + 2e-6 * max(first, second, 1 + by)


@pytest.mark.parametrize("kind", UNDOABLE)
def test_planes_turn_as_the_models_own_function_does(kind):
    model_type, changes = UNDOABLE[kind]
    model = random_model(model_type, **changes)
    rope, attention = Rope.of(model), model.base_model.layers[0].self_attn
    states, positions = torch.randn(1, 3, 9, 16), torch.arange(50, 59)
    cos, sin = (table[None] for table in rope.tables(positions))
    cut = states[..., : getattr(attention, "rotary_ndims", None)]
    expected, _ = sys.modules[type(attention).__module__].apply_rotary_pos_emb(cut, cut, cos, sin)
    assert error(rope.rotate(states[0], positions)[..., : expected.shape[-1]], expected[0]) < 1e-6


def test_a_function_that_moves_channels_is_left_alone(monkeypatch):
    """As some models do, whose keys lie in another order than what they are made of."""
    model = random_model("llama")
    module = sys.modules[type(model.base_model.layers[0].self_attn).__module__]
    own = module.apply_rotary_pos_emb
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, *tables: own(q.flip(-1), k.flip(-1), *tables))
    assert Rope.of(model) is None


def test_a_rope_is_made_in_fp32_while_a_model_is_loaded():
    torch.set_default_dtype(torch.bfloat16)
    try:
        rope = Rope.of(random_model("llama"))
    finally:
        torch.set_default_dtype(torch.float32)
    states, at = torch.randn(2, 5, 16), torch.arange(100, 105)
    assert rope.rotate(states, at).dtype == torch.float32
    assert error(rope.unrotate(rope.rotate(states, at), at), states) < 1e-5


_MODELS: dict[str, object] = {}


def cached_model(model_type, changes):
    key = repr((model_type, changes))
    if key not in _MODELS:
        _MODELS[key] = random_model(model_type, **changes)
    return _MODELS[key]


def test_bf16_keys_move_within_their_own_rounding():
    """bf16 has 8 bits: two roundings of the model's and one of ours are within 2 %."""
    model = random_model("llama").to(torch.bfloat16)
    rope = Rope.of(model)
    here, there = torch.arange(TOKENS), torch.arange(TOKENS) + SHIFT
    keys, expected = keys_at(model, here)[0], keys_at(model, there)[0]
    moved = rope.rotate(rope.unrotate(keys, here), there)
    assert moved.dtype == torch.float32
    assert error(moved, expected.float()) < 0.02


def test_positions_may_repeat_go_backwards_and_be_none():
    rope = Rope.of(random_model("llama"))
    states, positions = torch.randn(2, 4, 16), torch.tensor([7, 0, 7, 3])
    turned = rope.rotate(states, positions)
    assert (
        rope.rotate(states[:, :0], positions[:0]).shape
        == rope.unrotate(states[:, :0], positions[:0]).shape
        == (2, 0, 16)
    )
    for column, position in enumerate(positions.tolist()):
        one = rope.rotate(states[:, column : column + 1], torch.tensor([position]))
        assert torch.allclose(turned[:, column : column + 1], one, atol=1e-6)


@pytest.mark.parametrize(("model_type", "parameters"), [("llama", DYNAMIC), ("phi3", LONG)])
def test_frequencies_that_change_with_the_length_are_seen(model_type, parameters):
    changes = {"pad_token_id": 1} if model_type == "phi3" else {}
    model = random_model(model_type, rope_parameters=parameters, **changes)
    assert Rope.of(model).length_dependent


@pytest.mark.parametrize("model_type", ["smollm3", "cohere2", "exaone4", "gemma3_text", "opt"])
def test_models_whose_layers_differ_have_no_rope_to_undo(model_type):
    """Layers without RoPE among others (every fourth here), a RoPE per kind of layer, learned positions: un-rotated
    with one RoPE, keys would be wrong without a sign of it."""
    changes = {"pad_token_id": 0} if model_type == "smollm3" else {}
    changes |= {"ffn_dim": 64, "word_embed_proj_dim": 64} if model_type == "opt" else {}
    config = AutoConfig.for_model(
        model_type, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=64, max_position_embeddings=256, sliding_window=64, **changes,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    assert Rope.of(model) is None
