"""Training of gates: what each objective learns, and that an interrupted training ends as one that was not."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
import torch

from kvshelf.engine.engine import Engine
from kvshelf.engine.soft import Soft, soft_tokens
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.methods.policies import POLICIES
from kvshelf.methods.policies.gate_file import Gates, gate_path, own_tensors
from kvshelf.samples.suite import HELD_OUT, LESSONS, lesson_case
from kvshelf.training.gates import trainer
from kvshelf.training.gates.distill import SHARE, excess, gating, kept
from kvshelf.training.gates.lessons import Lesson, answered, self_answered
from kvshelf.training.gates.lookahead import divergence
from kvshelf.training.gates.objectives import objective, trained_policy
from kvshelf.training.gates.read_document import ReadDocument
from kvshelf.training.gates.trainer import Checkpoint, Trainer, TrainingSettings, rank_correlation
from kvshelf.training.observing import observe
from tests.conftest import save_random_model
from tests.methods.policies.gates import GATED, random_gates

DISTILLED = [name for name in GATED if POLICIES[name].target == "distill"]


def lessons(engine, length=512):
    def lesson(number):
        case = lesson_case(number, 0, length, engine.text.count_tokens, questions=2)
        return Lesson(case.text, [(ask.text, ", ".join(ask.references)) for ask in case.asks])

    return lesson


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Checkpoints every two steps, of one held-out lesson."""
    monkeypatch.setattr(trainer, "CHECKPOINT_EVERY", 2)
    monkeypatch.setattr(trainer, "HELD_OUT", 1)


def training(engine, name, output, *, steps=4, width=4, seed=0):
    made = objective(POLICIES[name], engine, width)
    return Trainer(engine, made, lessons(engine), TrainingSettings(steps, 512, seed), Checkpoint(output))


@pytest.mark.slow
@pytest.mark.parametrize("name", GATED)
def test_the_loss_falls_in_twenty_steps(tiny, tmp_path, monkeypatch, name):
    monkeypatch.setattr(trainer, "CHECKPOINT_EVERY", 5)
    monkeypatch.setattr(trainer, "HELD_OUT", 1)
    monkeypatch.setattr(trainer, "_WARM_UP", 5)
    run = training(tiny, name, tmp_path / "gates.safetensors", steps=20, width=8)
    run.run(resume=False)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "gates.journal.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kvzip_gate", "trimkv"])
def test_an_interrupted_training_ends_as_one_that_was_not(tiny, tmp_path, name):
    whole = training(tiny, name, tmp_path / "whole.safetensors").run(resume=False)
    output = tmp_path / "parts.safetensors"
    interrupted = training(tiny, name, output)
    learn, calls = interrupted.objective.learn, []

    def failing(lesson):
        calls.append(lesson)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return learn(lesson)

    interrupted.objective.learn = failing
    with pytest.raises(KeyboardInterrupt):
        interrupted.run(resume=False)
    files = Checkpoint(output)
    assert files.state.is_file()
    assert not output.exists()
    assert len(files.journal.read_text().splitlines()) == 1
    resumed = training(tiny, name, output).run(resume=True)
    assert resumed.digest == whole.digest
    assert files.journal.read_text() == Checkpoint(tmp_path / "whole.safetensors").journal.read_text()
    assert not files.state.exists()
    assert Gates.from_bytes(output.read_bytes()).digest == whole.digest


def test_a_checkpoint_of_another_training_is_refused(tiny, tmp_path):
    output = tmp_path / "gates.safetensors"
    with pytest.raises(InvalidRequest, match="is not there: train without --resume"):
        training(tiny, "kvzip_gate", output).run(resume=True)
    run = training(tiny, "kvzip_gate", output, steps=2)
    run.files.state.write_bytes(b"nothing")
    with pytest.raises(InvalidRequest, match="is broken"):
        training(tiny, "kvzip_gate", output).run(resume=True)
    failing = training(tiny, "kvzip_gate", output, steps=2)
    failing._gates = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        failing.run(resume=False)
    with pytest.raises(InvalidRequest, match="of another training"):
        training(tiny, "kvzip_gate", output, steps=2, seed=1).run(resume=True)


