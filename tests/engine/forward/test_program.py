"""Passes by lists of instructions: the logits of the model's own modules, and the modules where that cannot be."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvshelf.engine.attention import function
from kvshelf.engine.attention.function import Attended, ForwardContext
from kvshelf.engine.decode import batch as batch_module
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.engine import Engine
from kvshelf.engine.facts import ModelFacts
from kvshelf.engine.forward.calls import AttentionCall
from kvshelf.engine.forward.passes import Passes
from kvshelf.engine.forward.program import ForwardProgram
from kvshelf.kernels.prefix_attention import attention_part
from kvshelf.kernels.rowwise import available, multiplies_bf16
from kvshelf.model.prepacking import prepack
from tests.amounts import few, in_turn

pytestmark = pytest.mark.skipif(not available(), reason="no library was compiled for this CPU")

FAMILIES = [
    "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma3_text", "phi3", "phi", "granite", "olmo2", "cohere",
    "starcoder2", "smollm3", "nemotron", "glm", "gpt_neox", "stablelm", "ernie4_5", "exaone4", "arcee",
]  # fmt: skip
SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 130, "max_position_embeddings": 512, "head_dim": 16,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def made(family: str, **more: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHAPE | more)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    with torch.no_grad():  # as trained: biases and norms are not those that a model begins with
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape) if "bias" in name else 0.1
    return model


def attend(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True, scale=call.scaling)
    return out.transpose(1, 2).contiguous()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_models_modules(family):
    model, ids, positions = made(family), torch.randint(0, 130, (1, 13)), torch.arange(13)[None] + 20
    with torch.no_grad():
        expected = model(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits
        prepack(model)
        program = ForwardProgram.of(model)
        if family == "nemotron" and Version(transformers.__version__) < Version("5.24"):
            assert program is None  # its norms are made of operations that a program does not know
            return
        assert program is not None
        logits = program.run(ids, positions, attend)
        for kept in ([12], [3, 5], list(range(13))):
            torch.testing.assert_close(logits(torch.tensor(kept)), expected[:, kept], atol=2e-6, rtol=1e-4)
        assert program.run(ids, positions, lambda *_: None) is None


needs_bf16 = pytest.mark.skipif(
    not available() or not multiplies_bf16(), reason="the processor has no AVX512-BF16, or AMX"
)


@needs_bf16
@pytest.mark.parametrize("family", few(7, FAMILIES))
def test_in_bf16_logits_are_nearer_to_those_in_fp32_than_the_models_modules_are(family):
    """They round less often. The same weights; rounding of logits, which both do, is left a little room."""
    model, ids, positions = made(family).bfloat16(), torch.randint(0, 130, (1, 13)), torch.arange(13)[None] + 20
    exact = copy.deepcopy(model).float()
    with torch.no_grad():
        own, expected = (each(input_ids=ids, position_ids=positions).logits.float() for each in (model, exact))
        prepack(model)
        program = ForwardProgram.of(model)
        if family == "nemotron" and Version(transformers.__version__) < Version("5.24"):
            assert program is None
            return
        assert program is not None
        logits = program.run(ids, positions, attend)(torch.arange(13))
    assert logits.dtype == torch.bfloat16
    error, of_modules = ((each.float() - expected).norm() for each in (logits, own))
    assert error < 1.02 * of_modules
    assert error < 0.02 * expected.norm()


class Seeing(ForwardContext):
    def after_attention(self, attended: Attended) -> None:
        """Needs nothing of a layer."""


@pytest.mark.parametrize(("family", "more"), [
    ("llama", {}), ("gemma2", {"final_logit_softcapping": 0.5, "query_pre_attn_scalar": 16}),
    ("granite", {"logits_scaling": 4.0}), ("cohere", {"logit_scale": 0.25}), ("llama4_text", {}),
])  # fmt: skip
@pytest.mark.parametrize("recorded", [False, True])
def test_logits_are_made_in_parts_as_the_model_makes_them_at_once(family, more, recorded):
    """Granite and Cohere scale them behind the head, Gemma 2 caps them, and the base of Llama 4 has the head, too."""
    model, ids, positions = made(family, **more), torch.randint(3, 120, (1, 40)), torch.arange(40)[None]
    with torch.no_grad():
        expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    if recorded:
        prepack(model)
    facts = ModelFacts(model)
    facts.recordable = recorded
    passes = Passes(facts)
    assert (passes.program is not None) == (recorded and family != "llama4_text")
    logits = passes.causal({"input_ids": ids, "position_ids": positions}, Seeing(), logits=True)
    for kept in ([39], [3, 5, 20], list(range(40))):
        torch.testing.assert_close(logits(torch.tensor(kept)), expected[:, kept], atol=1e-5, rtol=1e-4)
    assert passes.causal({"input_ids": ids, "position_ids": positions}, Seeing()) is None


class Remembering(nn.Module):
    """A layer that looks at the numbers: what it does cannot be recorded."""

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.sum()) > 0 else x * 2


def test_a_model_that_cannot_be_recorded_runs_by_its_modules(caplog):
    model = made("llama")
    prepack(model)
    model.base_model.layers[1].mlp.act_fn = Remembering()
    with caplog.at_level(logging.INFO):
        assert ForwardProgram.of(model) is None
    assert "LlamaForCausalLM runs by its own modules" in caplog.text
    engine = Engine(model)
    cache = engine.compress(list(range(100)), policy="full")
    assert engine.answer(cache, [7, 8], max_new_tokens=3).usage.completion_tokens == 3


class Counting(nn.Module):
    """A layer that does something else where there are few tokens: recorded, it would do the same for all."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x) if x.shape[1] > 4 else F.relu(x)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bf16)])
