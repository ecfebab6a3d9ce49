"""Layers that read the keys and values of others (Stochastic KV Routing): against the model with its modules joined."""

from __future__ import annotations

from contextlib import contextmanager
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

MAP = [0, 0, 2, 2]


def ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 90, (count,), generator=generator).tolist()


def made(layer_map: Any = MAP, kind: str = "llama") -> Engine:
    torch.manual_seed(0)
    model = small_model(kind)
    model.config.layer_map = layer_map
    return Engine(model, name="m")


@contextmanager
def joined(model: Any, layer_map: list[int]):
    """The model itself, without kvshelf: projections of a follower give what those of its leader gave."""
    held: dict[tuple[int, str], torch.Tensor] = {}

    def keep(leader: int, name: str):
        def hook(_m: Any, _a: Any, out: torch.Tensor) -> None:
            held[leader, name] = out

        return hook

    def give(leader: int, name: str):
        return lambda _m, _a, _out: held[leader, name]

    hooks = []
    for layer, leader in enumerate(layer_map):
        attention = model.model.layers[layer].self_attn
        for name in ("k_proj", "v_proj"):
            hook = keep(layer, name) if leader == layer else give(leader, name)
            hooks.append(getattr(attention, name).register_forward_hook(hook))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def reference(engine: Engine, tokens: list[int]) -> torch.Tensor:
    model = engine.model
    with torch.no_grad(), joined(model, list(model.config.layer_map)):
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("layer_map", [MAP, [0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 3]], ids=str)
def test_answers_are_those_of_the_joined_model(layer_map: list[int]) -> None:
    engine, document, behind = made(layer_map), ids(60), ids(9, seed=2)
    cache = CompressedCache.from_bytes(engine.compress(document, policy="full").to_bytes())
    leaders = [layer == leader for layer, leader in enumerate(layer_map)]
    assert [entries_of(layer) is not None for layer in cache.layers] == leaders
    with torch.no_grad(), engine.attached(cache) as past:
        found = engine.model(torch.tensor([behind]), use_cache=True, **{CACHE_ARGUMENT: past}).logits[0]
    expected = reference(engine, document + behind)[60:]
    assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-3)
    # Other keys and values than the followers' own.
    apart = made([0, 1, 2, 3])
    with torch.no_grad(), apart.attached(apart.compress(document, policy="full")) as past:
        other = apart.model(torch.tensor([behind]), use_cache=True, **{CACHE_ARGUMENT: past}).logits[0]
    assert not torch.allclose(found, other, atol=1e-2 * float(expected.abs().max()))


def test_the_tokens_of_a_batch_are_those_of_the_joined_model() -> None:
    engine, document = made(), ids(60)
    cache = engine.compress(document, policy="full")
    asked = [(cache, ids(5, seed=seed)) for seed in range(3)]
    answers = engine.answer_all(asked, max_new_tokens=6)
    for (_, question), answer in zip(asked, answers, strict=True):
        tokens, expected = document + question, []
        for _ in answer.token_ids:
            expected.append(int(reference(engine, tokens)[-1].argmax()))
            tokens.append(expected[-1])
        assert answer.token_ids == expected
        assert engine.answer(cache, question, max_new_tokens=6).token_ids == expected


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
