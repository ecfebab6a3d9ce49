"""The scores of a policy: those by which it keeps."""

from __future__ import annotations

import pytest
import torch

from kvshelf.errors import InvalidRequest
from kvshelf.methods.policies import POLICIES
from kvshelf.samples.tasks import make_document

SCORING = [name for name, policy in POLICIES.items() if policy.build({}, POLICIES).scorer is not None]


@pytest.fixture(scope="module")
def prose(tiny):
    return make_document("multikey", "prose", 500, 3, tiny.text.count_tokens).text


@pytest.mark.parametrize("policy", SCORING)
def test_what_is_kept_has_the_largest_scores(tiny, prose, policy):
    job = tiny.prepare(prose, policy=policy, compression_ratio=0.5)
    scores = tiny.compressor.scores(job)
    assert len(scores) == tiny.model.config.num_hidden_layers
    for layer, record in zip(scores, tiny.run(job).cache.layers, strict=True):
        assert layer.dtype == torch.float32
        heads = record.kv_heads
        assert layer.shape == (heads, job.num_tokens)
        for head, positions in enumerate(record.positions):
            kept = torch.zeros(job.num_tokens, dtype=torch.bool)
            kept[positions.long()] = True
            importance = record.importance[record.offsets[head] : record.offsets[head + 1]]
            free = importance.isfinite()
            assert torch.equal(layer[head, positions.long()][free], importance[free])
            if free.any() and not kept.all() and policy not in ("sablock", "fair"):  # whole blocks; a share of sections
                assert importance[free].min() >= layer[head, ~kept].max()


@pytest.mark.parametrize(("policy", "params"), [("full", {}), ("lagkv", {"prefill": "chunked"})])
def test_a_policy_without_scores_is_refused(tiny, prose, policy, params):
    with pytest.raises(InvalidRequest, match="gives no scores"):
        tiny.compressor.scores(tiny.prepare(prose, policy=policy, policy_params=params))