def test_a_recording_that_gives_other_logits_is_not_used(dtype, caplog):
    model, plain = made("llama").to(dtype), made("llama").to(dtype)
    prepack(model)
    for each in (model, plain):
        each.base_model.layers[1].mlp.act_fn = Counting()
    assert ForwardProgram.of(model) is not None
    engine, expected = Engine(model, name="m"), Engine(plain, name="m")
    assert engine.passes.program is None
    assert "other logits" in caplog.text
    answers = [each.answer(each.compress(list(range(60)), policy="full"), [7, 8]) for each in (engine, expected)]
    assert dtype == torch.bfloat16 or answers[0].token_ids == answers[1].token_ids


def test_models_without_packed_weights_and_experts_are_not_recorded():
    assert ForwardProgram.of(made("llama")) is None
    experts = made("mixtral", num_local_experts=4)
    prepack(experts)
    assert ForwardProgram.of(experts) is None


def test_caches_and_answers_are_those_of_the_modules():
    """A question over several steps, rows that join later, and positions behind a compressed document."""
    plain, packed = (Engine(made("qwen3"), name="m") for _ in range(2))
    prepack(packed.model)
    assert packed.passes.program is not None
    assert plain.passes.program is None
    document = [i * 7 % 130 for i in range(300)]
    ours, theirs = (engine.compress(document, policy="snapkv", compression_ratio=0.5) for engine in (packed, plain))
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        assert all(map(torch.equal, layer.positions, other.positions))
    questions = [[5, 6], [9] * 40, list(range(30))]
    asked = [(ours, question) for question in questions]
    told, expected = (engine.answer_all(asked, max_new_tokens=6) for engine in (packed, plain))
    assert [answer.token_ids for answer in told] == [answer.token_ids for answer in expected]


@pytest.mark.parametrize(
    ("policy", "computed"),
    few(3, [("full", 2), ("lagkv", 2), ("snapkv", 2), ("h2o", 3), ("ems", 3), ("d2o", 3), ("cam", 3)]),
)
def test_the_last_of_three_attentions_is_computed_where_a_policy_reads_its_log_sum_exps(policy, computed, monkeypatch):
    calls, compute = [], function._causal
    monkeypatch.setattr(function, "_causal", lambda *given: calls.append(1) or compute(*given))
    engine = Engine(made("llama"), name="m")
    prepack(engine.model)
    assert engine.passes.program is not None
    removed = {} if policy == "full" else {"compression_ratio": 0.5}
    for _ in range(2):  # the first one looks at the model, too
        calls.clear()
        engine.compress([i * 7 % 130 for i in range(100)], policy=policy, **removed)
    assert len(calls) == computed


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bf16)])
def test_the_answer_of_a_row_has_no_neighbours(dtype):
    """Bit for bit: drawn tokens would differ by the last bit of a logit."""
    engine = Engine(made("llama").to(dtype), name="m")
    prepack(engine.model)
    assert engine.passes.program is not None
    cache = engine.compress(list(range(120)), policy="full")
    batch = engine.batch()
    alone, first = engine.start(cache, [3, 4], Sampling(8)), engine.start(cache, [3, 4], Sampling(8))
    while not alone.finished:
        batch.step([alone])
    others = [engine.start(cache, [i, i + 1, i + 2], Sampling(8)) for i in range(6)]
    while not first.finished:
        batch.step([first, *(g for g in others if not g.finished)])
    assert first.token_ids == alone.token_ids