def test_the_digest_of_a_lesson_follows_from_its_answers(tiny, tmp_path, monkeypatch):
    objective = training(tiny, "lookaheadkv", tmp_path / "gates.safetensors", steps=2).objective
    lesson = lessons(tiny)(0)
    objective.begin(lesson)
    of_own_answers = objective.learn(lesson)[1]
    monkeypatch.setattr("kvshelf.training.gates.lookahead.self_answered", answered)
    assert objective.learn(lesson)[1] != of_own_answers


def test_the_seed_decides(tiny, tmp_path):
    digests = [training(tiny, "kvzip_gate", tmp_path / f"{i}", steps=2, seed=seed).run(resume=False).digest
               for i, seed in enumerate((0, 0, 1))]  # fmt: skip
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_a_training_that_learns_no_more_stops(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "_PATIENCE", 2)
    run = training(tiny, "kvzip_gate", tmp_path / "gates.safetensors", steps=40)
    agreements = iter([0.1, 0.5, 0.4, 0.3, 0.2])
    run.objective.agreement = lambda _: next(agreements)
    gates = run.run(resume=False)
    assert len(run.files.journal.read_text().splitlines()) == 4
    assert gates.header.training.held_out == 0.5
    assert gates.header.training.steps == 4  # the gates are those of the best checkpoint


@pytest.mark.slow
def test_no_step_changes_the_model(tiny, tmp_path):
    before = {name: tensor.clone() for name, tensor in tiny.model.state_dict().items()}
    for name in GATED:
        training(tiny, name, tmp_path / f"{name}.safetensors", steps=2).run(resume=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny.model.state_dict().items())
    assert not any(parameter.grad is not None for parameter in tiny.model.parameters())


def test_lessons_are_of_other_kinds_than_those_held_out_and_than_evaluations():
    assert not set(LESSONS) & set(HELD_OUT)
    count = lambda text: len(text.split())  # noqa: E731
    cases = [lesson_case(number, seed, 300, count, questions=4).text for number in range(-4, 10) for seed in (0, 1)]
    assert len(set(cases)) == len(cases)
    assert cases == [lesson_case(n, seed, 300, count, questions=4).text for n in range(-4, 10) for seed in (0, 1)]


# --- labels ----------------------------------------------------------------------------------------------------------


def test_the_label_of_an_answer_is_its_largest_attention(tiny):
    """Against the model's own attention, read from transformers' eager function."""
    lesson = lessons(tiny)(0)
    observed = answered(tiny, lesson)
    importance = {}
    observed.observe(tiny, lambda layer: importance.__setitem__(layer.layer_idx, observed.importance(layer)))
    ids, n = list(observed.job.document.token_ids), observed.job.num_tokens
    expected = torch.zeros(4, 2, n)
    tiny.model.set_attn_implementation("eager")
    for probe, rows in zip(observed.passes, observed.answering, strict=True):
        with torch.no_grad():
            weights = tiny.model(torch.tensor([[*ids, *probe.token_ids]]), output_attentions=True).attentions
        for layer, of_layer in enumerate(weights):
            largest = of_layer[0, :, -rows:, :n].amax(dim=1).view(2, -1, n).amax(dim=1)
            expected[layer] = torch.maximum(expected[layer], largest)
    tiny.model.set_attn_implementation("sdpa")
    torch.testing.assert_close(torch.stack([importance[layer] for layer in range(4)]), expected, rtol=1e-3, atol=1e-5)


