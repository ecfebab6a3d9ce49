"""Prepacked linear layers: the same model, its weights in another order."""

from __future__ import annotations

import copy
import platform

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kvshelf.engine.engine import Engine
from kvshelf.kernels.native import LEVEL
from kvshelf.kernels.rowwise import available, multiplies_bf16, pack_weight
from kvshelf.model import loading as models
from kvshelf.model.prepacking import PackedLinear, PanelLinear, TiedLinear, prepack
from kvshelf.model.source import bundled_folder
from kvshelf.store.url import StoreConfig
from kvshelf.workers.cluster.deployment import ReplicaConfig, ServedReplica
from tests.amounts import few
from tests.conftest import save_random_model
from tests.kernels.conftest import forget_library

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors keep torch's own order")

SHAPES = [(1, 1), (3, 5), (64, 64), (100, 37), (100, 96), (1408, 512)]
DTYPES = [torch.float32] + [torch.bfloat16] * torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.fixture
def model(tiny_folder):
    """Its head is its own; queries, keys and values have biases."""
    return AutoModelForCausalLM.from_pretrained(tiny_folder, tie_word_embeddings=False).eval()


def linear(inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(inputs * outputs)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)


def packed_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, PackedLinear)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_products_are_those_of_the_weights_in_double(inputs, outputs, dtype, bias):
    plain = linear(inputs, outputs, dtype, bias=bias)
    packed = PackedLinear.of(plain.weight, plain.bias)
    assert torch.equal(packed.unpacked, plain.weight)
    for shape in [(inputs,), (1, inputs), (2, 33, inputs), (0, inputs)]:
        x = torch.randn(shape, dtype=dtype)
        exact = nn.functional.linear(x.double(), plain.weight.double(), plain.bias.double() if bias else None)
        made = packed(x)
        assert made.dtype == dtype
        torch.testing.assert_close(made.double(), exact, atol=1e-5 if dtype == torch.float32 else 1e-2, rtol=1e-2)
    strided = torch.randn(inputs, 7, dtype=dtype).T
    torch.testing.assert_close(packed(strided), plain(strided))


