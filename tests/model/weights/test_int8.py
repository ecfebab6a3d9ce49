"""Weights in int8: rounded once, packed as bytes, and a model of its own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from kvshelf.engine.engine import Engine
from kvshelf.engine.parallel.engine import ParallelEngine
from kvshelf.errors import InvalidRequest, ModelMismatch, PolicyUnsupported
from kvshelf.kernels.rowwise import available
from kvshelf.model import loading as models
from kvshelf.model import prepacking
from kvshelf.model.prepacking import Int8Linear, PackedLinear, prepack
from kvshelf.model.weights.int8 import as_int8, round_to_int8
from kvshelf.store.url import StoreConfig
from kvshelf.workers.cluster.deployment import ReplicaConfig, ServedReplica

needs_library = pytest.mark.skipif(not available(), reason="no library was compiled for this CPU")


@pytest.fixture(scope="module")
def engines(tiny_folder) -> dict[str, Engine]:
    return {kind: Engine.load(str(tiny_folder), device="cpu", weights=kind) for kind in ("plain", "int8")}


def llama(**fields) -> LlamaForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 96}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**(sizes | heads | fields))).eval()


@pytest.mark.parametrize("size", [1e-42, 1e-33, 1e-20, 1.0, 1e30])
def test_what_is_rounded_twice_is_rounded_once_and_its_products_are_exact(size):
    torch.manual_seed(0)
    weight = torch.randn(512, 40) * size
    weight[3], weight[5, 7] = 0, -127 * size
    numbers, scales = as_int8(weight)
    rounded = numbers * scales[:, None]
    assert torch.equal(rounded.double(), numbers.double() * scales[:, None].double())
    assert torch.equal(as_int8(rounded)[0], numbers)
    assert torch.equal(as_int8(rounded)[1], scales)
    assert int(numbers.min()) >= -127
    largest = weight.abs().amax(dim=1, keepdim=True)
    assert ((rounded - weight).abs() <= (largest / 127 * 0.51).clamp_min(2.0**-100)).all()


@needs_library
def test_layers_are_bytes_whose_state_dict_has_the_rounded_weights(tiny_folder, engines):
    rounded, _ = models.load(str(tiny_folder), device="cpu", dtype="auto", weights="int8")
    model = engines["int8"].model
    assert [module.weight.dtype for module in model.modules() if isinstance(module, Int8Linear)] == [torch.int8] * 14
    assert engines["int8"].passes.program is not None
    before, after = rounded.state_dict(), model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    plain = engines["plain"].model.state_dict()
    assert torch.equal(plain["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert not torch.equal(plain["model.layers.0.mlp.up_proj.weight"], after["model.layers.0.mlp.up_proj.weight"])


def test_neither_answers_from_the_others_caches(engines):
    document = list(range(5, 105))
    for own, other in (("plain", "int8"), ("int8", "plain")):
        cache = engines[own].compress(document, layout="plain")
        assert engines[own].answer(cache, [7, 8], max_new_tokens=3).token_ids
        with pytest.raises(ModelMismatch, match="weights differs"):
            engines[other].answer(cache, [7, 8], max_new_tokens=3)


def test_a_replica_has_the_weights_of_its_configuration(tiny_folder, engines, tmp_path):
    config = ReplicaConfig(str(tiny_folder), StoreConfig(f"disk://{tmp_path}/home"), device="cpu", weights="int8")
    replica = ServedReplica(config)
    try:
        assert replica.engine.identity == engines["int8"].identity
    finally:
        replica.stop()


def test_without_a_compiled_form_torch_answers_as_the_same_model(tiny_folder, engines, monkeypatch):
    monkeypatch.setattr(prepacking, "available", lambda: False)
    torchs = Engine.load(str(tiny_folder), device="cpu", weights="int8")
    assert not any(isinstance(module, Int8Linear) for module in torchs.model.modules())
    assert torchs.identity == engines["int8"].identity
    cache = engines["int8"].compress(list(range(5, 105)), layout="plain")
    answers = {tuple(engine.answer(cache, [7, 8, 9]).token_ids) for engine in (torchs, engines["int8"])}
    assert len(answers) == 1


@needs_library
@pytest.mark.parametrize("rows", [2, 6, 9, 13, 97])
def test_a_row_of_a_layer_does_not_depend_on_its_neighbours(engines, rows):
    torch.manual_seed(rows)
    for layer in engines["int8"].model.modules():
        if isinstance(layer, Int8Linear):
            x = torch.randn(rows, layer.weight.shape[1])
            made = layer(x)
            assert all(torch.equal(layer(x[row : row + 1])[0], made[row]) for row in (0, rows // 2, rows - 1))


@needs_library
def test_a_tied_head_has_bytes_of_its_own_and_the_embedding_is_rounded_with_it():
    model = llama(tie_word_embeddings=True)
    round_to_int8(model, "m")
    prepack(model, "int8")
    assert isinstance(model.lm_head, Int8Linear)
    assert torch.equal(model.lm_head.unpacked, model.get_input_embeddings().weight)


@needs_library
def test_a_layer_of_bytes_can_be_copied_widened_and_has_gradients():
    numbers, scales = as_int8(torch.randn(64, 32))
    weight, x = numbers * scales[:, None], torch.randn(3, 32, requires_grad=True)
    layer = PackedLinear.of(weight, nn.Parameter(torch.randn(64), requires_grad=False), "int8")
    assert isinstance(layer, Int8Linear)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(dim=0).expand(3, 32))
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(layer)(x), layer(x))
        exact = nn.functional.linear(x.double(), weight.double(), layer.bias.double())
        torch.testing.assert_close(layer(x).double(), exact, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(layer.double()(x.double()), exact)


def save(model, folder):
    model.save_pretrained(folder)
    return str(folder)


SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 96}
UNFIT = {
    "a Conv1D has weights of 64 x 192": lambda: GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=2)),
    "no linear layer": lambda: MixtralForCausalLM(
        MixtralConfig(**SMALL, num_attention_heads=2, num_key_value_heads=1, num_local_experts=2)
    ),
    "a linear layer of 48 x 64 has outputs that are no multiple of 32": lambda: llama(head_dim=24),
}


@pytest.mark.parametrize("said", UNFIT)
def test_a_model_whose_layers_cannot_have_it_is_refused_by_name_before_it_is_loaded(said, tmp_path, monkeypatch):
    folder = save(UNFIT[said](), tmp_path / "m")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(PolicyUnsupported, match=said) as refused:
        Engine.load(folder, device="cpu", weights="int8")
    assert refused.value.param == "weights"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weights": "int4"}, "'int4'; one of plain, int8"),
        ({"weights": "int8", "device": "cuda"}, "multiplied on a CPU"),
        ({"weights": "int8", "device": "spread"}, "multiplied on a CPU"),
        ({"weights": "int8", "dtype": "bfloat16"}, "multiplied in float32"),
    ],
)
def test_what_int8_cannot_be_is_refused(options, said, tiny_folder):
    with pytest.raises(InvalidRequest, match=said):
        Engine.load(str(tiny_folder), **options)


def test_processes_that_share_a_model_have_plain_weights(tiny_folder):
    with pytest.raises(InvalidRequest, match="of one process, and 2"):
        ParallelEngine.load(str(tiny_folder), device="cpu", ranks=2, weights="int8")


def test_weights_that_are_not_finite_are_refused():
    model = llama()
    model.model.layers[0].mlp.up_proj.weight.data[3, 4] = torch.inf
    with pytest.raises(InvalidRequest, match=r"not finite \(model.layers.0.mlp.up_proj\)"):
        round_to_int8(model, "m")