def test_learned_tokens_learn_from_what_the_model_answers(tiny):
    """The label against transformers alone: what it writes greedily, and the mean weight of the rows that write it."""
    lesson = lessons(tiny)(0)
    observed = self_answered(tiny, lesson)
    labels = objective(POLICIES["lookaheadkv"], tiny, 4).labels(observed)
    ids, n, ends = list(observed.job.document.token_ids), observed.job.num_tokens, tiny.facts.end_ids()
    of_answers = answered(tiny, lesson)
    rows = [[[] for _ in range(4)] for _ in range(4)]
    tiny.model.set_attn_implementation("eager")
    passes = zip(of_answers.passes, of_answers.answering, observed.passes, observed.answering, strict=True)
    for other, length, probe, count in passes:
        question = list(other.token_ids[: len(other.token_ids) - length + 1])  # without the answer of the lesson
        written = [*ids, *question]
        while True:
            with torch.no_grad():
                made = tiny.model(torch.tensor([written]), output_attentions=True)
            for layer, weights in enumerate(made.attentions):
                for head in range(4):
                    rows[layer][head].append(weights[0, head, -1, :n].double())
            written.append(int(made.logits[0, -1].argmax()))
            if written[-1] in ends:
                break
        assert [*ids, *probe.token_ids] == written[:-1]
        assert count == len(written) - n - len(question)
    tiny.model.set_attn_implementation("sdpa")
    for layer in range(4):
        expected = torch.stack([torch.stack(rows[layer][head]).mean(dim=0) for head in range(4)]).float()
        torch.testing.assert_close(labels[layer], expected, rtol=1e-3, atol=1e-6)


def test_an_own_answer_without_an_end_is_cut(tiny, monkeypatch):
    monkeypatch.setattr("kvshelf.training.gates.lessons.OWN_TOKENS", 1)
    lesson = lessons(tiny)(0)
    of_references, own = answered(tiny, lesson), self_answered(tiny, lesson)
    assert own.answering == (1,) * len(lesson.questions)
    for probe, other, rows in zip(own.passes, of_references.passes, of_references.answering, strict=True):
        assert probe.token_ids == other.token_ids[: len(other.token_ids) - rows + 1], "the question alone"


def test_rank_correlation_is_spearmans():
    """1 - 6 sum d^2 / (n (n^2 - 1)) where no two are equal."""
    one, other = torch.randn(50), torch.randn(50)
    places = [[sorted(tensor.tolist()).index(x) for x in tensor.tolist()] for tensor in (one, other)]
    squares = sum((a - b) ** 2 for a, b in zip(*places, strict=True))
    assert rank_correlation(one, other) == pytest.approx(1 - 6 * squares / (50 * (50**2 - 1)))


# --- gated attention -------------------------------------------------------------------------------------------------


def test_logits_behind_a_document_are_the_models(tiny):
    observed = answered(tiny, lessons(tiny)(0))
    document = observed.job.document
    with torch.no_grad():
        for probe, rows in zip(observed.passes, observed.answering, strict=True):
            made = ReadDocument.of(tiny, document.token_ids).logits(probe, rows)
            own = tiny.model(torch.tensor([[*document.token_ids, *probe.token_ids]])).logits[0, -rows:]
            torch.testing.assert_close(made, own, rtol=1e-4, atol=1e-3)


def test_what_is_left_is_beta_to_the_age():
    outputs = torch.tensor([[0.0, 2.0, -1.0]])
    for row in range(2):
        for p in range(3):
            beta = 1 / (1 + math.exp(-float(outputs[0, p])))
            assert float(kept("decay", outputs, 2)[0, row, p].exp()) == pytest.approx(beta ** (3 + row - p))


@pytest.mark.parametrize("name", DISTILLED)
def test_gates_that_keep_all_change_no_prediction(tiny, name):
    family = POLICIES[name].family
    observed = answered(tiny, lessons(tiny)(0))
    document = ReadDocument.of(tiny, observed.job.document.token_ids)
    outputs = {layer: torch.full((2, observed.job.num_tokens), 60.0) for layer in range(4)}
    with torch.no_grad():
        plain = document.logits(observed.passes[0], observed.answering[0])
        gated = document.logits(observed.passes[0], observed.answering[0], gating(family, outputs, 0))
        none = {layer: torch.full_like(of, -60.0) for layer, of in outputs.items()}
        blind = document.logits(observed.passes[0], observed.answering[0], gating(family, none, 0))
    torch.testing.assert_close(gated, plain, rtol=1e-4, atol=1e-4)
    assert (blind - plain).abs().max() > 1