def test_the_state_dict_has_the_weights_as_they_were(model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prepack(model)
    assert packed_layers(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_an_engine_of_a_prepacked_model_is_of_the_same_model(model):
    identity, parameters = Engine(model, name="m").identity, model.num_parameters()
    prepack(model)
    assert packed_layers(model)
    assert Engine(model, name="m").identity == identity
    assert model.num_parameters() == parameters


def test_a_prepacked_model_can_be_saved_and_loaded(model, tmp_path):
    ids = torch.arange(20)[None]
    with torch.no_grad():
        prepack(model)
        assert packed_layers(model)
        expected = model(ids).logits
        model.save_pretrained(tmp_path)
        torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, expected)


def test_every_linear_layer_is_packed_but_a_tied_head(model):
    prepack(model)
    assert not [name for name, module in model.named_modules() if type(module) is nn.Linear]
    assert "lm_head" in packed_layers(model)
    tied = AutoModelForCausalLM.from_pretrained(bundled_folder("kvshelf-tiny"))
    assert tied.config.tie_word_embeddings
    prepack(tied)
    assert tied.lm_head.weight is tied.get_input_embeddings().weight
    assert len(packed_layers(tied)) == 7 * tied.config.num_hidden_layers


@pytest.mark.skipif(not available(), reason="no compiled forms")
def test_weights_that_are_exact_in_bf16_take_half_the_bytes_and_give_the_same_logits():
    """As of a checkpoint that was published in bf16 and is loaded in fp32. Its tied head is narrow, too."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=320, num_hidden_layers=2, tie_word_embeddings=True, **shape)
    model = LlamaForCausalLM(config).bfloat16().float().eval()
    identity = Engine(model, name="m").identity
    wide = copy.deepcopy(model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prepack(model)
    for name in packed_layers(model):
        layer, plain = model.get_submodule(name), weights[f"{name}.weight"]
        assert layer.weight.dtype == torch.int16
        assert layer.weight.nbytes == plain.nbytes / 2
        wide.set_submodule(name, PanelLinear(pack_weight(plain), layer.bias))
    assert "lm_head" in packed_layers(model)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights.items())
    with torch.no_grad():
        for ids in (torch.arange(1)[None], torch.arange(20)[None]):
            assert torch.equal(model(ids).logits, wide(ids).logits)
    assert model.dtype == torch.float32
    assert Engine(model, name="m").identity == identity


@pytest.mark.skipif(not available() or not multiplies_bf16(), reason="the processor has no AVX512-BF16, or AMX")
def test_weights_in_bf16_are_onednns_where_the_level_has_no_products_of_them(monkeypatch):
    plain, x = linear(64, 96, torch.bfloat16), torch.randn(3, 64).bfloat16()
    packed = PackedLinear.of(plain.weight, plain.bias)
    assert isinstance(packed, PanelLinear)
    assert packed.weight.nbytes == plain.weight.nbytes
    made = packed(x)
    monkeypatch.setenv(LEVEL, "avx2")
    try:
        forget_library()
        other = PackedLinear.of(plain.weight, plain.bias)
        assert not isinstance(other, PanelLinear)
        torch.testing.assert_close(other(x), made)
    finally:
        forget_library()
    widened = copy.deepcopy(packed).float()
    torch.testing.assert_close(widened(x.float()), plain.float()(x.float()))


def test_what_onednn_is_not_fast_for_stays(tiny_folder):
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float16)
    prepack(model)
    meta = AutoModelForCausalLM.from_pretrained(tiny_folder).to("meta")
    prepack(meta)
    assert not packed_layers(model)
    assert not packed_layers(meta)


class Scaled(nn.Linear):
    """What adapters and quantizers put into a model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_subclasses_stay(model):
    own = Scaled(64, 64)
    model.base_model.layers[0].self_attn.o_proj = own
    prepack(model)
    assert model.base_model.layers[0].self_attn.o_proj is own


@pytest.mark.parametrize("policy", few(1, ["keydiff", "defensivekv", "expected_attention"]))
def test_caches_and_answers_are_those_of_the_plain_model(tmp_path, policy):
    """Also of a policy that reads a weight: that of the output projection."""
    folder = save_random_model(tmp_path / "model", layers=3)
    packed, plain = Engine.load(str(folder), device="cpu", dtype="float32"), plain_engine(folder)
    assert packed_layers(packed.model)
    document, question = list(range(5, 305)), [7, 8, 9]
    ours, theirs = (
        engine.compress(document, policy=policy, compression_ratio=0.5, layout="plain") for engine in (packed, plain)
    )
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        for kept, expected in zip(layer.positions, other.positions, strict=True):
            assert torch.equal(kept, expected)
        for kept, expected in zip(layer.keys, other.keys, strict=True):
            torch.testing.assert_close(kept, expected, atol=1e-4, rtol=1e-4)
    # What either engine has made, the other answers from: they are one model.
    answers = {engine.answer(cache, question).text for engine in (packed, plain) for cache in (ours, theirs)}
    assert len(answers) == 1


def plain_engine(folder):
    """Of a model as transformers makes it."""
    model, tokenizer = models.load(str(folder), device="cpu", dtype="float32")
    engine = Engine(model, tokenizer, name=str(folder))
    assert not packed_layers(engine.model)
    return engine


def test_whoever_loads_a_model_has_it_prepacked_and_the_identity_of_its_weights(tiny_folder, tmp_path):
    replica = ServedReplica(ReplicaConfig(str(tiny_folder), StoreConfig(f"disk://{tmp_path}/home"), device="cpu"))
    try:
        loaded, plain = Engine.load(str(tiny_folder), device="cpu"), plain_engine(tiny_folder)
        assert packed_layers(replica.engine.model) == packed_layers(loaded.model) != []
        assert replica.engine.identity.weights == loaded.identity.weights == plain.identity.weights
    finally:
        replica.stop()


@pytest.mark.skipif(not available(), reason="no library was compiled for this CPU")
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 13])
def test_a_head_tied_to_the_embedding_is_multiplied_as_it_lies(rows):
    """In a model of its own, with no memory of its own; a row's numbers do not depend on its neighbours."""
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=1,
            vocab_size=100, tie_word_embeddings=True,
        )
    ).eval()  # fmt: skip
    x = torch.randn(2, rows, 48)
    expected = model.lm_head(x)
    prepack(model)
    assert isinstance(model.lm_head, TiedLinear)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    with torch.no_grad():
        made = model.lm_head(x)
        assert torch.equal(model.lm_head(x[:, -1:]), made[:, -1:])
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("packed", [True, False])
def test_gradients_go_through_layers_whose_weights_are_laid_out(packed):
    weight, x = torch.randn(64, 32), torch.randn(3, 32, requires_grad=True)
    layer = PackedLinear.of(weight, None) if packed else TiedLinear(nn.Parameter(weight, requires_grad=False))
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(dim=0).expand(3, 32))


@pytest.mark.parametrize("outputs", [64, 65])
def test_a_layer_whose_weights_are_laid_out_can_be_copied_and_widened(outputs):
    plain, x = linear(32, outputs, torch.float32), torch.randn(3, 32)
    packed = PackedLinear.of(plain.weight, plain.bias)
    copied = copy.deepcopy(packed)
    assert torch.equal(copied(x), packed(x))
    if outputs == 64:
        torch.testing.assert_close(copied.double()(x.double()), plain.double()(x.double()))
