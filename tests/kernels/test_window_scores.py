"""Window scores against one naive softmax per row, reduced and pooled one token at a time."""

from __future__ import annotations

import pytest
import torch

from kvshelf.errors import InvalidTensor
from kvshelf.kernels.window_scores import window_attention, window_scores
from tests.amounts import pairwise
from tests.kernels.references import window_scores as reference
from tests.kernels.tensors import LargestTensor, error, random

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}

CASES = [  # q_heads, kv_heads, rows, tokens, own, dim, reduce, kernel, pooling
    (4, 2, 8, 300, 0, 16, "mean", 1, "avg"),
    (4, 1, 17, 200, 30, 24, "max", 5, "avg"),
    (2, 2, 1, 130, 1, 8, "mean", 7, "max"),
    (7, 1, 33, 33, 0, 5, "mean", 5, "max"),  # the window is the document
    (8, 2, 64, 150, 64, 16, "mean", 5, "avg"),  # more rows than meet the keys at once
    (2, 1, 1, 1, 0, 3, "max", 1, "avg"),
    (2, 1, 3, 40, 9, 8, "max", 41, "max"),  # pooling wider than the document
    (2, 2, 5, 0, 7, 8, "mean", 3, "avg"),  # nothing to judge
]


def states(q_heads, kv_heads, rows, tokens, own, dim, dtype):
    """Queries, keys and own keys in token-major memory, as models give them."""
    queries, keys, own_keys = (
        random(length, heads, dim, dtype=dtype, seed=seed).transpose(0, 1)
        for seed, (length, heads) in enumerate(((rows, q_heads), (tokens, kv_heads), (own, kv_heads)))
    )
    return queries, keys, own_keys if own else None


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("q_heads", "kv_heads", "rows", "tokens", "own", "dim", "reduce", "kernel", "pooling"), CASES)
def test_equals_the_reference(dtype, q_heads, kv_heads, rows, tokens, own, dim, reduce, kernel, pooling):
    queries, keys, own_keys = states(q_heads, kv_heads, rows, tokens, own, dim, dtype)
    ours = window_scores(queries, keys, 0.3, own_keys=own_keys, reduce=reduce, kernel=kernel, pooling=pooling)
    assert ours.dtype == torch.float32
    assert ours.shape == (kv_heads, tokens)
    expected = reference.window_scores(queries, keys, 0.3, own_keys, reduce, kernel, pooling)
    assert not tokens or error(ours, expected) < TOLERANCE[dtype]


@pairwise(
    {
        "threads": [1, 2],
        "dtype": TOLERANCE,
        "dim": [16, 64, 80, 128, 272],
        "group, rows, tokens, own": [(1, 1, 1, 0), (3, 1, 511, 1), (4, 2, 513, 2), (2, 4, 1100, 9)],
    },
    indirect=["threads"],
)
@pytest.mark.usefixtures("threads")
def test_few_rows_equal_the_reference(dtype, dim, group, rows, tokens, own):
    """The last token of a document, or a few, before as many keys as blocks hold, and more; wide heads are torch's."""
    queries, keys, own_keys = states(2 * group, 2, rows, tokens, own, dim, dtype)
    for layout in (keys, keys.contiguous()):
        ours = window_scores(queries, layout, dim**-0.5, own_keys=own_keys)
        assert error(ours, reference.window_scores(queries, keys, dim**-0.5, own_keys)) < TOLERANCE[dtype]


def test_rows_of_the_document_see_its_end_as_own_keys():
    """The same rows in both forms: the document's last ones, and those behind a document that ends before them."""
    queries, keys, _ = states(4, 2, 8, 100, 0, 16, torch.float32)
    whole = window_scores(queries, keys, 0.3)
    judged = window_scores(queries, keys[:, :92], 0.3, own_keys=keys[:, 92:])
    assert error(judged, whole[:, :92]) < 1e-6


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_is_the_weights_reduced(reduce):
    queries, keys, own_keys = states(6, 2, 9, 70, 12, 16, torch.float32)
    ours = window_scores(queries, keys, 0.3, own_keys=own_keys, reduce=reduce)
    for head in range(2):
        weights = window_attention(queries[3 * head : 3 * head + 3], keys[head], 0.3, own_keys[head]).flatten(0, 1)
        expected = weights.amax(dim=0) if reduce == "max" else weights.mean(dim=0)
        assert error(ours[head], expected) < 1e-6


def test_memory_is_bounded_by_a_block_of_rows():
    queries, keys, own_keys = states(8, 1, 64, 1000, 64, 16, torch.float32)
    with LargestTensor() as largest:
        window_scores(queries, keys, 0.3, own_keys=own_keys)
    assert 0 < largest.numel <= 2 * 128 * 1064  # logits and weights


@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("row", [0, 70, 127])
def test_what_is_not_a_number_stays_visible(reduce, row):
    """Whichever rows come before or after it: a largest weight that passes over NaN would hide it."""
    queries, keys, _ = states(2, 1, 128, 300, 0, 16, torch.float32)
    queries = queries.clone()
    queries[1, row, 3] = torch.nan
    scores = window_scores(queries, keys, 0.3, reduce=reduce)
    assert scores[0, : 300 - 128 + row + 1].isnan().all()


def test_threads_share_the_rows():
    queries, keys, own_keys = states(4, 2, 33, 200, 40, 16, torch.float32)
    scores = {}
    threads = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        scores[count] = [window_scores(queries, keys, 0.3, own_keys=own_keys, reduce=r) for r in ("mean", "max")]
    torch.set_num_threads(threads)
    assert error(scores[3][0], scores[1][0]) < 1e-6
    assert torch.equal(scores[3][1], scores[1][1])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"keys": (3, 50, 8)}, "multiple of kv_heads"),
        ({"own_keys": (2, 3, 8)}, "no more rows than own_keys"),
        ({"keys": (2, 3, 8)}, "no more rows than"),
        ({"keys": (2, 50, 7)}, r"one head size.*keys \[2, 50, 7\]"),
        ({"queries": (4, 0, 8)}, "R from 1"),
        ({"kernel": 4}, "given 4"),
        ({"reduce": "sum"}, "given sum"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_shape(changes, problem):
    arguments = {"queries": (4, 5, 8), "keys": (2, 50, 8)} | changes
    arguments = {name: random(*value) if isinstance(value, tuple) else value for name, value in arguments.items()}
    with pytest.raises(InvalidTensor, match=problem):
        window_scores(arguments.pop("queries"), arguments.pop("keys"), 0.3, **arguments)
