"""InfiniGen against its rule in loops over numbers in fp64, and what stands in its way."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.kernels.rowwise import available
from kvshelf.model import calibration
from kvshelf.model.prepacking import prepack
from kvshelf.training.skew_search import find_skews, skew
from tests.by_hand import Prefix, frequencies, logits_after, turned
from tests.engine.asking import ids
from tests.engine.test_selecting import read_positions
from tests.model.test_rope import random_model

SHAPES = (("llama", 4, 4), ("llama", 4, 1), ("llama", 7, 1), ("qwen2", 3, 3), ("qwen2", 8, 2), ("qwen2", 14, 2))
RECORDED = [(*shape, True) for shape in (("llama", 4, 2), ("qwen2", 8, 2)) if available()]
"""With weights in panels: their queries are made by a program."""
DOCUMENT, QUESTION = ([token % 60 for token in ids(count, seed)] for count, seed in ((120, 1), (9, 3)))
SHARP = 40.0
"""What queries are multiplied by: those of random weights fit all keys alike."""
WHOLE = 2
"""First layers that are read whole, of four."""


@pytest.fixture(
    params=[*((*shape, False) for shape in SHAPES), *RECORDED],
    ids=lambda shape: f"{shape[0]}, {shape[1]} of {shape[2]}" + (", recorded" if shape[3] else ""),
)
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A random model with skews in a data folder of its own."""
    return with_skews(sharp_engine(*request.param), tmp_path, monkeypatch)


def sharp_engine(kind: str, q_heads: int, kv_heads: int, recorded: bool) -> Engine:
    sizes = {"hidden_size": 16 * q_heads, "num_attention_heads": q_heads, "num_key_value_heads": kv_heads}
    model = random_model(kind, **sizes)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(SHARP)
            layer.self_attn.k_proj.weight.mul_(SHARP)
            layer.self_attn.o_proj.weight.mul_(SHARP)
            if kind == "qwen2":
                layer.self_attn.q_proj.bias.normal_()
                layer.self_attn.k_proj.bias.normal_()
    engine = Engine(model)
    if recorded:
        prepack(model)
    assert (engine.passes.early_program is not None) == recorded
    return engine


