"""The kernels of window scores: under the interpreter against the reference, and compiled for absent GPUs."""

from __future__ import annotations

import pytest
import torch

from kvshelf.kernels.window_scores import eager, window_attention, window_scores
from tests.amounts import SOAK, in_turn
from tests.kernels.compiling import Variant, require_fits
from tests.kernels.references import window_scores as reference
from tests.kernels.tensors import error
from tests.kernels.test_window_scores import CASES, states

MODULE = "kvshelf.kernels.window_scores.triton"
DTYPES = [torch.float32, torch.bfloat16, *([torch.float16] if SOAK else [])]
"""The tiles of fp16 are those of bf16, and it compiles below."""

SPLIT = (2, 2, 1, 1030, 1, 8, "mean", 7, "max")  # several splits, and blocks of keys that meet in the pooling


@pytest.mark.usefixtures("forced_triton")
@in_turn(
    {
        "q_heads, kv_heads, rows, tokens, own, dim, reduce, kernel, pooling": [*CASES, SPLIT],
        "dtype": DTYPES,
    }
)
def test_equals_the_reference(dtype, q_heads, kv_heads, rows, tokens, own, dim, reduce, kernel, pooling):
    queries, keys, own_keys = states(q_heads, kv_heads, rows, tokens, own, dim, dtype)
    ours = window_scores(queries, keys, 0.3, own_keys=own_keys, reduce=reduce, kernel=kernel, pooling=pooling)
    assert ours.shape == (kv_heads, tokens)
    expected = reference.window_scores(queries, keys, 0.3, own_keys, reduce, kernel, pooling)
    assert not tokens or error(ours, expected) < 2e-6


@pytest.mark.usefixtures("forced_triton")
def test_two_runs_are_bit_equal_and_strides_do_not_matter():
    queries, keys, own_keys = states(2, 1, 20, 600, 25, 16, torch.bfloat16)
    first = window_scores(queries, keys, 0.3, own_keys=own_keys, kernel=5)
    assert torch.equal(first, window_scores(queries, keys, 0.3, own_keys=own_keys, kernel=5))
    plain = (states.contiguous() for states in (queries, keys, own_keys))
    queries, keys, own_keys = plain
    assert torch.equal(first, window_scores(queries, keys, 0.3, own_keys=own_keys, kernel=5))


@pytest.mark.usefixtures("forced_triton")
@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_what_is_not_a_number_stays_visible(reduce, pooling):
    queries, keys, _ = states(2, 1, 8, 300, 0, 16, torch.float32)
    queries[1, 3, 2] = torch.nan
    assert bool(window_scores(queries, keys, 0.3, reduce=reduce, kernel=3, pooling=pooling)[:, :290].isnan().all())


@pytest.mark.usefixtures("forced_triton")
def test_weights_themselves_are_torchs():
    queries, keys, own_keys = states(2, 1, 8, 50, 9, 16, torch.float32)
    ours = window_attention(queries, keys[0], 0.3, own_keys[0])
    assert torch.equal(ours, eager.window_attention(queries, keys[0], 0.3, own_keys[0]))


def test_compiles_for_gpus_without_spilling(compile_all):
    """Llama-3.1-8B's heads, with SnapKV's 64 rows of a group of 4 and with one row; half of its head size."""
    from kvshelf.kernels.window_scores.triton import tiles

    sizes = ("num_rows", "group_rows", "num_keys", "num_own")
    strides = ("q_head", "q_row", "k_head", "k_row")
    variants = []
    for name, dtype, dim, group_rows in (
        ("bf16", torch.bfloat16, 128, 256),
        ("fp16", torch.float16, 128, 4),
        ("fp32", torch.float32, 64, 256),
    ):
        tile = tiles(dim, group_rows, dtype) | {"UPCAST": False, "DIM": dim}
        options = {option: tile.pop(option) for option in ("num_warps", "num_stages")}
        tensors = {"queries": f"*{name}", "keys": f"*{name}", "lse": "*fp32"}
        plain = {"scale": "fp32", **dict.fromkeys((*sizes, *strides), "i32")}
        split = tensors | {"own": f"*{name}"} | plain | dict.fromkeys(("split_keys", "o_head", "o_row"), "i32")
        pooling = {"SPLITS": 16, "MAXIMUM": False, "KERNEL": 5, "POOL_MAXIMUM": False}
        variants += [
            Variant("_split_lse", split, tile, **options),
            Variant(
                "_score_keys", tensors | {"scores": "*fp32", "num_splits": "i32"} | plain, tile | pooling, **options
            ),
        ]
    require_fits(compile_all(MODULE, variants))
