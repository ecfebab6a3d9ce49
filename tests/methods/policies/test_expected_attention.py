"""Expected Attention: against its formula written out with explicit rotation matrices, and with scaled RoPE."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvshelf.engine.engine import Engine
from kvshelf.errors import PolicyUnsupported
from kvshelf.methods.policies import build
from tests.amounts import few

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 16


@pytest.fixture(scope="module", params=[DEFAULT, LLAMA3, YARN], ids=lambda rope: rope["rope_type"])
def engine(request):
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=HEADS * DIM,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=1024,
        rope_parameters=request.param,
        initializer_range=0.4,
    )
    return Engine(LlamaForCausalLM(config).eval())


def rotation(embedding, position):
    """The rotation matrix at one position, fp64, in the halves layout."""
    half = DIM // 2
    matrix = torch.zeros(DIM, DIM, dtype=torch.float64)
    for i, frequency in enumerate(embedding.inv_freq.double().tolist()):
        angle = position * frequency
        matrix[i, i] = matrix[i + half, i + half] = embedding.attention_scaling * math.cos(angle)
        matrix[i, i + half] = -embedding.attention_scaling * math.sin(angle)
        matrix[i + half, i] = embedding.attention_scaling * math.sin(angle)
    return matrix


def states(model, ids):
    """Per layer: queries and keys before RoPE and values, `[N, heads, D]` fp64, seen by hooks on a plain model."""
    seen = [{} for _ in range(LAYERS)]
    handles = []
    for index, layer in enumerate(model.model.layers):
        for name in ("q_proj", "k_proj", "v_proj"):

            def note(_module, _inputs, out, index=index, name=name):
                seen[index][name] = out[0].double().unflatten(-1, (-1, DIM))

            handles.append(getattr(layer.self_attn, name).register_forward_hook(note))
    with torch.no_grad():
        model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return seen


def naive(model, layer, budget, *, sink=4, n_future=512, covariance=True, value_norm=True, eps=0.0):
    """The kept positions of each KV head."""
    embedding = model.model.rotary_emb
    queries, keys, values = layer["q_proj"], layer["k_proj"], layer["v_proj"]
    count = len(keys)
    future = sum(rotation(embedding, count + i) for i in range(n_future)) / n_future
    turned = torch.stack([keys[j] @ rotation(embedding, j).T for j in range(count)])
    kept = []
    for kv_head in range(KV_HEADS):
        weights = []
        for head in range(kv_head * HEADS // KV_HEADS, (kv_head + 1) * HEADS // KV_HEADS):
            rows = queries[sink:, head]
            mean = rows.mean(dim=0)
            spread = sum(torch.outer(row - mean, row - mean) for row in rows) / len(rows)
            logits = []
            for j in range(sink, count):
                key = turned[j, kv_head]
                logit = key @ future @ mean / math.sqrt(DIM)
                if covariance:
                    logit = logit + key @ future @ spread @ future.T @ key / (2 * DIM)
                logits.append(logit)
            weights.append(torch.softmax(torch.stack(logits), dim=0))
        scores = (sum(weights) / len(weights)).tolist()
        if value_norm:
            scores = [(w + eps) * float(values[j, kv_head].norm()) for j, w in enumerate(scores, start=sink)]
        best = sorted(range(sink, count), key=lambda j: (-scores[j - sink], j))[: budget - sink]
        kept.append([*range(sink), *sorted(best)])
    return kept


@pytest.mark.parametrize(
    "params",
    few(
        5,
        [
            {},
            {"covariance": False},
            {"value_norm": False},
            {"eps": 0.05},
            {"n_future": 7, "sink": 1},
            {"sink": 0, "covariance": False, "value_norm": False},
        ],
    ),
    ids=str,
)
def test_keeps_what_the_formula_says(engine, params):
    ids = torch.randint(97, (90,), generator=torch.Generator().manual_seed(5)).tolist()
    cache = engine.compress(ids, policy="expected_attention", budget_tokens=30, **params)
    for record, layer in zip(cache.layers, states(engine.model, ids), strict=True):
        assert [head.tolist() for head in record.positions] == naive(engine.model, layer, 30, **params)


def test_the_mean_rotation_is_the_mean_of_rotations(engine):
    positions = torch.arange(700, 760)
    rotations = [rotation(engine.model.model.rotary_emb, position) for position in positions.tolist()]
    mean = engine.rope.mean_rotation(DIM, positions).double()
    assert (
        mean - sum(rotations) / len(rotations)
    ).abs().max() < 1e-4  # the model's tables are fp32 of angles up to 760


def test_the_template_counts_as_sinks(tiny):
    document = "The quick brown fox jumps over the lazy dog. " * 20
    job = tiny.prepare(document, policy="expected_attention", budget_tokens=40, policy_params={"sink": 0})
    assert job.document.protected_prefix > 1
    cache = tiny.run(job).cache
    first = list(range(job.document.protected_prefix))
    assert all(head[: len(first)].tolist() == first for record in cache.layers for head in record.positions)


def test_a_given_sink_must_fit_and_the_default_shrinks(llama):
    with pytest.raises(PolicyUnsupported, match=r"sink is 40.*room for 39"):
        llama.engine.prepare(
            llama.ids, policy="expected_attention", budget_tokens=40, policy_params={"sink": 40}
        )  # fmt: skip
    assert llama.engine.prepare(llama.ids, policy="expected_attention", budget_tokens=3).policy.sink == 2
    assert build("expected_attention", {}).sink == 4
