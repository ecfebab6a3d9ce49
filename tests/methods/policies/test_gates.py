"""Policies with trained gates: against their formulas written out in loops, what scores depend on, and which files are
taken."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.methods.policies import POLICIES, build
from kvshelf.methods.policies.budgets import LayerBudget
from kvshelf.methods.policies.gate_file import Gates, gate_path
from kvshelf.methods.policies.gates.base import gate_inputs
from kvshelf.model.source import bundled_folder
from tests.amounts import amount
from tests.conftest import save_random_model
from tests.methods.policies.gates import GATED, header, random_gates, with_gates
from tests.methods.policies.test_policies import view

TOKEN_GATES = [name for name in GATED if name != "lookaheadkv"]
SHIPPED = {name: f"{bundled_folder('kvshelf-tiny')}/kvshelf/gates/{name}.safetensors" for name in GATED}
FACTS = load_file(Path(__file__).parents[2] / "oracles" / "kvpress_gates.safetensors")
TEXT = "The clerk kept a note of every parcel that came in by the night train. " * 24


# --- formulas --------------------------------------------------------------------------------------------------------


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def naive_outputs(name, layer):
    """What a gate makes of each token, in fp64 and in loops: `[kv_heads][N]`."""
    gate = {
        part: t.double().tolist() for part, t in layer.document.gates.layer(layer.place, torch.device("cpu")).items()
    }
    rows = [
        [(x - mean) * scale for x, mean, scale in zip(row, gate["mean"], gate["scale"], strict=True)]
        for row in torch.cat(list(gate_inputs(layer))).double().tolist()
    ]

    def times(matrix, row):
        return [sum(a * b for a, b in zip(line, row, strict=True)) for line in matrix]

    if name == "attention_gate":
        queries, keys, values = ([times(gate[part], row) for row in rows] for part in ("query", "key", "value"))
        hidden = []
        for i, query in enumerate(queries):
            logits = [
                sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(len(query)) for key in keys[: i + 1]
            ]
            top = max(logits)
            weights = [math.exp(logit - top) for logit in logits]
            hidden.append(
                [
                    own + sum(w * value[c] for w, value in zip(weights, values, strict=False)) / sum(weights)
                    for c, own in enumerate(values[i])
                ]
            )
    else:
        hidden = [[x * sigmoid(x) for x in times(gate["up"], row)] for row in rows]
    of_tokens = [[a + b for a, b in zip(times(gate["down"], row), gate["bias"], strict=True)] for row in hidden]
    return [list(head) for head in zip(*of_tokens, strict=True)]


def naive_scores(name, layer):
    outputs = naive_outputs(name, layer)
    if name not in ("trimkv", "make_each_token_count"):
        return outputs
    tokens = layer.num_tokens
    return [[-(tokens - p) * math.log1p(math.exp(-x)) for p, x in enumerate(head)] for head in outputs]


@pytest.mark.parametrize("name", TOKEN_GATES)
@settings(max_examples=amount(6, 30), deadline=None)
@given(
    tokens=st.integers(2, 40), kv_heads=st.sampled_from([1, 2]), group=st.sampled_from([1, 3]), seed=st.integers(0, 99)
)
def test_scores_are_those_of_the_formula(name, tokens, kv_heads, group, seed):
    layer = with_gates(name, view(tokens, kv_heads=kv_heads, group=group, seed=seed), width=3, seed=seed)
    scores = build(name, {}).score(layer)
    assert scores.dtype == torch.float32
    expected = torch.tensor(naive_scores(name, layer), dtype=torch.float64)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-4)


def test_inputs_are_the_states_before_rope():
    layer = view(20)
    rows = torch.cat(list(gate_inputs(layer)))
    queries = layer.rope.unrotate(layer.queries, layer.positions)
    assert torch.equal(rows[7, :8], queries[0, 7])
    assert torch.equal(rows[7, 4 * 8 : 5 * 8], layer.keys_unrotated()[0, 7])
    assert torch.equal(rows[7, -8:], layer.values[1, 7])


def test_log_beta_is_one_logsigmoid():
    """In fp32 a sigmoid of 18 is 1, whose logarithm is 0: then all would fade alike, and never."""
    assert math.log(float(torch.sigmoid(torch.tensor(18.0)))) == pytest.approx(-1.5e-8, abs=2e-8)
    layer = view(30)
    for bias in (18.0, 25.0):
        scores = build("trimkv", {}).score(gate_of("trimkv", layer, bias))
        assert (scores < 0).all()
        assert (scores.diff(dim=1) > 0).all()


def gate_of(name, layer, bias):
    """The layer with gates that say `bias` of each token."""
    gated = with_gates(name, layer)
    gates = gated.document.gates
    tensors = {
        part: torch.full_like(t, bias) if "bias" in part else t * ("scale" in part) for part, t in gates.tensors.items()
    }
    return replace(gated, document=replace(gated.document, gates=Gates.of(gates.header, tensors)))


@pytest.mark.parametrize("bias", [0.0, 10.0, 18.0])
def test_gates_that_say_the_same_of_each_token_keep_the_recent_or_the_first(bias):
    """Of decay the recent ones; of importance, where all are equal, those with the smallest position."""
    for name in TOKEN_GATES:
        layer = gate_of(name, view(60), bias)
        params = {"sink": 0} | ({"recent": 0} if name == "locret" else {})
        record = build(name, params).reduce(layer, LayerBudget.uniform(2, 10))
        expected = list(range(50, 60)) if POLICIES[name].family in ("decay", "global") else list(range(10))
        assert [head.tolist() for head in record.positions] == [expected] * 2, name


# --- what scores depend on -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKEN_GATES)
def test_a_score_depends_on_no_later_token(name):
    """So a document may be cut anywhere: outputs of what was read do not change."""
    layer = view(90)
    whole = with_gates(name, layer)
    head = replace(layer, keys=layer.keys[:, :40], values=layer.values[:, :40], queries=layer.queries[:, :40])
    part = replace(head, document=replace(whole.document, token_ids=range(40)))
    gate = whole.document.gates.layer(0, layer.keys.device)
    outputs = POLICIES[name].outputs
    torch.testing.assert_close(outputs(gate, part), outputs(gate, whole)[:40], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["kvzip_gate", "locret", "trimkv", "make_each_token_count"])
def test_outputs_do_not_depend_on_how_many_tokens_are_read_at_a_time(monkeypatch, name):
    layer = with_gates(name, view(100))
    gate = layer.document.gates.layer(0, layer.keys.device)
    whole = POLICIES[name].outputs(gate, layer)
    monkeypatch.setattr("kvshelf.methods.policies.gates.base._TOKENS", 17)
    torch.testing.assert_close(POLICIES[name].outputs(gate, layer), whole, rtol=1e-5, atol=1e-5)


def test_one_budget_for_the_whole_cache(tiny):
    for name, params in (("kvzip_gate", {}), ("make_each_token_count", {"floor": 0.2})):
        cache = tiny.compress(TEXT, policy=name, compression_ratio=0.75, **params)
        lengths = [len(head) for record in cache.layers for head in record.positions]
        assert sum(lengths) == cache.identity.budget_tokens * len(lengths)
        assert len(set(lengths)) > 1
        assert min(lengths) >= int(params.get("floor", 0) * cache.identity.budget_tokens)


def test_locret_keeps_the_last_tokens():
    layer = with_gates("locret", view(200))
    record = build("locret", {"recent": 30}).reduce(layer, LayerBudget.uniform(2, 50))
    assert all(head.tolist()[-30:] == list(range(170, 200)) for head in record.positions)


def test_horizon_makes_age_count_less():
    """(T + h - p) log beta: for a horizon without end only the rates decide."""
    layer = with_gates("trimkv", view(80))
    far = build("trimkv", {"horizon": 10**7}).score(layer)
    outputs = POLICIES["trimkv"].outputs(layer.document.gates.layer(0, layer.keys.device), layer)
    assert torch.equal(far.argsort(dim=1)[:, -10:], outputs.T.argsort(dim=1)[:, -10:])


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("KVSHELF_GATES", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", GATED)
def test_the_bundled_model_has_gates(tiny, name):
    job = tiny.prepare(TEXT, policy=name)
    gates = job.document.gates
    assert gates.header.policy == name
    assert gates.header.weights == tiny.identity.weights
    assert job.identity.policy_params["gates"] == gates.digest
    given = tiny.prepare(TEXT, policy=name, policy_params={"gates": gates.digest})
    assert given.identity == job.identity


def test_the_bundled_gates_are_small():
    sizes = [Path(path).stat().st_size for path in SHIPPED.values()]
    assert sum(sizes) <= 600 * 1024


def test_gates_survive_their_file(tiny):
    made = random_gates("kvzip_gate", tiny.preparer.geometry)
    read = Gates.from_bytes(made.to_bytes())
    assert read.digest == made.digest
    assert read.header == made.header
    assert all(torch.equal(tensor, made.tensors[name]) for name, tensor in read.tensors.items())


def test_gates_trained_anew_make_another_cache(tiny):
    """Those of another revision must miss the cache of before: the digest is in the identity."""
    shipped = tiny.prepare(TEXT, policy="kvzip_gate").identity
    made = random_gates("kvzip_gate", tiny.preparer.geometry, weights=tiny.identity.weights)
    gate_path(tiny.identity.weights, "kvzip_gate").write_bytes(made.to_bytes())
    own = tiny.prepare(TEXT, policy="kvzip_gate").identity
    assert own.policy_params["gates"] == made.digest
    assert own.content() != shipped.content()
    with pytest.raises(PolicyUnsupported, match="leave them out") as refused:
        tiny.prepare(TEXT, policy="kvzip_gate", policy_params={"gates": shipped.policy_params["gates"]})
    assert refused.value.param == "policy_params.gates"


def test_a_client_names_no_path(tiny):
    with pytest.raises(PolicyUnsupported, match="are not those that are there"):
        tiny.prepare(TEXT, policy="kvzip_gate", policy_params={"gates": SHIPPED["kvzip_gate"]})
    with pytest.raises(InvalidRequest, match="has no parameter"):
        tiny.prepare(TEXT, policy="kvzip_gate", policy_params={"path": "/etc/passwd"})


@pytest.mark.parametrize("name", GATED)
def test_a_model_without_gates_is_refused_before_the_prefill(tmp_path, name):
    engine = Engine.load(str(save_random_model(tmp_path)), device="cpu")
    with pytest.raises(PolicyUnsupported, match=rf"train them with: kvshelf train-gates --model .* --family {name}"):
        engine.prepare(TEXT, policy=name)


def with_tensor(made, name, tensor):
    return Gates.of(made.header, made.tensors | {name: tensor}).to_bytes()


def hostile(kind, tiny):
    """Bytes of a gate file that must not be used."""
    own = {"weights": tiny.identity.weights}
    made = random_gates("kvzip_gate", tiny.preparer.geometry, **own)
    up = made.tensors["0.up"]
    match kind:
        case "another model":
            return random_gates("kvzip_gate", tiny.preparer.geometry).to_bytes()
        case "another policy":
            return random_gates("locret", tiny.preparer.geometry, **own).to_bytes()
        case "another family":
            return random_gates("kvzip_gate", tiny.preparer.geometry, family="decay", **own).to_bytes()
        case "another revision":
            return random_gates("kvzip_gate", tiny.preparer.geometry, revision=99, **own).to_bytes()
        case "truncated":
            return made.to_bytes()[:-7]
        case "cut in its header":
            return made.to_bytes()[:50]
        case "empty":
            return b""
        case "nan":
            return with_tensor(made, "0.up", torch.where(torch.arange(up.numel()).view_as(up) == 7, torch.nan, up))
        case "infinite":
            return with_tensor(made, "0.bias", made.tensors["0.bias"] + torch.inf)
        case "another shape":
            return with_tensor(made, "0.up", up[:, :-1].contiguous())
        case "another layer":
            return with_tensor(made, "9.up", up.clone())
        case "integers":
            return with_tensor(made, "0.up", up.int())
        case "a pickle":
            return b"\x80\x04\x95" + bytes(100)
        case "no header":
            return save({"0.up": up})
        case "a header of another kind":
            return save(dict(made.tensors), {"kvshelf": '{"format":"kvshelf.gates/2"}'})
        case "a huge width":
            about = made.header.model_dump_json().replace('"width":8', '"width":99999999999')
            return save(dict(made.tensors), {"kvshelf": about})
        case "a huge header":
            return (1 << 40).to_bytes(8, "little") + bytes(100)
    raise AssertionError(kind)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("another model", "of other weights"),
        ("another policy", "it is for policy 'locret'"),
        ("another family", "of family 'decay', not 'importance'"),
        ("another revision", "revision 99"),
        ("truncated", "no safetensors file"),
        ("cut in its header", "cut off"),
        ("empty", "only 0 bytes"),
        ("nan", "not finite"),
        ("infinite", "not finite"),
        ("another shape", "has the shape"),
        ("another layer", "it has a tensor '9.up'"),
        ("integers", "dtype"),
        ("a pickle", "cut off, or no safetensors"),
        ("no header", "no safetensors file|no gate file"),
        ("a header of another kind", "header is wrong at format"),
        ("a huge width", "header is wrong at width"),
        ("a huge header", "cut off"),
    ],
)
def test_a_bad_file_is_named_before_the_prefill(tiny, kind, said):
    path = gate_path(tiny.identity.weights, "kvzip_gate")
    path.write_bytes(hostile(kind, tiny))
    with pytest.raises(PolicyUnsupported, match=said) as refused:
        tiny.prepare(TEXT, policy="kvzip_gate")
    assert refused.value.status == 422
    assert str(path) in str(refused.value)
    assert "train another with: kvshelf train-gates" in str(refused.value)


# --- kvpress ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("across", "sink"), [("head", 0), ("cache", 4)])
def test_gates_score_and_keep_as_in_kvpress(oracle, monkeypatch, across, sink):
    """The same numbers in `KVzapPress`, which keeps the best of each head, and in `FastKVzipPress`, of all heads."""
    engine, of_layers = oracle.engine, []
    facts = {
        name.removeprefix(f"{oracle.architecture}/"): fact
        for name, fact in FACTS.items()
        if name.startswith(oracle.architecture)
    }
    tensors = {name.removeprefix("gates/"): fact for name, fact in facts.items() if name.startswith("gates/")}
    gates = Gates.of(header("kvzip_gate", weights=engine.identity.weights), tensors)
    gate_path(engine.identity.weights, "kvzip_gate").write_bytes(gates.to_bytes())
    score = POLICIES["kvzip_gate"].score

    def scored(self, layer):
        of_layers.append(score(self, layer))
        return of_layers[-1]

    monkeypatch.setattr(POLICIES["kvzip_gate"], "score", scored)
    params = {"across": across, "sink": sink}
    cache = engine.compress(oracle.ids, policy="kvzip_gate", compression_ratio=0.5, **params)
    for place, (record, scores) in enumerate(zip(cache.layers, of_layers, strict=True)):
        torch.testing.assert_close(scores, facts[f"scores/{place}"], rtol=0, atol=1e-4)
        expected = facts[f"{across}/{place}"]
        if across == "cache":  # a mask [kv_heads, N], of heads that keep different counts
            expected = [row.nonzero().flatten() for row in expected]
        for ours, theirs, of_head in zip(record.positions, expected, scores, strict=True):
            won, lost = (sorted(set(a.tolist()) - set(b.tolist())) for a, b in ((ours, theirs), (theirs, ours)))
            # Equal tokens have equal inputs in layer 0, up to rounding: kvpress leaves open which of them is kept.
            torch.testing.assert_close(of_head[won], of_head[lost], rtol=0, atol=1e-5)
            assert [oracle.ids[i] for i in won] == [oracle.ids[i] for i in lost]
            assert len(won) <= 1


def test_a_file_that_changed_is_read_again(tiny):
    path = gate_path(tiny.identity.weights, "kvzip_gate")
    digests = []
    for seed in (1, 2):
        gates = random_gates("kvzip_gate", tiny.preparer.geometry, seed=seed, weights=tiny.identity.weights)
        path.write_bytes(gates.to_bytes())
        digests.append(tiny.prepare(TEXT, policy="kvzip_gate").document.gates.digest)
    assert digests[0] != digests[1]


def test_the_header_says_what_the_gates_are_of():
    about = header("trimkv", weights="w", width=3)
    assert (about.format, about.policy, about.family, about.inputs, about.width) == (
        "kvshelf.gates/1", "trimkv", "decay", "qkv", 3,
    )  # fmt: skip


def test_gates_beside_the_weights_are_found(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(bundled_folder("kvshelf-tiny"), model)
    engine = Engine.load(str(model), device="cpu")
    assert engine.prepare(TEXT, policy="kvzip_gate").document.gates.header.policy == "kvzip_gate"
    shutil.move(model / "kvshelf" / "gates", model / "gates")  # where they lay before
    assert engine.prepare(TEXT, policy="kvzip_gate").document.gates.header.policy == "kvzip_gate"
    shutil.rmtree(model / "gates")
    with pytest.raises(PolicyUnsupported, match="there are none"):
        engine.prepare(TEXT, policy="kvzip_gate")
