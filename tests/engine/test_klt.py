"""Codec klt through the engine: on other dtypes and models, attached, exported, and where it must be refused."""

from __future__ import annotations

import copy
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvshelf.artifact import blob
from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.transforms import KINDS
from kvshelf.engine.attention import attachment
from kvshelf.engine.attention.attachment import Attachment
from kvshelf.engine.engine import Engine
from kvshelf.errors import BlobError, InvalidRequest, ModelMismatch, PolicyUnsupported
from kvshelf.model import calibration
from kvshelf.training.transform_search import find_transforms
from tests.amounts import few
from tests.conftest import save_random_model
from tests.store.caches import make_cache
from tests.store.transforms import make_coder

DEVICES = [torch.device("cpu")] * 5
TEXT = " ".join(f"Item {i} weighs {i * i % 97} grams and lies in box {i * 7 % 31}." for i in range(40))


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def engine(request, tmp_path_factory):
    """A random model in each dtype, with transforms made from a text."""
    folder = save_random_model(tmp_path_factory.mktemp("model") / "m", seed=3)
    engine = Engine.load(str(folder), device="cpu", dtype=request.param)
    ids = engine.text.encode(TEXT)
    (folder / calibration.TRANSFORMS_BESIDE_THE_WEIGHTS).write_bytes(find_transforms(engine, [ids[:300], ids[300:700]]))
    return engine


def relative_error(ours, exact):
    ours, exact = (torch.cat([rows.float().flatten() for rows in each]) for each in (ours, exact))
    return float((ours - exact).norm() / exact.norm())


def digests(engine, cache, codec):
    return [layer.digest for layer in blob.inspect(engine.encoded(cache, codec).to_bytes()).header.layers]


@pytest.mark.parametrize("step", few(1, [0.05, 0.5]))
def test_rows_come_back_in_the_model_s_dtype(engine, step):
    cache = engine.compress(TEXT, policy="full")
    coded = engine.encoded(cache, f"klt:step={step}")
    read = engine.coders.decoded(CompressedCache.from_bytes(coded.to_bytes()))
    for ours, exact in zip(read.layers, cache.layers, strict=True):
        assert ours.keys.dtype == exact.keys.dtype == engine.model.dtype
        assert relative_error(ours.dense(), exact.dense()) < {0.05: 0.05, 0.5: 0.25}[step]
    assert engine.answer(coded, "What?", max_new_tokens=4) == engine.answer(
        engine.coders.decoded(coded), "What?", max_new_tokens=4
    )


