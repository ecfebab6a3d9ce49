"""Transforms of a model: what they cost to find, how they weigh errors, the step that is found, and interruptions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load as load_tensors

from kvshelf.artifact.coder import Coder
from kvshelf.artifact.transforms import KINDS, Transforms, pack
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.model import loading
from kvshelf.samples.tasks import haystacks
from kvshelf.training import step_search
from kvshelf.training.probed_text import ProbedText
from kvshelf.training.transform_search import _layers, _moments, _tables, find_transforms
from tests.conftest import save_random_model
from tests.engine.test_windows import made as windowed

BUNDLED = "b5c4904ae03dfed0"
"""Of the digest of kvshelf-tiny's transforms, which ids of caches hold."""

TEXTS = [
    " ".join(
        f"Box {i * seed % 83} of row {seed} holds {i * i % 97} grams of salt, and {i % 7} of sand." for i in range(90)
    )
    for seed in range(3, 13)
]


@pytest.fixture(scope="module")
def random(tmp_path_factory):
    """A model whose passes run by its modules, which hooks see."""
    folder = str(save_random_model(tmp_path_factory.mktemp("model") / "m", seed=3))
    model, tokenizer = loading.load(folder, device="cpu", dtype="float32")
    return Engine(model, tokenizer, name="random")


@pytest.fixture(scope="module")
def tiny():
    return Engine.load("kvshelf-tiny", device="cpu")


def prose(engine, texts):
    return [engine.text.encode(text) for text in haystacks(texts, 500, engine.text.count_tokens)]


def ids_of(engine, texts, tokens):
    return [engine.text.encode(text)[:tokens] for text in texts]


@pytest.fixture
def passed(random):
    """Tokens of all passes; a pass with gradients counts three times, for what it costs backwards."""
    counts = []

    def count(_, args, kwargs):
        ids = args[0] if args else kwargs["input_ids"]
        counts.append(ids.numel() * (3 if torch.is_grad_enabled() else 1))

    hook = random.model.base_model.register_forward_pre_hook(count, with_kwargs=True)
    yield counts
    hook.remove()


@pytest.mark.slow
def test_ten_texts_cost_two_and_a_half_prefills_of_them_at_most(random, passed):
    documents = ids_of(random, TEXTS, 2048)
    assert min(map(len, documents)) > 1900
    find_transforms(random, documents)
    assert sum(map(len, documents)) < sum(passed) <= 2.5 * sum(map(len, documents))


@pytest.mark.slow
def test_an_interrupted_search_goes_on_behind_the_last_text(random, passed, tmp_path, caplog):
    documents, path = ids_of(random, TEXTS[:4], 300), tmp_path / "unfinished"
    whole = find_transforms(random, documents)
    needed = sum(passed)

    def stop(done, _):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_transforms(random, documents, checkpoint=path, report=stop)
    passed.clear()
    reports = []
    assert find_transforms(random, documents, checkpoint=path, report=lambda *done: reports.append(done)) == whole
    assert reports[0] == (3, 4 + step_search.TRIES)
    assert sum(passed) < needed - 2 * 200
    for damage in (lambda: path.write_bytes(b"torn"), lambda: find_transforms(random, documents[:3], checkpoint=path)):
        damage()  # another search, or no search
        assert find_transforms(random, documents, checkpoint=path) == whole
    assert "is no state of a search" in caplog.text, "of the torn file alone"
    assert len(caplog.records) == 1


@pytest.mark.slow
def test_the_step_found_is_the_coarsest_without_a_loss_and_part_of_the_id(tiny, monkeypatch):
    documents = prose(tiny, 3)

    def loss(transforms, codec):
        coder = Coder(transforms, tiny.rope.rotate, tiny.rope.unrotate)
        losses = []
        for ids in documents[-2:]:
            text = ProbedText.of(tiny, ids)
            coded = text.cache.encoded(codec, coder).decoded(coder)
            exact = text.predictions(tiny, text.cache)
            losses.append(text.divergence(exact, text.predictions(tiny, replace(text.cache, layers=coded.layers))))
        return sum(losses) / len(losses)

    made = []
    for lossless in (0.1, 0.04):
        monkeypatch.setattr(step_search, "LOSSLESS", lossless)
        made.append(Transforms.from_bytes(find_transforms(tiny, documents)))
        assert loss(made[-1], "klt") <= lossless * 1.001
        assert loss(made[-1], f"klt:step={1.5 * 2**0.25:.4f}") > lossless
    coarse, fine = (transforms.layers[0]["values"].unit for transforms in made)
    assert fine < coarse
    identity = tiny.prepare(TEXTS[0], policy="full").identity
    first, second = (
        transforms.mark(identity).cache_id(key=b"k" * 32, tenant="", codec="klt", format_major=1) for transforms in made
    )
    assert first != second


