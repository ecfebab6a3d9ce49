"""CompressKV: against its formula written out in loops, its budgets, and which calibration it takes."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.methods.policies import LayerView, build
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.compresskv import layer_counts
from kvshelf.methods.policies.view import DocumentView, Probed
from kvshelf.model import calibration as calibrations
from kvshelf.model.calibration import Calibration, Origin
from kvshelf.model.source import bundled_folder

ORIGIN = Origin(model="made up", documents=1, tokens=1, answered=1.0, compression_ratio=0.5)
TEXT = "The clerk kept a note of every parcel that came in by the night train. " * 24


def view(tokens, calibration, *, layer_idx=0, kv_heads=2, group=4, dim=8, protected=0, probe=0, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def make(heads, rows):
        return torch.randn(heads, rows, dim, generator=generator)

    queries = 2 * make(kv_heads * group, tokens)
    probes = (Probed(2 * make(kv_heads * group, probe), make(kv_heads, probe), make(kv_heads, probe)),) if probe else ()
    source = DocumentView(range(tokens), protected, calibration=calibration)
    return LayerView(
        layer_idx, make(kv_heads, tokens), make(kv_heads, tokens), queries, dim**-0.5, source, probes=probes
    )  # fmt: skip


def random_calibration(layers, heads, seed, errors=None):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(layers, heads, generator=generator).tolist()
    errors = errors or torch.softmax(2 * torch.randn(layers, generator=generator).double(), dim=0).tolist()
    return Calibration(
        weights="w", head_scores=tuple(map(tuple, scores)), layer_errors=tuple(errors), origin=ORIGIN
    )  # fmt: skip


def naive(layer, heads, window, kernel, count):
    """The one set of positions that all KV heads keep; `probe` rows first, the document's last ones fill up."""
    scores = layer.document.calibration.head_scores[layer.layer_idx]
    chosen = sorted(range(len(scores)), key=lambda head: -scores[head])[:heads]
    group = len(layer.queries) // layer.kv_heads
    probe = layer.probes[0] if layer.probes else None
    shown = min(window, probe.queries.shape[1]) if probe else 0
    tail, end = window - shown, layer.num_tokens
    total = [0.0] * (end - tail)
    for head in chosen:
        keys = layer.keys[head // group].double()
        sums = [0.0] * (end - tail)
        rows = [(layer.queries[head, i], keys[: i + 1]) for i in range(end - tail, end)]
        if probe:
            own = probe.keys[head // group].double()
            length = len(own)
            rows += [
                (probe.queries[head, i], torch.cat([keys, own[: i + 1]])) for i in range(length - shown, length)
            ]  # fmt: skip
        for query, seen in rows:
            logits = [layer.scaling * float(query.double() @ key) for key in seen]
            weights = [math.exp(logit - max(logits)) for logit in logits]
            for j in range(end - tail):
                sums[j] += weights[j] / sum(weights)
        for j in range(end - tail):
            near = range(max(0, j - kernel // 2), min(end - tail, j + kernel // 2 + 1))
            total[j] += sum(sums[k] for k in near) / kernel / len(chosen)
    always = {*range(layer.protected_prefix), *range(end - tail, end)}
    best = sorted((j for j in range(end) if j not in always), key=lambda j: (-total[j], j))
    return sorted([*always, *best[: count - len(always)]])


@pytest.mark.parametrize(("heads", "probe"), [(1, 0), (3, 0), (8, 0), (4, 3), (2, 12)])
@pytest.mark.parametrize("seed", range(3))
def test_keeps_what_the_formula_says(heads, probe, seed):
    layer = view(70, random_calibration(1, 8, seed), probe=probe, seed=seed, protected=seed)
    policy = build("compresskv", {"heads": heads, "window": 6})
    record = policy.reduce(layer, LayerBudget.uniform(2, 25))
    expected = naive(layer, heads, 6, 5, 25)
    assert [head.tolist() for head in record.positions] == [expected, expected]


def test_with_all_heads_it_is_the_mean_over_heads_of_snapkv():
    layer = view(120, random_calibration(1, 8, 0), group=4)
    ours = build("compresskv", {"heads": 8, "window": 16}).score(layer)
    theirs = build("snapkv", {"window": 16}).score(layer).mean(dim=0)
    assert torch.allclose(ours / 16, theirs.expand(2, -1), atol=1e-6)


@given(
    errors=st.lists(st.floats(0, 1), min_size=1, max_size=40).filter(lambda errors: sum(errors) > 0),
    mean=st.integers(1, 300),
    tokens=st.integers(1, 400),
)
def test_layer_budgets_add_up(errors, mean, tokens):
    shares = [error / sum(errors) for error in errors]
    mean = min(mean, tokens)
    lowest, highest = min(32, mean), min(3 * mean, tokens)
    counts = layer_counts(shares, mean * len(shares), lowest, highest)
    assert sum(counts) == mean * len(shares)
    assert all(lowest <= count <= highest for count in counts)
    wanted = [lowest + share * (mean - lowest) * len(shares) for share in shares]
    if max(wanted) <= highest:
        assert all(abs(count - want) < 1 + 1e-6 for count, want in zip(counts, wanted, strict=True))
    ranked = [count for _, count in sorted(zip(shares, counts, strict=True))]
    assert all(less <= more + 1 for less, more in itertools.pairwise(ranked))


def test_layers_get_their_budgets(tiny):
    job = tiny.prepare(TEXT, policy="compresskv", compression_ratio=0.75)
    kept = [[len(head) for head in record.positions] for record in tiny.run(job).cache.layers]
    errors = job.document.calibration.layer_errors
    budget = job.budget.tokens
    assert sum(map(sum, kept)) == budget * 2 * 4
    assert all(len(set(layer)) == 1 for layer in kept)
    for layer, error in zip(kept, errors, strict=True):
        assert abs(layer[0] - min(3 * budget, 32 + error * (budget - 32) * 4)) <= 1
    assert len({layer[0] for layer in kept}) > 1


def test_the_calibration_is_part_of_the_identity(tiny, tmp_path, monkeypatch):
    job = tiny.prepare(TEXT, policy="compresskv")
    digest = job.identity.policy_params["calibration"]
    assert digest == job.document.calibration.digest
    again = tiny.prepare(TEXT, policy="compresskv", policy_params={"calibration": digest})
    assert again.identity == job.identity
    with pytest.raises(PolicyUnsupported, match="is not this model's") as refused:
        tiny.prepare(TEXT, policy="compresskv", policy_params={"calibration": "0" * 40})
    assert refused.value.param == "policy_params.calibration"
    with pytest.raises(InvalidRequest, match="must be"):
        tiny.prepare(TEXT, policy="compresskv", policy_params={"calibration": 7})
    # One in the data folder, made anew, wins over the one beside the weights and makes other caches.
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    calibration = job.document.calibration
    other = Calibration(**(dict(calibration) | {"head_scores": tuple(reversed(calibration.head_scores))}))
    path = calibrations.data_folder() / f"{calibration.weights}.json"
    calibrations.require_writable(path)
    calibrations.save(other, path)
    changed = tiny.prepare(TEXT, policy="compresskv")
    assert changed.document.calibration == other
    assert changed.identity.content() != job.identity.content()


def test_the_digest_is_of_heads_and_layers_alone(tiny):
    """Ids of caches follow from it: what else a calibration has, and may have some day, must not change them."""
    calibration = tiny.prepare(TEXT, policy="compresskv").document.calibration
    assert calibration.digest == "88bdba12be448c693617944b62e669b43de0e5e8"
    assert calibration.key_similarities is not None
    before = calibration.model_copy(update={"key_similarities": None})
    heads = calibration.model_copy(update={"head_scores": tuple(reversed(calibration.head_scores))})
    assert (before.digest == calibration.digest, before.keys_digest == calibration.keys_digest) == (True, False)
    assert (heads.digest == calibration.digest, heads.keys_digest == calibration.keys_digest) == (False, True)


def test_heads_are_an_eighth_by_default_and_no_more_than_there_are(tiny):
    assert tiny.prepare(TEXT, policy="compresskv").policy.heads == 1  # of 4
    wide = DocumentView(range(9), calibration=random_calibration(2, 32, 0))
    assert build("compresskv", {}).fitted(wide, Budget.full(9), frozenset()).heads == 4
    assert tiny.prepare(TEXT, policy="compresskv", policy_params={"heads": 4}).policy.heads == 4
    with pytest.raises(PolicyUnsupported, match="have 4") as refused:
        tiny.prepare(TEXT, policy="compresskv", policy_params={"heads": 5})
    assert refused.value.param == "policy_params.heads"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The bundled model as a local folder, and no calibrations in the user's own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    shutil.copytree(bundled_folder("kvshelf-tiny"), tmp_path / "model")
    return tmp_path / "model"


def test_a_model_without_one_is_refused_with_the_command(folder):
    (folder / "kvshelf" / "compresskv.json").unlink()
    engine = Engine.load(str(folder), device="cpu")
    with pytest.raises(PolicyUnsupported, match=r"kvshelf calibrate --model .* --dtype float32") as refused:
        engine.prepare(TEXT, policy="compresskv")
    assert refused.value.param == "policy"
    assert engine.compress(TEXT, policy="compresskv", compression_ratio=0).num_tokens, "nothing to choose"


def test_a_model_made_in_memory_has_none_beside_it(folder, monkeypatch, llama):
    """Whatever lies in the working directory is not its own."""
    monkeypatch.chdir(folder)
    assert llama.model.config.name_or_path == ""
    with pytest.raises(PolicyUnsupported, match="there is none"):
        llama.engine.prepare(llama.ids, policy="compresskv")


def test_one_of_other_weights_is_refused(folder):
    engine = Engine.load(str(folder), device="cpu", dtype="bfloat16")
    with pytest.raises(PolicyUnsupported, match=r"of other weights .* --dtype bfloat16"):
        engine.prepare(TEXT, policy="compresskv")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda data: data.pop("layer_errors"), "layer_errors: Field required"),
        (lambda data: data.update(format="kvshelf.calibration/2"), "format"),
        (lambda data: data.update(surprise=1), "surprise"),
        (lambda data: data["layer_errors"].append(0.0), "5 layer_errors for 4 layers"),
        (lambda data: data["layer_errors"].__setitem__(1, 0.9), "not to 1"),
        (lambda data: data["layer_errors"].__setitem__(1, float("nan")), "layer_errors.1"),
        (lambda data: data["head_scores"][0].pop(), "same number of heads"),
        (lambda data: data["head_scores"][0].__setitem__(0, -1), "head_scores.0.0"),
        (lambda data: data["head_scores"][0].__setitem__(0, "1"), "head_scores.0.0"),
        (lambda data: data["head_scores"].clear(), "head_scores"),
    ],
)
def test_a_broken_file_is_refused_by_name(folder, change, named):
    path = folder / "kvshelf" / "compresskv.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(PolicyUnsupported) as refused:
        calibrations.Calibration.from_file(path)
    assert named in refused.value.message
    assert str(path) in refused.value.message


def test_a_file_that_is_no_json_or_too_large_is_refused(folder):
    path = folder / "kvshelf" / "compresskv.json"
    path.write_text("{")
    with pytest.raises(PolicyUnsupported, match="is broken"):
        calibrations.Calibration.from_file(path)
    path.write_bytes(b" " * (16 * 2**20 + 1))
    with pytest.raises(PolicyUnsupported, match="over 16777216 bytes"):
        calibrations.Calibration.from_file(path)
    with pytest.raises(PolicyUnsupported, match="cannot be read"):
        calibrations.Calibration.from_file(folder / "missing.json")


def test_a_file_in_the_place_of_another_is_read(folder):
    """Of the same size, and with the same time of change, as in packages that have none."""
    path, engine = folder / "kvshelf" / "compresskv.json", Engine.load(str(folder), device="cpu")
    first, status = engine.prepare(TEXT, policy="compresskv").identity, path.stat()
    own = calibrations.Calibration.from_file(path)
    heads = tuple(tuple(reversed(layer)) for layer in own.head_scores)
    calibrations.save(own.model_copy(update={"head_scores": heads}), path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert engine.prepare(TEXT, policy="compresskv").identity != first


def test_a_calibration_for_another_number_of_layers_cannot_slip_in(folder):
    """Same weights, other shape: the file was edited by hand."""
    path = folder / "kvshelf" / "compresskv.json"
    data = json.loads(path.read_text())
    data["head_scores"] = data["head_scores"][:2]
    data["layer_errors"] = data["key_similarities"] = [0.5, 0.5]
    path.write_text(json.dumps(data))
    engine = Engine.load(str(folder), device="cpu")
    with pytest.raises(PolicyUnsupported, match="2 layers of 4 query heads"):
        engine.prepare(TEXT, policy="compresskv")
