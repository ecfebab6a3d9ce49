"""`kvshelf bench heads`: what makes a head sparse, and what redundant."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from typer.testing import CliRunner

from kvshelf_bench.characterize.heads import MASS, heads, nearest_similarity, sparsity
from kvshelf_bench.cli import app
from tests.kernels.references.column_sums import column_sums


def test_a_head_whose_attention_few_tokens_receive_is_sparse():
    even = torch.ones(100)
    one = torch.full((100,), 0.01)
    one[7] = 99
    assert sparsity(torch.stack([even, one])).tolist() == pytest.approx([1 - MASS, 0.99], abs=0.011)


def test_a_token_s_nearest_is_another_one_with_key_and_value_alike():
    draw = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 700, 8, generator=draw) for _ in range(2))
    keys[1, 600], values[1, 600] = 3 * keys[1, 5], 0.5 * values[1, 5]  # as similar as can be, of other lengths
    keys[0, 9], values[0, 9] = -keys[0, 8], -values[0, 8]  # apart in both: a product of 1, and nothing in common
    found = nearest_similarity(keys, values)
    assert found[1, [5, 600]].tolist() == pytest.approx([1, 1])
    assert found[0, [8, 9]].max() < 1
    for head, token in ((0, 3), (1, 650)):  # by hand, over the boundary of a block of rows
        others = [
            max(0.0, float(F.cosine_similarity(keys[head, token], keys[head, other], dim=0)))
            * float(F.cosine_similarity(values[head, token], values[head, other], dim=0))
            for other in range(700)
            if other != token
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
