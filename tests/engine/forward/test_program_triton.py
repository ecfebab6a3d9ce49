"""Passes as on a GPU, by torch's products and Triton's kernels under the interpreter: the logits of the model's own
modules, in few launches, and the modules where that cannot be."""

from __future__ import annotations

import copy
import gc
import weakref
from itertools import product

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from kvshelf.engine.engine import Engine
from kvshelf.engine.forward.program import ForwardProgram
from kvshelf.kernels.rowwise import row_programs
from kvshelf.model.prepacking import join_weights
from scripts.launch_counts import Counts
from tests.amounts import few
from tests.engine.forward.test_program import FAMILIES, Counting, Remembering, attend, made

CHECKED = ("llama", "qwen2", "qwen3")
OTHERS = [family for family in (*FAMILIES, "gpt2") if family not in CHECKED]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def forced_triton(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("KVSHELF_KERNELS", "triton")


def program_of(model) -> ForwardProgram:
    program = ForwardProgram.of(model)
    assert program is not None
    assert not program.in_c
    return program


@pytest.mark.parametrize(
    ("family", "dtype"), [*few(2, product(CHECKED, DTYPES)), *few(0, product(OTHERS, DTYPES))], ids=str
)
def test_logits_are_those_of_the_models_modules(family, dtype):
    """In 16 bits as near to those of the same weights in fp32 as the modules' are: a list rounds less often."""
    model, ids, positions = made(family).to(dtype), torch.randint(0, 130, (1, 3)), torch.arange(3)[None] + 20
    exact = copy.deepcopy(model).float()
    with torch.no_grad():
        own, expected = (each(input_ids=ids, position_ids=positions).logits.float() for each in (model, exact))
        logits = program_of(model).run(ids, positions, attend)
        for kept in ([2], [0, 1, 2]):
            found = logits(torch.tensor(kept))
            assert found.dtype == dtype
            if dtype == torch.float32:
                torch.testing.assert_close(found, expected[:, kept], atol=4e-6, rtol=1e-4)
            else:
                allowed = 2 * (own[:, kept] - expected[:, kept]).norm()
                assert (found.float() - expected[:, kept]).norm() < allowed < 0.05 * expected[:, kept].norm()


@pytest.mark.parametrize(
    ("family", "most"), few(1, [("llama", 8), ("qwen2", 8), ("qwen3", 8), ("phi3", 8), ("olmo2", 8)])
)
def test_a_layer_has_four_products_and_as_many_kernels_between_them(family, most):
    """Beside attention, which a test of it counts, and what stores keys and values: two launches each."""
    counts = []
    for layers in (1, 2):
        program = program_of(made(family, num_hidden_layers=layers).bfloat16())
        ids, positions, room = torch.tensor([[5]]), torch.tensor([[9]]), torch.zeros(1, 1, 4, 16).bfloat16()
        program.run(ids, positions, lambda *_, room=room: room)
        with torch.no_grad(), Counts() as counting:
            program.run(ids, positions, lambda *_, room=room: room)(torch.tensor([0]))
        counts.append(counting.launches)
    launches = counts[1] - counts[0]
    assert launches.total() <= most, launches
    assert launches["carry_out"] == 4


def test_weights_of_the_same_values_are_joined_in_place():
    model = made("qwen2")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    program_of(model)
    attention, mlp = model.base_model.layers[1].self_attn, model.base_model.layers[1].mlp
    for joined in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
        storages = {each.weight.untyped_storage().data_ptr() for each in joined}
        assert len(storages) == 1
        assert joined[0].weight.untyped_storage().nbytes() == sum(each.weight.nbytes for each in joined)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    at = attention.q_proj.weight.data_ptr()
    program_of(model)
    assert attention.q_proj.weight.data_ptr() == at, "what is joined stays where it is"


@pytest.mark.slow
def test_weights_that_were_joined_leave_their_memory():
    """At once, and not when Python next collects cycles: a card has no room for both."""
    model, before = made("llama"), []
    for layer in model.base_model.layers:
        for each in (*layer.self_attn.children(), *layer.mlp.children()):
            if isinstance(each, torch.nn.Linear):
                array = each.weight.numpy().copy()
                each.weight.data = torch.from_numpy(array)
                before.append(weakref.ref(array))
    del array
    gc.collect()
    gc.disable()
    try:
        program_of(model)
    finally:
        gc.enable()
    assert [at % 7 for at, memory in enumerate(before) if memory() is not None] == [3, 6] * 3, "o_proj and down_proj"


@pytest.mark.slow
def test_weights_that_others_hold_stay_where_they_are():
    """A parameter of its own on the same memory: to join the one would keep both."""
    model = made("llama")
    first, second = (layer.self_attn for layer in model.base_model.layers[:2])
    second.k_proj.weight = torch.nn.Parameter(first.k_proj.weight.data, requires_grad=False)
    at = first.q_proj.weight.data_ptr()
    ids, positions = torch.tensor([[5, 6]]), torch.tensor([[0, 1]])
    expected = model(input_ids=ids, position_ids=positions).logits
    logits = program_of(model).run(ids, positions, attend)
    assert first.k_proj.weight.data_ptr() == second.k_proj.weight.data_ptr()
    join_weights(model, [[at, at]])
    assert first.q_proj.weight.data_ptr() == at, "nor is one that comes twice copied"
    torch.testing.assert_close(logits(torch.arange(2)), expected, atol=4e-6, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_answers_are_those_of_the_modules(family, monkeypatch):
    """Questions of several lengths at once, behind a compressed document that the modules have read."""
    engine = Engine(made(family), name="m")
    assert engine.passes.program is not None
    assert engine.passes.program_of_documents is None
    monkeypatch.setenv("KVSHELF_KERNELS", "eager")
    plain = Engine(made(family), name="m")
    assert plain.passes.program is None
    document = [i * 7 % 130 for i in range(60)]
    cache = plain.compress(document, policy="snapkv", compression_ratio=0.5)
    asked = [(cache, question) for question in ([5, 6], [9] * 5)]
    expected = plain.answer_all(asked, max_new_tokens=3)
    monkeypatch.setenv("KVSHELF_KERNELS", "triton")
    told = engine.answer_all(asked, max_new_tokens=3)
    assert [answer.token_ids for answer in told] == [answer.token_ids for answer in expected]


@pytest.mark.slow
def test_a_kernel_that_does_not_fit_the_card_leaves_the_model_to_its_modules(monkeypatch, caplog):
    errors = pytest.importorskip("triton.runtime.errors")

    def run(*_):
        raise errors.OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(row_programs(torch.device("cpu")), "run", run)
    engine = Engine(made("llama"), name="m")
    assert engine.passes.program is None
    assert "OutOfResources: out of resource: shared memory, Required: 300000" in caplog.text
    cache = engine.compress(list(range(20)), policy="full")
    assert engine.answer(cache, [7, 8], max_new_tokens=1).usage.completion_tokens == 1


class Squared(torch.nn.Module):
    """Of operations that no list has."""

    def forward(self, x):
        return F.silu(x).cumsum(-1)


@pytest.mark.parametrize("module", few(1, [Remembering, Squared, Counting]))
def test_a_model_that_no_list_says_runs_by_its_modules(module, caplog):
    model = made("llama")
    model.base_model.layers[1].mlp.act_fn = module()
    engine = Engine(model, name="m")
    assert engine.passes.program is None
    assert "runs by its own modules" in caplog.text or module is not Counting
    assert ForwardProgram.of(made("mixtral", num_local_experts=4)) is None
    cache = engine.compress(list(range(20)), policy="full")
    assert engine.answer(cache, [7, 8], max_new_tokens=1).usage.completion_tokens == 1