@pytest.fixture(scope="module")
def learnt(tiny):
    """What kvshelf-tiny shows on some texts."""
    moments = None
    for ids in prose(tiny, 4):
        more = _moments(tiny, ProbedText.of(tiny, ids), costs=True)
        if moments is None:
            moments = more
        else:
            for mine, own in zip(moments, more, strict=True):
                for kind in KINDS:
                    mine[kind].add(own[kind])
    return moments


@pytest.mark.slow
def test_weights_lose_less_of_the_predictions_at_the_same_bytes(tiny, learnt):
    """Against a transform that counts all errors alike, within values and between layers."""
    import numpy as np

    tables = _tables(np.exp(-np.arange(1 << 13) / (1 << 7) * 1.4))
    alike = [{kind: replace(layer[kind], information=torch.eye(layer[kind].information.shape[1]).double().expand_as(
        layer[kind].information)) for kind in KINDS} for layer in learnt]  # fmt: skip
    text = ProbedText.of(tiny, prose(tiny, 5)[4])
    exact = text.predictions(tiny, text.cache)

    def coded(moments, finer):
        data = pack("0f", _layers(moments, finer), tables, {})
        coder = Coder(Transforms.from_bytes(data), tiny.rope.rotate, tiny.rope.unrotate)
        made = text.cache.encoded("klt", coder)
        layers = [
            replace(own, values=of.values)
            for own, of in zip(text.cache.layers, made.decoded(coder).layers, strict=True)
        ]
        loss = text.divergence(exact, text.predictions(tiny, replace(text.cache, layers=tuple(layers))))
        return sum(layer.values.nbytes for layer in made.layers), loss

    weighted = [coded(learnt, finer) for finer in range(-2, 12, 2)]
    for finer in (-4, -2, 0):
        size, loss = coded(alike, finer)
        assert min(nbytes for nbytes, cost in weighted if cost <= loss) < 0.8 * size


def test_values_foretold_from_keys_take_fewer_bytes_for_the_same_errors(tiny, learnt):
    """Against moments in which keys tell nothing of values: the transforms of version 2."""
    unrelated = [
        dict(layer, values=replace(layer["values"], crossed=torch.outer(layer["keys"].total, layer["values"].mean)))
        for layer in learnt
    ]
    cache, sizes, errors = ProbedText.of(tiny, prose(tiny, 5)[4]).cache, [], []
    for moments in (learnt, unrelated):
        coder = made_coder(tiny, _layers(moments, 8))
        made = cache.encoded("klt", coder)
        exact, after = (torch.cat([layer.values for layer in one.layers]) for one in (cache, made.decoded(coder)))
        sizes.append(sum(layer.values.nbytes for layer in made.layers))
        errors.append(float((exact - after).norm()))
    assert sizes[0] < 0.95 * sizes[1]
    assert errors[0] < 1.02 * errors[1]


@pytest.mark.parametrize("codec", ["klt", "klt:heads=each", "klt:classes=0.5/1.5,shares=20/30"])
@pytest.mark.parametrize("policy", ["full", "keydiff"])
def test_no_coefficient_of_a_foretold_value_is_further_off_than_its_step(tiny, learnt, codec, policy):
    """Of all heads together, of each alone, of parts, and of keys that are rotated to places in the cache."""
    coder = made_coder(tiny, _layers(learnt, 8))
    cache = tiny.run(tiny.prepare(TEXTS[0], policy=policy)).cache
    after = cache.encoded(codec, coder).decoded(coder)
    for number, (before, decoded) in enumerate(zip(cache.layers, after.layers, strict=True)):
        own = coder.transforms.layers[number]["values"]
        parts = [dict(zip(at.tolist(), rows, strict=True)) for at, rows in heads_of(before)]
        for part in getattr(decoded, "parts", (decoded,)):
            for head, (at, rows) in enumerate(heads_of(part)):
                exact = torch.stack([parts[head][token] for token in at.tolist()])
                off = (exact - rows) @ own.weight[head] / own.unit
                assert float(off.pow(2).mean().sqrt()) < 1.5 * 0.32
                assert torch.equal(exact[at < 4].bfloat16(), rows[at < 4].bfloat16())


