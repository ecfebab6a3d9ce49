"""The two halves of the merge on CUDA.

`nearest_pair`: a program holds a block of tokens of one head and loops over the head's centers, as attention loops over
keys; it keeps one number and one index a token. Products of bf16 and fp16 are exact in fp32, so the lengths are divided
out afterwards, and no normalised copy is written. A small launch before computes the centers' lengths: in every
program, that would cost the main loop its registers. The matrix products should be the limit: 512 FLOPs a pair at D =
128, against 6 operations outside the tensor cores. 64 tokens and 32 centers of 128 channels take 150 registers a thread
of 4 warps and 64 KiB of shared memory, so three programs share a multiprocessor of an H100, and each byte of a center
from the L2 cache serves 64 FLOPs.

`merge_weighted`: a sort by class, then a program per class, which adds its members in order. Atomics would need no
sort, but leave the order of the sums to chance; a pass over all tokens by each class would read T * classes numbers.
The memory should be the limit: members are few (4 a class on average at most, by EMS's gamma), so a program is one warp
and takes eight at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvshelf.kernels.tiles import INTERPRETED, load_rows
from kvshelf.kernels.transfer import upload

_LENGTHS = 16
"""Centers whose lengths are computed at once."""

_MEMBERS = 8
"""Members of a class that are added at once."""


def nearest_pair(
    keys: Tensor,
    values: Tensor,
    center_keys: Tensor,
    center_values: Tensor,
    token_counts: Sequence[int],
    center_counts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    similarity = keys.new_empty(keys.shape[0], dtype=torch.float32)
    index = torch.empty(keys.shape[0], dtype=torch.int64, device=keys.device)
    if keys.shape[0] == 0:
        return similarity, index
    ends = [list(accumulate(counts, initial=0)) for counts in (token_counts, center_counts)]
    token_ends, center_ends = upload([torch.tensor(numbers, dtype=torch.int64) for numbers in ends], keys.device)
    dims = {"DIM": keys.shape[1], "BLOCK_DIM": _padded(keys.shape[1])}
    dims |= {"VALUE_DIM": values.shape[1], "BLOCK_VALUE_DIM": _padded(values.shape[1])}
    centers = center_keys, center_keys.stride(0), center_values, center_values.stride(0)
    inverse = keys.new_empty(2, max(1, center_keys.shape[0]), dtype=torch.float32)
    _inverse_lengths[(triton.cdiv(inverse.shape[1], _LENGTHS),)](
        *centers, inverse, center_keys.shape[0], BLOCK=_LENGTHS, **dims
    )
    block = _block(max(dims["BLOCK_DIM"], dims["BLOCK_VALUE_DIM"]), max(keys.itemsize, values.itemsize))
    _nearest_pair[(triton.cdiv(max(token_counts), block), len(token_counts))](
        keys, keys.stride(0), values, values.stride(0), *centers, inverse, center_keys.shape[0],
        token_ends, center_ends, similarity, index,
        BLOCK=block, CENTERS=max(16, block // 2), UPCAST=INTERPRETED, **dims, num_warps=4, num_stages=2,
    )  # fmt: skip
    return similarity, index


def _padded(dim: int) -> int:
    """Rounded up to a size that `tl.dot` accepts."""
    padded: int = triton.next_power_of_2(dim)
    return max(16, padded)


def _block(block_dim: int, itemsize: int) -> int:
    """Tokens of a block: as many as fit the registers, fewer in fp32, which has no tensor cores and takes more
    registers. 16 at least, for `tl.dot`."""
    if itemsize > 2:
        return 32 if block_dim <= 128 else 16
    return 64 if block_dim <= 128 else 32 if block_dim <= 256 else 16


@triton.jit
def _inverse_lengths(
    keys, key_stride, values, value_stride, inverse, num_rows,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """1 / length of each row of keys and of values, `[2, num_rows]` fp32."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    of_keys = _inverse(load_rows(keys, key_stride, rows, inside, DIM, BLOCK_DIM, True))
    of_values = _inverse(load_rows(values, value_stride, rows, inside, VALUE_DIM, BLOCK_VALUE_DIM, True))
    tl.store(inverse + rows, of_keys, mask=inside)
    tl.store(inverse + num_rows + rows, of_values, mask=inside)


