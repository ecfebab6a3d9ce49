"""Column sums against one fp64 softmax per row, chunk by chunk, and against two other ways to the same sums."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from kvshelf.errors import InvalidTensor
from kvshelf.kernels.column_sums import column_sums
from tests.kernels.references import column_sums as reference
from tests.kernels.tensors import LargestTensor, error, random
from tests.timing import least_s

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

FROM_BF16_LOGITS = 3e-2
"""Of sums over few rows: a logit of 4 to 8, rounded to 8 bits, is up to 2^-6 off, and so is the weight of a single
row. Over thousands of rows these errors cancel."""


def log_sum_exps(queries, keys, scale):
    """Of every row over the keys it sees, `[q_heads, R]` fp32."""
    repeated = keys.repeat_interleave(queries.shape[0] // keys.shape[0], dim=0).double()
    logits = scale * queries.double() @ repeated.mT
    first = keys.shape[1] - queries.shape[1]
    return logits.masked_fill(torch.ones_like(logits).triu(first + 1).bool(), -torch.inf).logsumexp(dim=-1).float()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "rows", "keys", "dim", "local_rows"),
    [
        (4, 2, 100, 100, 16, 0),
        (7, 1, 63, 63, 5, 8),  # odd group and head size
        (2, 2, 300, 300, 8, 7),  # more rows than a block, the boundary of the window inside one
        (8, 2, 129, 129, 24, 129),  # the window is everything
        (4, 1, 40, 513, 16, 11),  # the last rows of a longer sequence
        (4, 2, 1, 1, 16, 1),
        (2, 1, 1, 77, 16, 0),
        (200, 1, 3, 5, 4, 1),  # a group larger than a product's rows
    ],
)
def test_equals_the_reference(dtype, q_heads, kv_heads, rows, keys, dim, local_rows):
    """Inputs are rounded before either form sees them, so that the tolerance is fp32's whatever their dtype."""
    q, k = random(q_heads, rows, dim, dtype=dtype), random(kv_heads, keys, dim, dtype=dtype, seed=1)
    total, local = column_sums(q, k, 0.3, local_rows)
    expected_total, expected_local = reference.column_sums(q, k, 0.3, local_rows)
    assert total.dtype == local.dtype == torch.float32
    assert error(total, expected_total) < 2e-6
    if local_rows:
        assert error(local, expected_local) < 2e-6
    else:
        assert torch.equal(local, torch.zeros(q_heads, keys))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_sums_of_chunks_add_up(data):
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    num_tokens = sum(lengths)
    q, k = random(kv_heads * group, num_tokens, 8), random(kv_heads, num_tokens, 8, seed=1)
    whole, _ = column_sums(q, k, 0.5)
    added, end = torch.zeros_like(whole), 0
    for length in lengths:
        end += length
        total, local = column_sums(q[:, end - length : end], k[:, :end], 0.5, local_rows=length)
        assert error(local, total) < 2e-6
        added[:, :end] += total
    assert error(added, whole) < 2e-6


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 200), earlier=st.integers(0, 50), local_rows=st.integers(0, 250))
def test_every_row_gives_one(rows, earlier, local_rows):
    q, k = random(4, rows, 8) * 5, random(2, rows + earlier, 8, seed=1)
    total, local = column_sums(q, k, 1.0, local_rows)
    assert torch.allclose(total.sum(dim=1), torch.full((4,), float(rows)), rtol=1e-5)
    assert torch.allclose(local.sum(dim=1), torch.full((4,), float(min(rows, local_rows))), rtol=1e-5)
    assert (local <= total).all()


def test_no_rows_give_nothing():
    for sums in column_sums(random(4, 0, 8), random(2, 9, 8), 1.0):
        assert torch.equal(sums, torch.zeros(4, 9))


def test_large_logits_do_not_overflow():
    q, k = random(2, 50, 8) * 100, random(1, 50, 8, seed=1) * 10
    total, _ = column_sums(q, k, 1.0)
    expected, _ = reference.column_sums(q, k, 1.0)
    assert error(total, expected) < 1e-3  # logits of several thousand, of which fp32 has 5e-4


def test_sums_of_a_long_sequence_keep_growing():
    """A sink that takes all mass: a bf16 accumulator would stop at 256, fp16 logits would overflow."""
    q, k = torch.ones(1, 1500, 4, dtype=torch.bfloat16) * 8, torch.zeros(1, 1500, 4, dtype=torch.bfloat16)
    k[:, 0] = 8
    total, _ = column_sums(q, k, 1.0)
    assert float(total[0, 0]) == pytest.approx(1500)


def test_strided_input_is_not_changed():
    q, k = (random(70, 4, 16, seed=s).transpose(0, 1) for s in (1, 2))  # token-major memory, as models give it
    before = q.clone(), k.clone()
    total, _ = column_sums(q, k[:2], 0.25)
    expected, _ = column_sums(q.contiguous(), k[:2].contiguous(), 0.25)
    assert torch.equal(total, expected)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


