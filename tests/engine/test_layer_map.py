"""Layers that read the keys and values of others (Stochastic KV Routing), served and trained: against loops in fp64."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.records import entries_of
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.engine import Engine
from kvshelf.errors import ModelMismatch, PolicyUnsupported
from kvshelf.model.layers import layer_kinds, readers
from kvshelf.model.prepacking import prepack
from kvshelf_bench.models.small import small_model
from scripts.route_tiny import maps, routed, routes

MAP = [0, 0, 2, 2]


def ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 90, (count,), generator=generator).tolist()


def made(layer_map: Any = MAP, kind: str = "llama") -> Engine:
    torch.manual_seed(0)
    model = small_model(kind)
    model.config.layer_map = layer_map
    return Engine(model, name="m")


def reference(model: Any, reads: Sequence[int], tokens: list[int]) -> torch.Tensor:
    """Logits `[T, vocabulary]` in float64, in loops over layers, heads and tokens: Llama's formulas, where a layer
    attends to the keys and values that the layer `reads` names made."""
    weights = {name: weight.double() for name, weight in model.state_dict().items()}
    config, dim, count = model.config, model.config.head_dim, len(tokens)
    steps = config.rope_parameters["rope_theta"] ** (-torch.arange(0, dim, 2).double() / dim)
    angles = torch.arange(count).double()[:, None] * steps

    def norm(hidden: torch.Tensor, name: str) -> torch.Tensor:
        return (
            hidden / (hidden.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[name + ".weight"]
        )

    def turned(heads: torch.Tensor) -> torch.Tensor:
        first, second = heads.chunk(2, -1)
        sine, cosine = angles.sin(), angles.cos()
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)

    hidden, made_by_layer = weights["model.embed_tokens.weight"][tokens], []
    for layer, read in enumerate(reads):
        name = f"model.layers.{layer}."
        q, k, v, o = (weights[f"{name}self_attn.{kind}_proj.weight"].T for kind in "qkvo")
        gate, up, down = (weights[f"{name}mlp.{kind}_proj.weight"].T for kind in ("gate", "up", "down"))
        normed = norm(hidden, name + "input_layernorm")
        queries, keys, values = ((normed @ part).view(count, -1, dim).transpose(0, 1) for part in (q, k, v))
        queries = turned(queries)
        made_by_layer.append((turned(keys), values))
        keys, values = made_by_layer[read]
        attended = torch.zeros(count, len(queries), dim).double()
        for head, token in product(range(len(queries)), range(count)):
            kv_head, seen = head * len(keys) // len(queries), token + 1
            weight = (keys[kv_head, :seen] @ queries[head, token] / dim**0.5).softmax(0)
            attended[token, head] = weight @ values[kv_head, :seen]
        hidden = hidden + attended.flatten(1) @ o
        normed = norm(hidden, name + "post_attention_layernorm")
        hidden = hidden + (torch.nn.functional.silu(normed @ gate) * (normed @ up)) @ down
    return norm(hidden, "model.norm") @ weights["lm_head.weight"].T


@pytest.mark.parametrize("layer_map", [MAP, [0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 3]], ids=str)
def test_logits_are_those_of_a_loop_in_fp64(layer_map: list[int]) -> None:
    engine, document, behind = made(layer_map), ids(60), ids(9, seed=2)
    cache = CompressedCache.from_bytes(engine.compress(document, policy="full").to_bytes())
    leaders = [layer == leader for layer, leader in enumerate(layer_map)]
    assert [entries_of(layer) is not None for layer in cache.layers] == leaders
    with torch.no_grad(), engine.attached(cache) as past:
        found = engine.model(torch.tensor([behind]), use_cache=True, **{CACHE_ARGUMENT: past}).logits[0]
    expected = reference(engine.model, layer_map, document + behind)[60:].float()
    assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-3)
    # Other keys and values than the followers' own.
    apart = made([0, 1, 2, 3])
    with torch.no_grad(), apart.attached(apart.compress(document, policy="full")) as past:
        other = apart.model(torch.tensor([behind]), use_cache=True, **{CACHE_ARGUMENT: past}).logits[0]
    assert not torch.allclose(found, other, atol=1e-2 * float(expected.abs().max()))


def test_the_tokens_of_a_batch_are_those_of_the_loop() -> None:
    engine, document = made(), ids(60)
    cache = engine.compress(document, policy="full")
    asked = [(cache, ids(5, seed=seed)) for seed in range(3)]
    answers = engine.answer_all(asked, max_new_tokens=6)
    for (_, question), answer in zip(asked, answers, strict=True):
        tokens, expected = document + question, []
        for _ in answer.token_ids:
            expected.append(int(reference(engine.model, MAP, tokens)[-1].argmax()))
            tokens.append(expected[-1])
        assert answer.token_ids == expected
        assert engine.answer(cache, question, max_new_tokens=6).token_ids == expected


@pytest.mark.parametrize("reads", [[0, 1, 2, 0], [0, 1, 1, 2]], ids=str)
def test_a_training_pass_is_the_loop(reads: list[int]) -> None:
    """Also where a layer reads one that reads another, as random routes do: it is that layer's own that it reads."""
    torch.manual_seed(0)
    model, tokens = small_model("llama"), ids(60)
    with torch.no_grad():
        run = routed(model, reads)
        logits = run.lm_head(run.model(input_ids=torch.tensor([tokens])).last_hidden_state)[0]
    expected = reference(model, reads, tokens).float()
    assert torch.allclose(logits, expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-3)