def heads_of(record):
    return list(zip(record.positions, record.plain_heads()[1], strict=True))


def made_coder(engine, layers):
    import numpy as np

    tables = _tables(np.exp(-np.arange(1 << 13) / (1 << 7) * 1.4))
    return Coder(Transforms.from_bytes(pack("0f", layers, tables, {})), engine.rope.rotate, engine.rope.unrotate)


def test_weights_are_undone_when_rows_are_decoded(learnt):
    for layer in _layers(learnt):
        for transform in layer.values():
            size = transform.joint.shape[0]
            assert torch.allclose(transform.analysis(None) @ transform.synthesis(None), torch.eye(size), atol=0.05)
            assert torch.allclose(
                transform.analysis(1) @ transform.synthesis(1), torch.eye(transform.per_head.shape[1]), atol=0.05
            )


@pytest.mark.parametrize("damage", ["format", "missing", "skew", "singular", "wide", "slope", "infinite", "cut"])
def test_transforms_that_cannot_be_right_are_refused(learnt, damage):
    import numpy as np

    layers = _layers(learnt)
    weight = layers[0]["keys"].weight.clone()
    if damage == "skew":
        weight[0, 0, 1] += 1
    elif damage == "singular":
        weight[0] = 1
    elif damage == "wide":
        weight = weight[:, :-1]
    layers[0]["keys"] = replace(layers[0]["keys"], weight=weight)
    slope = layers[0]["values"].joint_slope.clone()
    if damage == "slope":
        layers[0]["values"] = replace(layers[0]["values"], joint_slope=slope[:-1])
    elif damage == "infinite":
        slope[0, 0] = float("inf")
        layers[0]["values"] = replace(layers[0]["values"], joint_slope=slope)
    data = pack("0f", layers, _tables(np.exp(-np.arange(1 << 13) / (1 << 7) * 1.4)), {})
    if damage == "format":
        data = data.replace(b"kvshelf.transforms/3", b"kvshelf.transforms/4")
    elif damage == "missing":
        data = data.replace(b"0.keys.weight", b"0.keys.heavy_")
    elif damage == "cut":
        data = data[:-10]
    with pytest.raises(InvalidRequest, match="is no transforms of a model"):
        Transforms.from_bytes(data)


def test_version_1_is_read_and_has_no_weights(tiny):
    transforms = tiny.coders.own.transforms
    assert not [name for name in load_tensors(transforms.data) if name.endswith(".weight")]
    assert {layer[kind].weight for layer in transforms.layers for kind in KINDS} == {None}
    assert transforms.digest.startswith(BUNDLED)


def test_version_2_is_read_and_foretells_nothing(learnt):
    import numpy as np

    plain = {"joint_slope": None, "per_head_slope": None}
    layers = [dict(layer, values=replace(layer["values"], **plain)) for layer in _layers(learnt)]
    data = pack("0f", layers, _tables(np.exp(-np.arange(1 << 13) / (1 << 7) * 1.4)), {})
    assert b"kvshelf.transforms/2" in data
    transforms = Transforms.from_bytes(data)
    assert {layer["values"].joint_slope for layer in transforms.layers} == {None}
    assert transforms.layers[0]["values"].weight is not None


def test_texts_too_short_to_be_asked_about_and_layers_with_windows_are_refused(random):
    with pytest.raises(InvalidRequest, match="text 2 has 3 tokens, too few to be asked about"):
        find_transforms(random, [list(range(100, 400)), [100, 101, 102]])
    with pytest.raises(PolicyUnsupported, match="layers that see the whole document"):
        find_transforms(Engine(windowed("mistral"), name="m"), [list(range(90))])