def test_the_excess_is_zero_only_while_what_is_left_fits():
    tokens = 400
    few = torch.full((2, tokens), -30.0)
    few[:, : int(SHARE * tokens)] = 30.0
    many = few.clone()
    many[0, : int(SHARE * tokens) + 40] = 30.0
    assert float(excess("decay", [few, few])) == pytest.approx(0, abs=1e-6)
    assert float(excess("decay", [few, many])) == pytest.approx(40 / tokens / 4, rel=1e-3)
    fewer = few.clone()
    fewer[1, 40 : int(SHARE * tokens)] = -30.0
    both = many.clone()
    both[1] = fewer[1]
    assert float(excess("decay", [both])) > 0, "of each head by itself"
    assert float(excess("global", [both])) == pytest.approx(0, abs=1e-6), "of the whole cache"
    assert float(excess("flag", [fewer])) > 0, "flags may keep too little, too"


def test_layers_share_the_last_projection(tiny):
    made = objective(POLICIES["make_each_token_count"], tiny, 4)
    made.begin(lessons(tiny)(0))
    assert own_tensors(made.state, 0)["down"] is own_tensors(made.state, 3)["down"]
    assert own_tensors(made.state, 0)["up"] is not own_tensors(made.state, 3)["up"]


# --- which gates -----------------------------------------------------------------------------------------------------


def test_gates_are_named_by_policy_or_by_family_and_target():
    assert trained_policy("locret", None).name == "locret"
    assert trained_policy("importance", "kvzip").name == "kvzip_gate"
    assert trained_policy("importance", "answers").name == "locret"
    assert trained_policy("decay", None).name == "trimkv"
    assert trained_policy("global", "distill").name == "make_each_token_count"
    for family, target in (("snapkv", None), ("decay", "kvzip")):
        with pytest.raises(InvalidRequest, match=re.escape("kvzip_gate (importance, kvzip)")):
            trained_policy(family, target)


def test_a_random_model_gets_gates_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSHELF_GATES", str(tmp_path))
    engine = Engine.load(str(save_random_model(tmp_path / "model")), device="cpu")
    path = gate_path(engine.identity.weights, "kvzip_gate")
    made = training(engine, "kvzip_gate", path, steps=2).run(resume=False)
    cache = engine.compress("One two three. " * 40, policy="kvzip_gate", compression_ratio=0.5)
    assert cache.identity.policy_params["gates"] == made.digest


# --- learned tokens --------------------------------------------------------------------------------------------------


def layers_of(engine, gates):
    """The states of each layer in a pass with learned tokens behind a document."""
    job = engine.prepare(lessons(engine)(0).document, policy="lookaheadkv")
    job = replace(job, passes=(replace(job.passes[0], soft=gates),))
    layers = {}
    visit = lambda layer: layers.__setitem__(layer.layer_idx, layer)  # noqa: E731
    observe(engine, job, visit, job.passes)
    return layers


def changed(gates, end, factor):
    tensors = {name: t * factor if name.endswith(end) else t for name, t in gates.tensors.items()}
    return Gates.of(gates.header, tensors)


def test_learned_tokens_leave_the_document_as_it_is(tiny):
    """Bit by bit: additions are of their rows alone. And without them the model is as before."""
    gates = tiny.prepare("One two three. " * 40, policy="lookaheadkv").document.gates
    before = tiny.compress("One two three. " * 40, policy="full").to_bytes()
    none, some, more = (layers_of(tiny, changed(gates, ".b", factor)) for factor in (0, 1, 3))
    for layer, view in none.items():
        for other in (some, more):
            assert torch.equal(other[layer].keys, view.keys)
            assert torch.equal(other[layer].values, view.values)
            assert not torch.equal(other[layer].probes[0].queries, view.probes[0].queries)
    assert tiny.compress("One two three. " * 40, policy="full").to_bytes() == before


