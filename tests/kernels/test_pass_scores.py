"""The scores of many passes at once, against the reference's softmax of each row of each pass."""

from __future__ import annotations

import pytest
import torch

from kvshelf.errors import InvalidTensor
from kvshelf.kernels.dispatch import implementation
from kvshelf.kernels.window_scores import eager, pass_scores, window_scores
from tests.kernels.references import window_scores as reference
from tests.kernels.tensors import error, random

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}

CASES = [  # passes, q_heads, kv_heads, rows, own, tokens, dim
    (1, 2, 1, 1, 1, 40, 16),
    (9, 4, 2, 5, 17, 300, 64),
    (40, 8, 2, 16, 16, 130, 16),  # more rows than meet the keys at once
    (3, 2, 2, 140, 150, 33, 24),  # a pass has more rows than that by itself
    (5, 4, 1, 3, 9, 0, 8),  # nothing to judge
    (0, 4, 2, 3, 9, 20, 8),  # nobody judges
]


def states(passes, q_heads, kv_heads, rows, own, tokens, dim, dtype=torch.float32):
    """Queries, keys and own keys in token-major memory, as models give them."""
    queries = random(passes, rows, q_heads, dim, dtype=dtype, seed=0).transpose(1, 2)
    own_keys = random(passes, own, kv_heads, dim, dtype=dtype, seed=1).transpose(1, 2)
    return queries, random(tokens, kv_heads, dim, dtype=dtype, seed=2).transpose(0, 1), own_keys


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(case, dtype):
    queries, keys, own_keys = states(*case, dtype=dtype)
    ours = pass_scores(queries, keys, 0.3, own_keys)
    assert ours.dtype == torch.float32
    assert ours.shape == keys.shape[:2]
    expected = reference.pass_scores(queries, keys, 0.3, own_keys)
    for scores in (ours, eager.pass_scores(queries, keys, 0.3, own_keys)):
        assert (error(scores, expected) < TOLERANCE[dtype]) if expected.any() else not scores.any()
    assert bool(expected.any()) == bool(case[0] and case[5])


def test_passes_do_not_see_each_other():
    """Each pass alone gives what `window_scores` gives; together they give the largest of these."""
    queries, keys, own_keys = states(6, 4, 2, 5, 11, 200, 32)
    alone = [window_scores(queries[i], keys, 0.3, own_keys=own_keys[i], reduce="max") for i in range(6)]
    assert error(pass_scores(queries, keys, 0.3, own_keys), torch.stack(alone).amax(dim=0)) < 2e-6
    assert max(error(pass_scores(queries[i:][:1], keys, 0.3, own_keys[i:][:1]), alone[i]) for i in range(6)) < 2e-6


def test_nan_stays_visible():
    queries, keys, own_keys = states(3, 4, 2, 5, 11, 50, 16)
    keys[1, 7] = torch.nan
    for scores in (pass_scores(queries, keys, 0.3, own_keys), eager.pass_scores(queries, keys, 0.3, own_keys)):
        assert scores[1].isnan().all()
        assert not scores[0].isnan().any()


@pytest.mark.parametrize("change", ["passes", "heads", "rows", "dim", "no rows"])
def test_other_shapes_are_refused(change):
    queries, keys, own_keys = states(3, 4, 2, 5, 11, 50, 16)
    changed = {
        "passes": (queries[:2], keys, own_keys),
        "heads": (queries[:, :3], keys, own_keys),
        "rows": (queries, keys, own_keys[:, :, :4]),
        "dim": (queries, keys, own_keys[..., :8]),
        "no rows": (queries[:, :, :0], keys, own_keys),
    }[change]
    with pytest.raises(InvalidTensor, match="pass_scores"):
        pass_scores(changed[0], changed[1], 0.3, changed[2])


def test_the_processor_s_form_is_the_native_one():
    assert implementation("window_scores", torch.device("cpu")).pass_scores is not eager.pass_scores