def test_an_exported_cache_is_the_decoded_one(engine):
    coded = engine.encoded(engine.compress(TEXT, policy="keydiff", compression_ratio=0.5), "klt")
    ours, exact = engine.export(coded), engine.export(engine.coders.decoded(coded))
    for one, other in zip(ours.layers, exact.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


@pytest.mark.parametrize("tokens", [2, 4, 5, 6])
def test_a_document_of_a_few_tokens_has_hardly_a_stream(engine, tokens):
    """The first four tokens stay in 16 bits: below five tokens there is nothing to code."""
    ids = engine.text.encode(TEXT)[:tokens]
    coded = engine.encoded(engine.compress(ids, policy="full"), "klt")
    read = CompressedCache.from_bytes(coded.to_bytes())
    assert read.num_tokens == tokens
    assert engine.answer(read, [5, 6], max_new_tokens=3).usage.cache_read_tokens == tokens


def test_joint_heads_are_refused_where_heads_keep_different_tokens(engine):
    ragged = engine.compress(TEXT, policy="kvzip", compression_ratio=0.5)
    with pytest.raises(InvalidRequest, match="joint"):
        engine.encoded(ragged, "klt:heads=joint")
    whole = engine.compress(TEXT, policy="full")
    assert digests(engine, whole, "klt") == digests(engine, whole, "klt:heads=joint")
    assert digests(engine, whole, "klt") != digests(engine, whole, "klt:heads=each")
    assert digests(engine, ragged, "klt") == digests(engine, ragged, "klt:heads=each")


def test_steps_by_kl_change_nothing_where_units_differ_by_layer(engine):
    cache = engine.compress(TEXT, policy="full")
    assert digests(engine, cache, "klt:step=2,steps=kl") == digests(engine, cache, "klt:step=2")
    units = {layer[kind].unit for layer in engine.coders.own.transforms.layers for kind in KINDS}
    assert len(units) == 4


def test_shares_of_more_than_is_kept_are_refused_before_the_prefill(engine):
    job = engine.prepare(TEXT, policy="keydiff", compression_ratio=0.6)
    engine.compressor.level(job, "klt:classes=1/2,shares=20/20")
    with pytest.raises(InvalidRequest, match="add up to 50 % of the document's entries, and the policy keeps"):
        engine.compressor.level(job, "klt:classes=1/2,shares=20/30")


def test_where_nothing_can_encode_klt_is_refused_before_any_prefill_and_read_all_the_same(engine, monkeypatch):
    """As on ARM under Linux, for which constriction has no build."""
    coded = engine.encoded(engine.compress(TEXT, policy="full"), "klt")
    monkeypatch.setitem(sys.modules, "constriction", None)
    with pytest.raises(PolicyUnsupported, match="written by the library constriction, which is not installed here"):
        engine.compressor.level(engine.prepare(TEXT, policy="full"), "klt")
    assert not engine.coders.writes_klt
    assert engine.coders.decoded(coded).num_tokens == coded.num_tokens


def test_transforms_that_nobody_has_are_a_mismatch_that_names_them(engine):
    coded = engine.encoded(engine.compress(TEXT, policy="full"), "klt")
    strange = replace(coded, identity=replace(coded.identity, transforms="ab" * 32))
    for use in (engine.attach, engine.coders.decoded, engine.export):
        with pytest.raises(ModelMismatch, match="ab" * 8) as refused:
            use(strange)
        assert refused.value.details["transforms"] == "ab" * 32
    assert not engine.coders.knows("ab" * 32)
    assert engine.coders.knows(coded.identity.transforms)


def test_transforms_of_another_model_are_not_learned(engine, tmp_path):
    other = Engine.load(str(save_random_model(tmp_path / "m", seed=9)), device="cpu")
    with pytest.raises(ModelMismatch, match="are of other weights"):
        other.coders.learn(engine.coders.own.transforms.data)
    with pytest.raises(PolicyUnsupported, match="needs the transforms"):
        other.encoded(other.compress(TEXT, policy="full"), "klt")
    assert not other.coders.has_own


@pytest.mark.parametrize("change", ["dynamic", None])
def test_a_rotation_that_cannot_be_undone_is_refused_by_name(engine, change):
    strange = Engine(copy.deepcopy(engine.model))
    strange.facts.rope = replace(strange.rope, length_dependent=True) if change else None
    ids = engine.text.encode(TEXT)[:50]
    cache = strange.compress(ids, policy="full")
    for refused in (
        lambda: strange.encoded(cache, "klt"),
        lambda: strange.compressor.level(strange.prepare(ids, policy="full"), "klt"),
        lambda: find_transforms(strange, [ids]),
    ):
        with pytest.raises(PolicyUnsupported, match="cannot be undone") as error:
            refused()
        assert error.value.param == "codec"


@pytest.mark.slow
def test_layers_are_decoded_side_by_side_and_one_that_cannot_be_is_named(monkeypatch, caplog):
    """As on a card: `KVSHELF_KERNELS=triton`. The CPU decodes what the card cannot, and says what is wrong."""
    coded, coder = make_coded(2)
    by_cpu = Attachment(coded, DEVICES, None, coder)
    expected = [by_cpu.prefixes(layer) for layer in (0, 1)]  # before the form is forced
    rows = coded.layers[1].values
    data = rows.data.clone()
    data[-4:] = 0  # a stream never ends in a zero
    damaged = replace(coded, layers=(coded.layers[0], replace(coded.layers[1], values=replace(rows, data=data))))
    monkeypatch.setenv("KVSHELF_KERNELS", "triton")
    for cached, layers, warnings in ((coded, (0, 1), 0), (damaged, (0,), 1)):
        attached = Attachment(cached, DEVICES, None, coder)
        for layer in layers:
            (ours,), (theirs,) = attached.prefixes(layer), expected[layer]
            assert torch.allclose(ours.keys, theirs.keys, atol=1e-4)
            assert torch.allclose(ours.values, theirs.values, atol=1e-4)
        assert caplog.text.count("are decoded on the CPU") == warnings, caplog.text
    with pytest.raises(BlobError, match="is not what an encoder writes"):
        attached.prefixes(1)
    assert attached.failed


def make_coded(layers):
    coder = make_coder(layers)
    return make_cache(3, num_tokens=10, lengths=((10, 10),) * layers).encoded("klt", coder), coder


@pytest.fixture
def card(monkeypatch):
    """In place of the card's decoder: the layers of each batch, and an error that it raises."""
    seen = SimpleNamespace(batches=[], error=None, at_once=0)

    def decode(layers, *_):
        seen.at_once += 1
        seen.batches.append(([*layers], seen.at_once))
        time.sleep(0.05)
        seen.at_once -= 1
        if seen.error:
            raise seen.error
        return dict(layers)

    monkeypatch.setenv("KVSHELF_KERNELS", "triton")
    monkeypatch.setattr(attachment, "plain_layers", decode)
    return seen


@pytest.mark.slow
def test_only_what_a_card_can_lack_is_decoded_by_the_cpu(card, caplog):
    coded, coder = make_coded(1)
    card.error = torch.OutOfMemoryError("no memory")
    (prefix,) = Attachment(coded, DEVICES, None, coder).prefixes(0)
    assert len(prefix.keys) == 20
    assert caplog.text.count("are decoded on the CPU: OutOfMemoryError: no memory") == 1
    card.error = RuntimeError("a fault of ours")
    attached = Attachment(coded, DEVICES, None, coder)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        attached.prefixes(0)
    assert attached.failed


@pytest.mark.parametrize(("layers_of_memory", "batches"), [(100, [5]), (2.5, [2, 2, 1]), (0.5, [1] * 5)])
def test_as_many_layers_are_decoded_at_once_as_memory_is_for(card, monkeypatch, layers_of_memory, batches):
    """All that are there, of one document after the other: 16 channels of 10 tokens in 4 bytes, keys and values."""
    monkeypatch.setattr(attachment, "BYTES_TOGETHER", int(layers_of_memory * 2 * 16 * 10 * 4))
    coded, coder = make_coded(5)
    documents = [Attachment(coded, DEVICES, None, coder) for _ in range(2)]
    for document in documents:
        document.layers()
    assert sorted(len(layers) for layers, _ in card.batches) == sorted(batches * 2)
    assert {at_once for _, at_once in card.batches} == {1}


@pytest.mark.slow
def test_a_document_of_several_processes_is_decoded_in_the_host_s_memory(monkeypatch):
    """Each card has its own heads alone, and rank 0 sends the others' from there. `meta` stands for a card."""
    monkeypatch.setenv("KVSHELF_KERNELS", "triton")
    coded, coder = make_coded(2)
    attached = Attachment(coded, [torch.device("meta")] * 2, None, coder, heads=(0, 1))
    assert {layer.keys.device.type for layer in attached.layers()} == {"cpu"}
    (prefix,) = attached.prefixes(0)
    assert (prefix.keys.device.type, len(prefix.lengths)) == ("meta", 1)
