"""Triton's selection and packing: the right entries under the interpreter, and compiled for GPUs that are not there."""

from __future__ import annotations

import math

import pytest
import torch

from kvshelf.kernels.select import keep_best, pack, select
from tests.amounts import few
from tests.kernels.compiling import Variant, require_fits
from tests.kernels.references import select as reference
from tests.kernels.tensors import random
from tests.kernels.test_select import BAD, FEW, layouts

pytestmark = pytest.mark.usefixtures("forced_triton")


def drawn(rows, tokens, values, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor(values)[torch.randint(len(values), (rows, tokens), generator=generator)]


VALUES = {"all different": None, "ties": FEW, "ties and not finite": FEW + BAD}
SIZES = [(1, 1), (2, 37), (3, 300)]


@pytest.mark.parametrize(
    ("kind", "rows", "tokens"),
    few(5, [*((kind, *size) for kind in VALUES for size in SIZES), ("ties and not finite", 1, 4500)]),
)
def test_select_equals_the_reference(kind, rows, tokens):
    values = VALUES[kind]
    scores = random(rows, tokens) if values is None else drawn(rows, tokens, values)
    protected = random(tokens, seed=1) > 1
    kept = int(protected.sum())
    counts = [(kept + tokens) // 2, kept, tokens][:rows]
    mask = select(scores, protected, counts)
    assert torch.equal(mask, reference.select(scores, protected, counts))
    if tokens < 100:
        assert torch.equal(mask, select(scores, protected, counts))


def test_select_reads_any_strides():
    scores, protected = random(50, 2).T, torch.zeros(1, dtype=torch.bool).expand(50)
    assert torch.equal(select(scores, protected, [20, 3]), reference.select(scores, protected, [20, 3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "tokens", "dim", "value_dim"), [(1, 1, 1, 1), (3, 37, 24, 7), (2, 300, 24, 40)])
def test_pack_equals_the_reference_in_every_layout(dtype, heads, tokens, dim, value_dim):
    mask = random(heads, tokens, seed=1) > 0.3
    mask[-1] = tokens == 1
    counts = mask.sum(dim=1).tolist()
    keys, values = layouts(heads, tokens, dim, dtype), layouts(heads, tokens, value_dim, dtype)
    expected = reference.pack(keys["head-major"], values["head-major"], mask, counts)
    for layout, states in keys.items():
        *packed, _ = pack(states, values[layout], mask, counts)
        for ours, theirs in zip(packed, expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs), layout


def test_keep_best_is_both():
    states, scores, protected = random(3, 37, 24), random(3, 37, seed=1), random(37, seed=2) > 1
    counts = [int(protected.sum()), 20, 37]
    mask = reference.select(scores, protected, counts)
    *packed, importance = keep_best(states, states, scores, protected, counts)
    assert all(map(torch.equal, packed, reference.pack(states, states, mask, counts)))
    assert torch.equal(importance, scores.masked_fill(protected, math.inf)[mask])


def test_pack_counts_flags_far_before_its_own():
    """More than one block of flags before the last program's span; the mask is a column of something wider."""
    mask = (torch.arange(4700 * 2) % 3 == 0).view(4700, 2).T
    states = torch.arange(4700.0).view(1, -1, 1).expand(2, -1, -1).contiguous()
    keys, _, positions, counts = pack(states, states, mask, mask.sum(dim=1).tolist())
    assert counts == mask.sum(dim=1).tolist()
    assert torch.equal(positions.long(), mask.nonzero()[:, 1])
    assert torch.equal(keys[:, 0], positions.float())


def test_nothing_to_do():
    nothing = torch.zeros(2, 5, dtype=torch.bool)
    keys, _, positions, counts = pack(random(2, 5, 4), random(2, 5, 4), nothing, [0, 0])
    assert (keys.shape, positions.shape, counts) == ((0, 4), (0,), [0, 0])
    assert not select(torch.full((1, 5), math.nan), nothing[0], [0]).any()


@pytest.mark.slow
def test_every_kernel_compiles_and_fits(compile_all):
    numbers = ("num_tokens", "row_stride", "stride", "protected_stride")
    arguments = {
        "scores": "*fp32",
        "protected": "*u8",
        "counts": "*i64",
        "mask": "*u8",
        **dict.fromkeys(numbers, "i32"),
    }
    variants = [Variant("_select", arguments, {"BLOCK": block}, warps) for block, warps in ((128, 1), (4096, 16))]
    variants += [_packing(dtype, dim) for dtype in ("bf16", "fp16", "fp32") for dim in (64, 128)]
    require_fits(compile_all("kvshelf.kernels.select.triton", variants))


def _packing(dtype: str, dim: int) -> Variant:
    strides = ("key_head_stride", "key_stride", "value_head_stride", "value_stride", "mask_head_stride", "mask_stride")
    states = dict.fromkeys(("keys", "values", "packed_keys", "packed_values"), f"*{dtype}")
    numbers = dict.fromkeys(("num_tokens", "key_dim", "value_dim", *strides), "i32")
    tile = 8 * 1024 // (dim * (4 if dtype == "fp32" else 2))
    tiles = {"SPAN": 256, "TILE": tile, "KEY_BLOCK": dim, "VALUE_BLOCK": dim}
    return Variant("_pack", {**states, "mask": "*u8", "starts": "*i64", "positions": "*i32", **numbers}, tiles)
