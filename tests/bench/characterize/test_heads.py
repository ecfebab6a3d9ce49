"""`kvshelf bench heads`: what makes a head sparse, and what redundant."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from typer.testing import CliRunner

from kvshelf.engine.attention.function import Attended
from kvshelf_bench.characterize.heads import MASS, TAU, WINDOW, HeadStatistics, heads, nearest_similarity, sparsity
from kvshelf_bench.cli import app
from tests.kernels.references.column_sums import column_sums


def test_a_head_whose_attention_few_tokens_receive_is_sparse():
    even = torch.ones(100)
    one = torch.full((100,), 0.01)
    one[7] = 99
    assert sparsity(torch.stack([even, one])).tolist() == pytest.approx([1 - MASS, 0.99], abs=0.011)


def test_a_token_s_nearest_is_an_earlier_one_with_key_and_value_alike():
    draw = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 700, 8, generator=draw) for _ in range(2))
    keys[1, 600], values[1, 600] = 3 * keys[1, 5], 0.5 * values[1, 5]  # as similar as can be, of other lengths
    keys[0, 9], values[0, 9] = -keys[0, 8], -values[0, 8]  # apart in both: a product of 1, and nothing in common
    found = nearest_similarity(keys, values)
    assert found[1, 600].item() == pytest.approx(1)
    assert found[1, 5] < 1, "the one like it comes later"
    assert found[:, 0].tolist() == [0, 0]
    assert found[0, [8, 9]].max() < 1
    for head, token in ((0, 3), (1, 650)):  # by hand, over the boundary of a block of rows
        others = [
            max(0.0, float(F.cosine_similarity(keys[head, token], keys[head, other], dim=0)))
            * float(F.cosine_similarity(values[head, token], values[head, other], dim=0))
            for other in range(token)
        ]
        assert found[head, token] == pytest.approx(max(others), abs=1e-5)


def test_heads_of_a_model_are_means_over_documents(tiny):
    one, two = ([5 + (seed + 7 * i) % 400 for i in range(80)] for seed in (1, 2))
    alone, other, both = (heads(tiny, documents) for documents in ([one], [two], [one, two]))
    assert [(head.layer, head.kv_head) for head in both] == [(layer, head) for layer in range(4) for head in range(2)]
    for first, second, mean in zip(alone, other, both, strict=True):
        for name in ("sparsity", "redundancy", "mergeable"):
            each = [getattr(head, name) for head in (first, second, mean)]
            assert each[2] == pytest.approx((each[0] + each[1]) / 2)
            assert 0 <= each[2] <= 1


@pytest.mark.parametrize("group", [1, 4, 7])
def test_the_statistics_are_equations_3_and_4_in_loops(group):
    draw = torch.Generator().manual_seed(group)
    queries = torch.randn(2 * group, 50, 8, generator=draw)
    keys, values = (torch.randn(2, 50, 8, generator=draw) + 0.7 for _ in range(2))
    statistics = HeadStatistics()
    states = (part.unsqueeze(0) for part in (queries, keys, values))
    statistics.after_attention(Attended(SimpleNamespace(layer_idx=0), *states, scaling=1.0))
    for head in range(2):
        scores = torch.zeros(50).double()
        for query in queries[head * group : (head + 1) * group].double():
            rows = torch.zeros(50, 50).double()
            for i in range(50):
                rows[i, : i + 1] = (keys[head, : i + 1].double() @ query[i]).softmax(dim=0)
            everywhere, local = rows.sum(dim=0), rows[-WINDOW:].sum(dim=0)
            scores += torch.maximum(everywhere * local.sum() / everywhere.sum(), local) / group
        ranked, needed, mass = sorted(scores.tolist(), reverse=True), 0, 0.0
        while mass < MASS * sum(ranked):
            mass, needed = mass + ranked[needed], needed + 1
        redundant = 0
        for k in range(50):
            cosines = [
                float(F.cosine_similarity(keys[head, k], keys[head, j], dim=0).clamp_min(0))
                * float(F.cosine_similarity(values[head, k], values[head, j], dim=0))
                for j in range(k)
            ]
            redundant += max(cosines, default=0.0) >= TAU
        sparse, _, mergeable = statistics.of_layers[0][:, head].tolist()
        assert sparse == pytest.approx(1 - needed / 50)
        assert mergeable == pytest.approx(redundant / 50)
        assert 0 < redundant < 50


def test_sparsity_is_of_the_attention_of_all_rows():
    """A sink that every row looks at, beside even attention: the first token receives nearly everything."""
    keys = torch.zeros(1, 40, 4)
    keys[0, 0, 0] = 50
    queries = torch.zeros(2, 40, 4)
    queries[:, :, 0] = 1
    sums, _ = column_sums(queries, keys, 1.0, 0)
    assert sparsity(sums.mean(dim=0, keepdim=True)).item() == pytest.approx(39 / 40)


def test_command(tmp_path):
    report = tmp_path / "report.json"
    arguments = ["heads", "--documents", "1", "--tokens", "64", "--model", "random:1", "--output", str(report)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert [(head["layer"], head["kv_head"]) for head in json.loads(report.read_text())["heads"]] == [(0, 0), (0, 1)]