def test_memory_is_bounded_by_a_block_of_rows():
    q, k = random(4, 1000, 8), random(2, 1000, 8, seed=1)
    with LargestTensor() as largest:
        column_sums(q, k, 1.0, local_rows=300)
    assert 0 < largest.numel <= 128 * 1000


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "rows", "keys", "dim", "local_rows"),
    [
        (4, 2, 700, 700, 16, 40),  # more keys and more rows than a tile
        (3, 1, 63, 90, 5, 0),
        (2, 1, 1, 7, 8, 1),
        (600, 1, 3, 5, 4, 1),  # a group larger than a tile's rows
    ],
)
def test_given_log_sum_exps_change_nothing(dtype, every, q_heads, kv_heads, rows, keys, dim, local_rows):
    q, k = (
        random(rows, q_heads, dim, dtype=dtype).transpose(0, 1),
        random(keys, kv_heads, dim, dtype=dtype, seed=1).transpose(0, 1),
    )
    ours = column_sums(q, k, 0.3, local_rows, every=every, lse=log_sum_exps(q, k, 0.3))
    plain = column_sums(q, k, 0.3, local_rows, every=every)
    for sums, expected in zip(ours, plain, strict=True):
        assert error(sums, expected) < (FROM_BF16_LOGITS if dtype == torch.bfloat16 else 2e-6) or not expected.any()


def test_bf16_logits_cancel_out_over_many_rows():
    q, k = random(4, 2000, 64, dtype=torch.bfloat16), random(1, 2000, 64, dtype=torch.bfloat16, seed=1)
    exact, _ = column_sums(q, k, 0.125)
    ours, _ = column_sums(q, k, 0.125, lse=log_sum_exps(q, k, 0.125))
    assert 0 < error(ours, exact) < 1e-3


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 150), earlier=st.integers(0, 30), local_rows=st.integers(0, 170), every=st.integers(1, 20))
def test_every_sums_each_nth_row_before_the_local_ones(rows, earlier, local_rows, every):
    """Rows picked one by one, each a sequence of its own that ends with it."""
    q, k = random(2, rows, 8), random(1, rows + earlier, 8, seed=1)
    total, local = column_sums(q, k, 0.5, local_rows, every=every)
    picked = torch.zeros_like(total)
    for row in range(rows - min(local_rows, rows) - 1, -1, -every):
        picked[:, : earlier + row + 1] += every * column_sums(q[:, row : row + 1], k[:, : earlier + row + 1], 0.5)[0]
    assert torch.allclose(total, picked + local, rtol=1e-5, atol=1e-6)
    assert torch.allclose(local, column_sums(q, k, 0.5, local_rows)[1], rtol=1e-5, atol=1e-6)


def test_every_eighth_row_is_an_eighth_of_the_work():
    def flops(every):
        with FlopCounterMode(display=False) as counter:
            column_sums(q, k, 1.0, every=every)
        return counter.get_total_flops()

    q, k = random(16, 1024, 8), random(1, 1024, 8, seed=1)  # 8 rows a block: little beyond the diagonal
    if flops(1):
        assert flops(8) < 1.1 * flops(1) / 8
    else:  # the compiled form's cannot be counted; of these few channels, laying out a head takes a part of its time
        q, k = random(2, 8192, 64), random(1, 8192, 64, seed=1)
        eighth_s, whole_s = (least_s(lambda every=every: column_sums(q, k, 1.0, every=every)) for every in (8, 1))
        assert eighth_s < 0.2 * whole_s


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_lse", [False, True])
def test_what_is_not_a_number_stays_none(dtype, with_lse):
    """A row whose logits are no numbers has no weights: none of its keys may look as if it had them."""
    q, k = random(2, 70, 16, dtype=dtype), random(1, 70, 16, dtype=dtype, seed=1)
    lse = log_sum_exps(q, k, 0.5) if with_lse else None
    q[0, 60, 3] = torch.nan
    total, _ = column_sums(q, k, 0.5, lse=lse)
    assert total[0, :61].isnan().all()
    assert total[1].isfinite().all()


@pytest.mark.parametrize("with_lse", [False, True])
def test_what_leaves_fp32_is_seen(with_lse):
    q, k = random(2, 70, 16), random(1, 70, 16, seed=1)
    lse = log_sum_exps(q, k, 0.5) if with_lse else None
    q[0, 60] = k[0, 7] = 1e30
    total, _ = column_sums(q, k, 0.5, lse=lse)
    assert not total[0, 7].isfinite()


@pytest.mark.parametrize("dim", [160, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_heads(dim, dtype):
    q, k = random(2, 100, dim, dtype=dtype), random(1, 100, dim, dtype=dtype, seed=1)
    assert error(column_sums(q, k, 0.1)[0], reference.column_sums(q, k, 0.1)[0]) < 2e-6


def test_a_row_whose_later_keys_are_far_above_its_first_ones():
    """Weights are taken against the first keys, until a later one would leave fp32 so."""
    q, k = torch.ones(1, 400, 1), torch.linspace(0, 200, 400).view(1, 400, 1)
    total, _ = column_sums(q, k, 1.0)
    assert error(total, reference.column_sums(q, k, 1.0)[0]) < 1e-4  # fp32 has 2e-5 of logits of 200


@pytest.mark.parametrize(
    ("q", "k", "options", "problem"),
    [
        ((4, 9, 8), (3, 9, 8), {}, "multiple of kv_heads"),
        ((4, 9, 8), (2, 8, 8), {}, "R <= N"),
        ((4, 9, 8), (2, 9, 7), {}, r"keys \[2, 9, 7\]"),
        ((4, 9, 8), (2, 9, 8), {"every": 0}, "every from 1"),
        ((4, 9, 8), (2, 9, 8), {"local_rows": -1}, "local_rows"),
        ((4, 9, 8), (2, 9, 8), {"lse": torch.zeros(4, 8)}, r"lse must be .* lse \[4, 8\] float32"),
        ((4, 9, 8), (2, 9, 8), {"lse": torch.zeros(4, 9).half()}, r"lse \[4, 9\] float16"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_shape(q, k, options, problem):
    with pytest.raises(InvalidTensor, match=problem):
        column_sums(random(*q), random(*k), 1.0, **options)