@triton.jit
def _nearest_pair(
    keys, key_stride, values, value_stride,
    center_keys, center_key_stride, center_values, center_value_stride, inverse, num_centers,
    token_ends, center_ends, similarity, index,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr, CENTERS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    tokens = tl.load(token_ends + head) + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < tl.load(token_ends + head + 1)
    token_keys = load_rows(keys, key_stride, tokens, inside, DIM, BLOCK_DIM, UPCAST)
    token_values = load_rows(values, value_stride, tokens, inside, VALUE_DIM, BLOCK_VALUE_DIM, UPCAST)
    token_inverse = _inverse(token_keys) * _inverse(token_values)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    place = tl.full([BLOCK], -1, tl.int64)
    first_center = tl.load(center_ends + head)
    last_center = tl.load(center_ends + head + 1)
    # The grid fits the head with the most tokens, so other heads also have programs without a token.
    last_center = tl.where(tl.max(inside.to(tl.int32), axis=0) == 1, last_center, first_center)
    for start in range(first_center, last_center, CENTERS):
        centers = start + tl.arange(0, CENTERS)
        live = centers < last_center
        block_keys = load_rows(center_keys, center_key_stride, centers, live, DIM, BLOCK_DIM, UPCAST)
        block_values = load_rows(center_values, center_value_stride, centers, live, VALUE_DIM, BLOCK_VALUE_DIM, UPCAST)
        key_inverse = tl.load(inverse + centers, mask=live, other=0.0)
        value_inverse = tl.load(inverse + num_centers + centers, mask=live, other=0.0)
        along_keys = tl.dot(token_keys, tl.trans(block_keys), input_precision="ieee") * key_inverse[None, :]
        along_values = tl.dot(token_values, tl.trans(block_values), input_precision="ieee") * value_inverse[None, :]
        products = along_keys * along_values
        # NaN is held as infinity until the end, because a comparison would ignore NaN.
        products = tl.where(products == products, products, float("inf"))
        products = tl.where(live[None, :], products, float("-inf"))
        block_largest, block_place = tl.max(products, axis=1, return_indices=True)
        place = tl.where(block_largest > largest, start + block_place, place)
        largest = tl.maximum(largest, block_largest)
    # The length of the token's own vectors changes nothing about which center is nearest.
    cosines = largest * token_inverse
    cosines = tl.where(largest == float("inf"), float("nan"), cosines)
    tl.store(similarity + tokens, tl.where(place < 0, float("-inf"), cosines), mask=inside)
    tl.store(index + tokens, place, mask=inside)


@triton.jit
def _inverse(states):
    """1 / length of each row; 0 for zeros."""
    loaded = states.to(tl.float32)
    squares = tl.sum(loaded * loaded, axis=1)
    return tl.where(squares == 0, 0.0, 1.0 / tl.sqrt(tl.where(squares == 0, 1.0, squares)))


def merge_weighted(
    keys: Tensor, values: Tensor, weights: Tensor, classes: Tensor, num_classes: int
) -> tuple[Tensor, Tensor]:
    directions = keys.new_empty(num_classes, keys.shape[1], dtype=torch.float32)
    means = values.new_empty(num_classes, values.shape[1], dtype=torch.float32)
    if num_classes == 0:
        return directions, means
    # Stable, so that a class's members come in the order of the tokens.
    by_class, order = classes.sort(stable=True)
    ends = torch.searchsorted(by_class, torch.arange(num_classes + 1, device=classes.device))
    block_dim, block_value_dim = triton.next_power_of_2(keys.shape[1]), triton.next_power_of_2(values.shape[1])
    _merge_weighted[(num_classes,)](
        keys, keys.stride(0), values, values.stride(0), weights, weights.stride(0), order, ends, directions, means,
        DIM=keys.shape[1], BLOCK_DIM=block_dim, VALUE_DIM=values.shape[1], BLOCK_VALUE_DIM=block_value_dim,
        MEMBERS=_MEMBERS, num_warps=max(1, _MEMBERS * max(block_dim, block_value_dim) // 1024),
    )  # fmt: skip
    return directions, means


@triton.jit
def _merge_weighted(
    keys, key_stride, values, value_stride, weights, weight_stride, order, ends, directions, means,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
    MEMBERS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    last = tl.load(ends + row + 1)
    total = tl.zeros((), tl.float32)
    direction = tl.zeros([BLOCK_DIM], tl.float32)
    mean = tl.zeros([BLOCK_VALUE_DIM], tl.float32)
    for start in range(tl.load(ends + row), last, MEMBERS):
        places = start + tl.arange(0, MEMBERS)
        inside = places < last
        members = tl.load(order + places, mask=inside, other=0)
        weight = tl.load(weights + members * weight_stride, mask=inside, other=0.0)
        some_keys = load_rows(keys, key_stride, members, inside, DIM, BLOCK_DIM, True)
        some_values = load_rows(values, value_stride, members, inside, VALUE_DIM, BLOCK_VALUE_DIM, True)
        total += tl.sum(weight, axis=0)
        direction += tl.sum(some_keys * (weight * _inverse(some_keys))[:, None], axis=0)
        mean += tl.sum(some_values * weight[:, None], axis=0)
    total = tl.where(total == 0, 1.0, total)
    channels = tl.arange(0, BLOCK_DIM)
    tl.store(directions + row * DIM + channels, direction / total, mask=channels < DIM)
    channels = tl.arange(0, BLOCK_VALUE_DIM)
    tl.store(means + row * VALUE_DIM + channels, mean / total, mask=channels < VALUE_DIM)