def test_a_route_is_random_among_the_layers_before() -> None:
    rng = random.Random(0)
    drawn = [routes(rng, 4, 0.5) for _ in range(4000)]
    assert {tuple(reads[:2]) for reads in drawn} == {(0, 1)}
    for layer in (2, 3):
        shares = Counter(reads[layer] for reads in drawn)
        assert shares[layer] / 4000 == pytest.approx(0.5, abs=0.04)
        assert all(shares[other] / 4000 == pytest.approx(0.5 / layer, abs=0.04) for other in range(layer))
    assert len(maps(4)) == 10
    for layer_map in maps(4):
        assert readers(layer_kinds(made(list(layer_map)).model.config)).keys() == {
            layer for layer, read in enumerate(layer_map) if layer != read
        }


def test_the_recorded_program_reads_the_same() -> None:
    """On a CPU in fp32 the model runs by its program, in which the projections of followers are left out."""
    model = made().model
    prepack(model)
    engine, program = made(), Engine(model, name="m")
    assert program.passes.program is not None
    document, question = ids(60), ids(5, seed=1)
    caches = [each.compress(document, policy="keydiff", compression_ratio=0.5) for each in (engine, program)]
    assert all(
        torch.allclose(a.keys, b.keys, atol=1e-4) for a, b in zip(caches[0].reduced, caches[1].reduced, strict=True)
    )
    answers = [
        each.answer(cache, question, max_new_tokens=8).token_ids
        for each, cache in zip((engine, program), caches, strict=True)
    ]
    assert answers[0] == answers[1]


def test_bytes_are_those_of_the_leaders() -> None:
    shared, whole = (made(layer_map).compress(ids(200), policy="full") for layer_map in (MAP, None))
    assert shared.bytes_full * 2 == whole.bytes_full
    assert len(shared.to_bytes()) < 0.55 * len(whole.to_bytes())


def test_a_map_of_each_to_itself_is_no_map() -> None:
    document, question = ids(60), ids(5, seed=1)
    mapped, plain = made([0, 1, 2, 3]), made(None)
    assert readers(layer_kinds(mapped.model.config)) == {}
    caches = [engine.compress(document, policy="full") for engine in (mapped, plain)]
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(caches[0].reduced, caches[1].reduced, strict=True))
    answers = [engine.answer(cache, question).token_ids for engine, cache in zip((mapped, plain), caches, strict=True)]
    assert answers[0] == answers[1]


def test_appended_tokens_read_the_leaders() -> None:
    engine, document, more, question = made(), ids(60), ids(20, seed=4), ids(5, seed=1)
    grown = engine.extend(engine.compress(document, policy="full"), more, policy="full")
    whole = engine.compress(document + more, policy="full")
    assert engine.answer(grown, question).token_ids == engine.answer(whole, question).token_ids
    for a, b in zip(grown.reduced, whole.reduced, strict=True):
        assert torch.allclose(torch.cat(a.dense()[:1]), torch.cat(b.dense()[:1]), atol=1e-4)


@pytest.mark.parametrize("policy", ["kvzip", "snapkv", "h2o", "ems", "think"])
def test_policies_reduce_the_leaders(policy: str) -> None:
    engine = made()
    cache = engine.compress(ids(120), policy=policy, compression_ratio=0.5)
    assert [entries_of(layer) is not None for layer in cache.layers] == [True, False, True, False]
    assert engine.answer(cache, ids(5, seed=1), max_new_tokens=4).token_ids


def test_the_identity_names_the_map() -> None:
    document = ids(60)
    shared, whole = made(), made(None)
    cache = shared.compress(document, policy="full")
    with pytest.raises(ModelMismatch):
        whole.attach(cache)
    assert "layer_map" in shared.identity.attention
    assert "layer_map" not in whole.identity.attention


@pytest.mark.parametrize(
    ("layer_map", "kind", "named"),
    [
        ([0, 0, 2], "llama", "each of the 4 layers"),
        ([0, 2, 2, 2], "llama", "itself, or a layer before it"),
        ([0, 0, 1, 1], "llama", "that reads itself"),
        ([0, 0, True, 2], "llama", "layer_map is"),
        (MAP, "gemma2", "all see the whole document"),
    ],
    ids=str,
)
def test_maps_that_cannot_be_are_refused(layer_map: Any, kind: str, named: str) -> None:
    with pytest.raises(PolicyUnsupported, match=named) as refused:
        made(layer_map, kind)
    assert refused.value.param == "model"


def test_what_a_reading_layer_does_not_go_with_is_refused() -> None:
    engine = made()
    cache = engine.compress(ids(120), policy="full")
    with pytest.raises(PolicyUnsupported, match="layer_map"):
        engine.answer(cache, ids(5), select="quest", select_tokens=32)
    with pytest.raises(PolicyUnsupported, match="layer_map"):
        engine.answer(cache, ids(5), suffix={"policy": "window", "budget": 64})
    with pytest.raises(PolicyUnsupported, match="layer_map"):
        engine.export(cache)
    with pytest.raises(PolicyUnsupported, match=r"layer_map.*prefill=whole"):
        engine.prepare(ids(120), policy="lagkv", policy_params={"prefill": "chunked", "lag": 8})
    with pytest.raises(PolicyUnsupported, match="read the keys and values of others"):
        engine.searcher.require()
