"""The kernels of column sums: under the interpreter against the reference, and compiled for GPUs that are not there."""

from __future__ import annotations

import pytest
import torch

from kvshelf.kernels.column_sums import column_sums
from tests.amounts import SOAK, few
from tests.kernels.compiling import Variant, require_fits
from tests.kernels.references import column_sums as reference
from tests.kernels.tensors import error, random
from tests.kernels.test_column_sums import DTYPES, log_sum_exps

MODULE = "kvshelf.kernels.column_sums.triton"


def states(q_heads, kv_heads, rows, keys, dim, dtype):
    """Token-major memory, as models give it."""
    queries = random(rows, q_heads, dim, dtype=dtype).transpose(0, 1)
    return queries, random(keys, kv_heads, dim, dtype=dtype, seed=1).transpose(0, 1)


@pytest.mark.usefixtures("forced_triton")
@pytest.mark.parametrize("dtype", DTYPES if SOAK else DTYPES[:2], ids=str)  # the tiles of fp16 are those of bf16
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "rows", "keys", "dim", "local_rows", "every"),
    few(
        3,
        [
            (2, 2, 150, 160, 16, 40, 1),  # several blocks, the boundary of the window inside one
            (2, 1, 63, 140, 24, 10, 3),  # the last rows of a longer sequence, sampled
            (2, 1, 200, 200, 5, 0, 8),  # odd head size
            (7, 1, 33, 33, 8, 33, 2),  # the window is everything
            (2, 1, 1, 150, 64, 1, 1),
            (2, 1, 1, 1, 3, 0, 4),
        ],
    ),
)
def test_equals_the_reference(dtype, q_heads, kv_heads, rows, keys, dim, local_rows, every):
    q, k = states(q_heads, kv_heads, rows, keys, dim, dtype)
    expected = reference.column_sums(q, k, 0.3, local_rows, every)
    for lse in (None, log_sum_exps(q, k, 0.3)):
        for sums, sums_expected in zip(column_sums(q, k, 0.3, local_rows, every=every, lse=lse), expected, strict=True):
            assert error(sums, sums_expected) < 2e-6 or not (sums_expected.any() or sums.any())


@pytest.mark.usefixtures("forced_triton")
def test_two_runs_are_bit_equal_and_strides_do_not_matter():
    q, k = states(2, 1, 100, 100, 16, torch.float32)
    first = column_sums(q, k, 0.5, 20, every=3)
    for queries, keys in ((q, k), (q.contiguous(), k.contiguous())):
        assert all(map(torch.equal, first, column_sums(queries, keys, 0.5, 20, every=3)))


@pytest.mark.usefixtures("forced_triton")
def test_no_rows_give_nothing():
    for sums in column_sums(random(4, 0, 8), random(2, 9, 8), 1.0):
        assert torch.equal(sums, torch.zeros(4, 9))


@pytest.mark.usefixtures("forced_triton")
def test_what_is_not_a_number_stays_visible():
    q, k = states(2, 1, 150, 150, 8, torch.float32)
    k[0, 40, 3] = torch.nan
    total, local = column_sums(q, k, 0.5, 20)
    assert bool(total[:, 40].isnan().all())
    assert bool(local.isnan().all())


def test_compiles_for_gpus_without_spilling(compile_all):
    """Llama-3.1-8B's head size and half of it; a head size is padded to the next power of two."""
    from kvshelf.kernels.column_sums.triton import tiles

    sizes = ("q_heads", "group", "num_keys", "num_rows", "num_sampled", "first_sampled", "first_local", "num_local")
    strides = ("q_head", "q_row", "k_head", "k_row", "lse_head", "lse_row")
    variants = []
    for name, dtype, dim in (
        ("bf16", torch.bfloat16, 128),
        ("fp16", torch.float16, 64),
        ("fp32", torch.float32, 64),
    ):
        tile = tiles(dim, dtype) | {"UPCAST": False, "DIM": dim}
        options = {option: tile.pop(option) for option in ("num_warps", "num_stages")}
        tensors = {"queries": f"*{name}", "keys": f"*{name}", "lse": "*fp32"}
        plain = {"scale": "fp32", **dict.fromkeys((*sizes, "every", *strides), "i32")}
        variants += [
            Variant("_row_lse", tensors | plain, tile, **options),
            Variant("_sum_columns", tensors | {"total": "*fp32", "local": "*fp32"} | plain, tile, **options),
        ]
    require_fits(compile_all(MODULE, variants))