@pytest.fixture
def engines():
    """The same model by its modules and by its program."""
    plain, packed = (Engine(made("llama"), name="m") for _ in range(2))
    prepack(packed.model)
    return plain, packed


DOCUMENTS = (
    {"policy": "full"},
    {"policy": "keydiff", "compression_ratio": 0.5},
    {"policy": "ada", "base": "keydiff", "compression_ratio": 0.5},  # heads of different lengths
    {"policy": "ems", "compression_ratio": 0.5},  # slots, which C does not read
)


@in_turn({"threads": [1, 2], "kinds": [DOCUMENTS[:3], DOCUMENTS]})
def test_answers_of_batches_that_take_turns_are_those_that_modules_give(engines, kinds, threads):
    """Rows begin and end at any step, outgrow their memory, and another batch has the program's memory in between."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        told = [_answers_in_turns(engine, kinds) for engine in engines]
    finally:
        torch.set_num_threads(before)
    assert told[0] == told[1]


def _answers_in_turns(engine: Engine, kinds: tuple[dict[str, object], ...]) -> list[list[int]]:
    ids = [i * 11 % 130 for i in range(400)]
    caches = [engine.compress(ids[i * 40 : i * 40 + 150], **kind) for i, kind in enumerate(kinds)]
    batches = [engine.batch(), engine.batch()]
    asked = [
        engine.start(caches[i % len(caches)], ids[i * 9 : i * 9 + 1 + i * 17 % 60], Sampling(3 + i * 7 % 40))
        for i in range(12)
    ]
    for step in range(80):
        for batch, own in zip(batches, (asked[::2], asked[1::2]), strict=True):
            open_ones = [g for i, g in enumerate(own) if not g.finished and step >= 2 * i and (step + i) % 7]
            if open_ones:
                batch.step(open_ones)
            for generation in own:
                if generation.finished and generation.row.slab is not None:
                    batch.leave(generation)
    assert all(generation.finished for generation in asked)
    return [generation.token_ids for generation in asked]


def test_a_step_that_only_goes_on_plans_nothing_anew(engines, monkeypatch):
    planned = []
    monkeypatch.setattr(batch_module, "attention_part", lambda *given: planned.append(given) or attention_part(*given))
    engine = engines[1]
    cache, batch = engine.compress(list(range(120)), policy="full"), engine.batch()
    first, second = (engine.start(cache, [3, 4 + i], Sampling(40)) for i in range(2))
    batch.step([first])
    batch.step([first])
    del planned[:]
    for _ in range(5):
        batch.step([first])
    assert planned == []
    batch.step([first, second])
    assert len(planned) == 3  # a layer each


def test_the_checkpoint_of_a_long_question_is_called_after_every_layer(engines):
    engine, seen = engines[1], []
    cache, batch = engine.compress(list(range(120)), policy="full"), engine.batch()
    batch.step([engine.start(cache, list(range(110)), Sampling(4))], lambda: seen.append(0))
    assert len(seen) == 3
    batch.step([engine.start(cache, [1, 2, 3], Sampling(4))], lambda: seen.append(1))
    assert seen[3:] == [1]


def test_a_step_that_its_checkpoint_ends_leaves_every_answer_as_it_was(engines):
    class Left(Exception):
        pass

    def leave() -> None:
        raise Left

    engine = engines[1]
    cache = engine.compress(list(range(120)), policy="full")
    expected = engine.answer(cache, [5, 6, 7], max_new_tokens=8).token_ids
    batch, generation = engine.batch(), engine.start(cache, [5, 6, 7], Sampling(8))
    while not generation.finished:
        with pytest.raises(Left):
            batch.step([generation], leave)
        batch.step([generation])
    assert generation.token_ids == expected