def test_learned_tokens_are_in_place_of_tokens(tiny):
    gates = tiny.prepare("One two three. " * 40, policy="lookaheadkv").document.gates
    plain, other = layers_of(tiny, gates), layers_of(tiny, changed(gates, "soft", 2))
    assert torch.equal(plain[0].keys, other[0].keys)
    assert not torch.equal(plain[0].probes[0].keys, other[0].probes[0].keys)


def test_additions_are_low_rank(tiny):
    """Of one projection, against the formula: W x + alpha / r B A x."""
    gates = random_gates("lookaheadkv", tiny.preparer.geometry, width=2)
    linear = tiny.model.model.layers[0].self_attn.q_proj
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        with soft_tokens(tiny.model, Soft(gates.tensors, slice(3, 5))):
            seen = linear.register_forward_hook(lambda _, arguments, out: calls.append((arguments[0], out)))
            tiny.model(torch.arange(5, 11)[None])
        seen.remove()
        ((x, made),) = calls
        plain = linear(x)
    a, b = (gates.tensors[f"0.self_attn.q_proj.{part}"].double() for part in "ab")
    expected = plain[0, 3:5] + (16 * (x[0, 3:5].double() @ a.T @ b.T)).float()
    torch.testing.assert_close(made[0, 3:5], expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(made[:, :3], plain[:, :3])
    assert torch.equal(made[:, 5:], plain[:, 5:])


def test_divergence_is_kl_over_the_document():
    label, weights = torch.rand(3, 40) / 50, torch.rand(3, 40) / 90
    total = 0.0
    for wanted, made in zip(label.double().tolist(), weights.double().tolist(), strict=True):
        for a, b in zip(wanted, made, strict=True):
            total += a / sum(wanted) * math.log(a / sum(wanted) / (b / sum(made))) / 3
    assert float(divergence(label, weights)) == pytest.approx(total, rel=1e-5)
    assert float(divergence(label, label * 7)) == pytest.approx(0, abs=1e-6)


def test_scores_of_learned_tokens_are_their_mean_attention(tiny):
    """SnapKV's window over 32 rows, by loops."""
    job = tiny.prepare(lessons(tiny)(0).document, policy="lookaheadkv", policy_params={"kernel": 1})
    scores, views = tiny.compressor.scores(job), layers_of(tiny, job.document.gates)
    for layer, view in views.items():
        keys = torch.cat([view.keys, view.probes[0].keys], dim=1).double()
        queries, n = view.probes[0].queries.double(), view.num_tokens
        for head in range(2):
            rows = [
                (queries[query, row] @ keys[head, : n + row + 1].T * view.scaling).softmax(dim=0)[:n]
                for query in (2 * head, 2 * head + 1)
                for row in range(32)
            ]
            expected = torch.stack(rows).mean(dim=0).float()
            torch.testing.assert_close(scores[layer][head], expected, rtol=1e-3, atol=1e-6)


def test_a_model_without_these_linear_layers_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSHELF_GATES", str(tmp_path))
    engine = Engine.load(str(save_random_model(tmp_path / "model")), device="cpu")
    made = random_gates("lookaheadkv", engine.preparer.geometry, weights=engine.identity.weights)
    gate_path(engine.identity.weights, "lookaheadkv").write_bytes(made.to_bytes())
    assert engine.prepare("One two three. " * 40, policy="lookaheadkv").passes[0].soft.digest == made.digest
    for layer in engine.model.model.layers:
        layer.mlp.fused = layer.mlp.up_proj
        del layer.mlp.up_proj
    with pytest.raises(PolicyUnsupported, match=re.escape("learned tokens add to mlp.up_proj in every layer")):
        engine.prepare("One two three. " * 40, policy="lookaheadkv")


def test_nothing_is_appended_by_learned_tokens(tiny):
    cache = tiny.compress("One two three. " * 40, policy="full")
    with pytest.raises(PolicyUnsupported, match="runs learned tokens in the same pass"):
        tiny.extend(cache, "More of it. " * 20, policy="lookaheadkv")