def with_skews(engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("XDG_DATA_HOME", str(folder))
    path = calibration.paths(engine.identity.weights).skews
    path.parent.mkdir(parents=True, exist_ok=True)
    calibration.save(find_skews(engine, DOCUMENT), path)
    return engine


def found_skews(engine: Engine) -> calibration.Skews:
    geometry = engine.preparer.geometry
    heads = geometry.q_heads, geometry.head
    return calibration.find(engine.identity, "", calibration.Skews, heads, "selector infinigen")


def by_loops(model, skews, seen, first, alpha, share, budget):
    """What each token behind the question reads of a layer, by the inputs of attention modules, which `seen` has as the
    pass goes on; noted in `seen["read"]`."""
    inv_freq = frequencies(model)

    def chosen(layer, queries, keys, visible):
        q_heads, tokens, dim = queries.shape
        group, shown = q_heads // len(keys), torch.ones(q_heads, tokens, keys.shape[1], dtype=torch.bool)
        if layer < WHOLE:
            return shown
        module = seen["modules"][layer]
        early = module.q_proj(seen["inputs"][layer - 1])[0].view(tokens, q_heads, dim)
        width = max(1, int(share * dim))
        for t in range(len(QUESTION), tokens):
            best, counts = [], 0
            for kv_head, head in enumerate(keys):
                entries = visible[kv_head].nonzero()[:, 0].tolist()
                margins = dict.fromkeys(entries, -torch.inf)
                for q_head in range(kv_head * group, (kv_head + 1) * group):
                    basis = skews[layer][q_head, :, :width].double()
                    query = turned(early[t, q_head : q_head + 1], torch.tensor([first + t]), inv_freq)[0] @ basis
                    parts = (head @ basis).bfloat16().double()
                    guesses = {j: float(query @ parts[j]) * dim**-0.5 for j in entries}
                    largest = max(guesses.values())
                    margins = {j: max(margins[j], guesses[j] - largest) for j in entries}
                counts += sum(margin >= -alpha for margin in margins.values())
                best.append(sorted(entries, key=lambda j: -margins[j]))
            most = min(budget, counts // len(keys))
            for kv_head, entries in enumerate(best):
                seen["read"][layer, kv_head, t] = sorted(entries[:most])
                own = torch.zeros(keys.shape[1], dtype=torch.bool)
                own[entries[:most]] = True
                shown[kv_head * group : (kv_head + 1) * group, t] = own
        return shown

    return chosen


RAGGED = {"policy": "ada", "base": "keydiff", "compression_ratio": 0.25}


@pytest.mark.parametrize(
    ("params", "tokens", "policy", "codec"),
    [
        ({}, 24, {"policy": "full"}, "none"),
        ({"alpha": 8.0, "channels": 0.5}, 120, RAGGED, "none"),
        ({"alpha": None}, 20, {"policy": "full"}, "int8:group=16,residual=0"),
    ],
    ids=["the paper's", "by alpha, of ragged heads", "by the budget, of codes"],
)
def test_it_reads_what_the_rule_says_in_loops(engine, params, tokens, policy, codec):
    """Of every layer and head, at each token of an answer; its question reads all."""
    cache = engine.compress(DOCUMENT, **policy).encoded(codec)
    document, batch = engine.attach(cache), engine.batch()
    selection = engine.select(document, "infinigen", question_tokens=len(QUESTION), tokens=tokens, params=params)
    generation = engine.start(document, QUESTION, Sampling(5), selection)
    layers, ours = range(len(cache.layers)), {}
    while not generation.finished:
        answered = len(generation.token_ids)
        (piece,) = batch.step([generation])
        assert not isinstance(piece, Exception)
        for layer in layers if answered else ():
            for head, read in enumerate(read_positions(selection, document, layer, len(cache.layers[layer].positions))):
                ours[layer, head, len(QUESTION) + answered - 1] = read
    seen = {"inputs": {}, "modules": {}, "read": {}}

    def note(module, _, arguments):
        seen["inputs"][module.layer_idx], seen["modules"][module.layer_idx] = arguments["hidden_states"], module

    for layer in engine.model.model.layers:
        layer.self_attn.register_forward_pre_hook(note, with_kwargs=True)
    skews = found_skews(engine).layers
    alpha, share = params.get("alpha", 5.0), params.get("channels", 0.3)
    rule = by_loops(
        engine.model, skews, seen, cache.next_position, torch.inf if alpha is None else alpha, share, tokens
    )
    prefix = Prefix.spelled_out(cache, frequencies(engine.model))
    logits_after(engine.model, prefix, [*QUESTION, *generation.token_ids[:-1]], cache.next_position, rule)
    tokens_read = len(generation.token_ids) - 1
    assert len(seen["read"]) == (len(cache.layers) - WHOLE) * len(cache.layers[0].positions) * tokens_read > 0
    for (layer, head, t), rows in seen["read"].items():
        assert ours[layer, head, t] == cache.layers[layer].positions[head][rows].tolist()
        assert len(rows) <= tokens
    for layer in range(WHOLE):
        for head, positions in enumerate(cache.layers[layer].positions):
            assert ours[layer, head, len(QUESTION)] == positions.tolist()
    counts = {len(rows) for rows in seen["read"].values()}
    assert (len(counts) > 1) == (alpha is not None), counts


def test_without_alpha_and_with_room_for_all_it_is_the_dense_answer(engine):
    cache = engine.compress(DOCUMENT, policy="full")
    ask = partial(engine.answer, cache, QUESTION, max_new_tokens=8)
    assert ask(select="infinigen", select_params={"alpha": None}, select_tokens=120) == ask()
    far = ask(select="infinigen", select_params={"alpha": 1e6}, select_tokens=120)  # by the choice, all of them
    assert (far.token_ids, far.usage.read_tokens) == (ask().token_ids, 120)
    part = ask(select="infinigen", select_tokens=24)
    assert part.usage.read_tokens <= (120 + 24) / 2
    questions = [(cache, QUESTION[i:]) for i in range(3)]
    assert engine.answer_all(questions, max_new_tokens=8, select="infinigen", select_tokens=24)[0] == part


@pytest.mark.skipif(not available(), reason="there is no program")
@pytest.mark.parametrize("alpha", [0.5, None])
def test_a_program_answers_as_the_modules_do(alpha, tmp_path, monkeypatch):
    """Its attentions are planned before anything is chosen, and later steps take them over."""
    answers = []
    for recorded in (False, True):
        engine = with_skews(sharp_engine("llama", 4, 2, recorded), tmp_path, monkeypatch)
        ask = partial(engine.answer, engine.compress(DOCUMENT, policy="full"), QUESTION, max_new_tokens=16)
        answers.append((ask(select="infinigen", select_params={"alpha": alpha}, select_tokens=24), ask()))
    assert answers[0] == answers[1]
    assert answers[0][0].token_ids != answers[0][1].token_ids


def test_a_skew_has_the_singular_vectors_of_queries_by_what_queries_and_keys_have_in_them():
    generator = torch.Generator().manual_seed(1)
    queries, keys = (torch.randn(heads, 90, 8, generator=generator) for heads in (4, 2))
    queries = queries * torch.arange(1, 9)
    for head, columns in enumerate(skew(queries, keys)):
        own, of_group = queries[head].double(), keys[head // 2].double()
        vectors = torch.linalg.svd(own, full_matrices=False).Vh
        sums = [sum(abs(float(row @ v)) for row in own) + sum(abs(float(row @ v)) for row in of_group) for v in vectors]
        order = sorted(range(8), key=lambda at: -sums[at])
        for column, at in zip(columns.T.double(), order, strict=True):
            assert abs(float(column @ vectors[at])) == pytest.approx(1, abs=1e-5)


def test_documents_share_a_choice_and_one_may_keep_nothing(llama):
    first, second = (llama.compress(DOCUMENT[at:], policy="full") for at in (0, 40))
    nothing = [layer.select(torch.zeros(layer.entries, dtype=torch.bool)) for layer in first.layers[1:3]]
    empty = replace(first, layers=(first.layers[0], *nothing, first.layers[3]))
    ask = partial(llama.answer, prompt=QUESTION, max_new_tokens=4, select="infinigen", select_tokens=24)
    for caches, whole in (([first, second], 200 + 200), ([empty, second], 200 + 80), ([empty], 120)):
        assert whole / 4 < ask(caches).usage.read_tokens <= (whole + 2 * 24) / 4


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return with_skews(Engine(random_model("llama")), tmp_path, monkeypatch)


def test_bad_parameters_and_skews_are_refused_by_name(llama):
    ask = partial(llama.answer, llama.compress(DOCUMENT, policy="full"), QUESTION, select="infinigen")
    for params, words in (({"alpha": -1}, "alpha"), ({"channels": 1.5}, "channels"), ({"partial": 0.3}, "partial")):
        with pytest.raises(InvalidRequest, match=words) as refused:
            ask(select_params=params)
        assert refused.value.param == f"select.params.{words}"
    path = calibration.paths(llama.identity.weights).skews
    whole, layers = path.read_bytes(), calibration.Skews.from_file(path).layers
    good = {f"{at:04}": own for at, own in enumerate(layers)}
    other, fewer = (
        {name: own[sizes].contiguous() for name, own in good.items()}
        for sizes in ((slice(None), slice(8), slice(8)), (slice(2),))
    )
    for tensors, weights, words in (
        (other, llama.identity.weights, f"{path.name} has 4 layers of 4 query heads of 8 channels, .* of 16 channels"),
        (fewer, llama.identity.weights, "has 4 layers of 2 query heads of 16 channels, .* 4 layers of 4 query heads"),
        (good, "f" * 39, "other weights"),
        ({name: good[name] for name in ("0000", "0001")}, llama.identity.weights, "2 layers of 4"),
        (good | {"0001": good["0001"][:, :, :3].contiguous()}, llama.identity.weights, "not square"),
        (good | {"0001": good["0001"] * torch.inf}, llama.identity.weights, "not finite"),
    ):
        path.unlink()
        save_file(tensors, path, {"kvshelf.skews/1": weights})
        with pytest.raises(PolicyUnsupported, match=words) as refused:
            ask()
        assert refused.value.param == "select.method"
    path.write_bytes(whole[:50])
    with pytest.raises(PolicyUnsupported, match="are broken"):
        ask()
    path.unlink()
    with pytest.raises(PolicyUnsupported, match=r"nobody has found them.*--only skews"):
        ask()
    with pytest.raises(InvalidRequest, match="64 tokens or more"):
        find_skews(llama, DOCUMENT[:63])
