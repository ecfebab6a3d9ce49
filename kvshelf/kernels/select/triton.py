"""Selection and packing in one launch each: see `kvshelf.kernels.select`.

`select`: one program per row looks for the least score that is kept, two bits of its int32 image at a time, and then
writes the mask. It reads its row 19 times; a row of up to 32k tokens (128 KiB) stays in the L1 cache of its
multiprocessor, a longer one in L2. The limit is the latency of one multiprocessor and not memory: a layer has few rows.
Rejected: a histogram of 8 bits (its ballots cost more than the passes they save), several programs a row (adding their
counts takes a launch each time, or atomics), a sort of the row (it moves every score and position several times).

`pack`: one program per `_SPAN` tokens of a head counts the flags before its own and copies the entries that are set, so
that no prefix sum has to be launched first; all programs of a head read N^2 / (2 * _SPAN) flags, 2 MiB of L2 at 32k
tokens. Memory should be the limit. Share of the limit: not measured.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvshelf.kernels.select.eager import Counts, QueuedCounts, total_of
from kvshelf.kernels.tiles import image_of, least_kept
from kvshelf.kernels.transfer import upload_numbers

_SPAN = 256
_TILE_BYTES = 8 * 1024
"""Bytes of keys or values that `pack` copies at a time: 64 bytes a thread. Twice as many spill under Triton 3.6."""


def select(scores: Tensor, protected: Tensor, counts: Counts) -> Tensor:
    rows, num_tokens = scores.shape
    mask = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    numbers = counts.counts if isinstance(counts, QueuedCounts) else upload_numbers(counts, scores.device)
    block = min(4096, triton.next_power_of_2(num_tokens))
    _select[(rows,)](
        scores, protected.view(torch.uint8), numbers, mask.view(torch.uint8), num_tokens, *scores.stride(),
        protected.stride(0), BLOCK=block, num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip
    return mask


def pack(keys: Tensor, values: Tensor, mask: Tensor, counts: Counts) -> tuple[Tensor, Tensor, Tensor]:
    heads, num_tokens, key_dim = keys.shape
    value_dim, entries = values.shape[2], total_of(counts)
    packed = keys.new_empty(entries, key_dim), values.new_empty(entries, value_dim)
    positions = torch.empty(entries, dtype=torch.int32, device=keys.device)
    if entries:
        key_block, value_block = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
        tile = min(_SPAN, max(16, _TILE_BYTES // (max(key_block, value_block) * keys.element_size())))
        if isinstance(counts, QueuedCounts):
            starts = counts.counts.cumsum(0) - counts.counts
        else:
            starts = upload_numbers([0, *accumulate(counts[:-1])], keys.device)
        _pack[(triton.cdiv(num_tokens, _SPAN), heads)](
            keys, values, mask.view(torch.uint8), starts, *packed, positions, num_tokens, key_dim, value_dim,
            *keys.stride()[:2], *values.stride()[:2], *mask.stride(),
            SPAN=_SPAN, TILE=tile, KEY_BLOCK=key_block, VALUE_BLOCK=value_block, num_warps=4,
        )  # fmt: skip
    return (*packed, positions)


@triton.jit
def _images(scores, protected, tokens, num_tokens, stride, protected_stride):
    """Images of scores, -2^31 for one that must not be chosen, and the weight of each, 1."""
    inside = tokens < num_tokens
    image = image_of(tl.load(scores + tokens.to(tl.int64) * stride, mask=inside, other=0.0))
    free = inside & (tl.load(protected + tokens * protected_stride, mask=inside, other=1) == 0)
    return tl.where(free, image, -0x7FFFFFFF - 1), 1


@triton.jit
def _select(
    scores, protected, counts, mask, num_tokens, row_stride, stride, protected_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores += row * row_stride
    mask += row * num_tokens
    lanes = tl.arange(0, BLOCK)
    count = tl.load(counts + row).to(tl.int32)
    for start in range(0, num_tokens, BLOCK):
        tokens = start + lanes
        kept = tl.load(protected + tokens * protected_stride, mask=tokens < num_tokens, other=0)
        count -= tl.sum(kept.to(tl.int32), axis=0)

    least = least_kept(_images, scores, protected, num_tokens, stride, protected_stride, count, BLOCK)
    room = count
    for start in range(0, num_tokens, BLOCK):
        image, _ = _images(scores, protected, start + lanes, num_tokens, stride, protected_stride)
        room -= tl.sum((image > least).to(tl.int32), axis=0)
    for start in range(0, num_tokens, BLOCK):
        tokens = start + lanes
        image, _ = _images(scores, protected, tokens, num_tokens, stride, protected_stride)
        tied = (image == least).to(tl.int32)
        chosen = (image > least) | ((tied == 1) & (tl.cumsum(tied, axis=0) <= room))
        room -= tl.sum(tied, axis=0)
        is_protected = tl.load(protected + tokens * protected_stride, mask=tokens < num_tokens, other=0) != 0
        tl.store(mask + tokens, (chosen | is_protected).to(tl.uint8), mask=tokens < num_tokens)


@triton.jit
def _pack(
    keys, values, mask, starts, packed_keys, packed_values, positions, num_tokens, key_dim, value_dim,
    key_head_stride, key_stride, value_head_stride, value_stride, mask_head_stride, mask_stride,
    SPAN: tl.constexpr, TILE: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * SPAN
    head = tl.program_id(1).to(tl.int64)
    keys += head * key_head_stride
    values += head * value_head_stride
    mask += head * mask_head_stride
    place = tl.load(starts + head)
    lanes = tl.arange(0, 4096)
    for start in range(0, first, 4096):
        before = tl.load(mask + (start + lanes) * mask_stride, mask=start + lanes < first, other=0)
        place += tl.sum(before.to(tl.int32), axis=0)
    key_channels, value_channels = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    for start in range(0, SPAN, TILE):
        tokens = first + start + tl.arange(0, TILE)
        kept = tl.load(mask + tokens * mask_stride, mask=tokens < num_tokens, other=0).to(tl.int32)
        places = place + tl.cumsum(kept, axis=0) - 1
        place += tl.sum(kept, axis=0)
        tl.store(positions + places, tokens, mask=kept == 1)
        rows = tokens.to(tl.int64)[:, None]
        copied = (kept == 1)[:, None] & (key_channels < key_dim)[None, :]
        key = tl.load(keys + rows * key_stride + key_channels[None, :], mask=copied)
        tl.store(packed_keys + places[:, None] * key_dim + key_channels[None, :], key, mask=copied)
        copied = (kept == 1)[:, None] & (value_channels < value_dim)[None, :]
        value = tl.load(values + rows * value_stride + value_channels[None, :], mask=copied)
        tl.store(packed_values + places[:, None] * value_dim + value_channels[None, :], value, mask=copied)
