"""Top-k by radix and the copy of whole rows in C: see `native.c`.

Torch looks for the k-th largest by a partial sort, and packs by an index of 8 bytes an entry that it makes first; here
a row of scores is read four times in the first-level cache, and each kept key and value is copied once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from kvshelf.kernels.native import compiled, pointer


def select(scores: Tensor, protected: Tensor, counts: Sequence[int]) -> Tensor:
    """See `kvshelf.kernels.select.select`."""
    native = compiled()
    mask = torch.empty(scores.shape, dtype=torch.bool)
    ranks = torch.empty(scores.shape, dtype=torch.int32)
    scores, protected = scores.contiguous(), protected.contiguous()
    rows, length = scores.shape
    native.kvshelf_select(
        pointer(scores), pointer(protected), (ctypes.c_int64 * rows)(*counts), pointer(mask), pointer(ranks),
        ctypes.c_int64(rows), ctypes.c_int64(length), torch.get_num_threads(),
    )  # fmt: skip
    return mask


def count(mask: Tensor) -> list[int]:
    """See `eager.count`."""
    native = compiled()
    mask = mask.contiguous()
    counts = (ctypes.c_int64 * mask.shape[0])()
    native.kvshelf_count(pointer(mask), ctypes.c_int64(mask.shape[0]), ctypes.c_int64(mask.shape[1]), counts)
    return list(counts)


def pack(keys: Tensor, values: Tensor, mask: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """See `kvshelf.kernels.select.pack`."""
    native = compiled()
    mask = mask.contiguous()
    heads, length = mask.shape
    begin = list(accumulate(counts, initial=0))
    packed = [states.new_empty(begin[-1], states.shape[2]) for states in (keys, values)]
    positions = torch.empty(begin[-1], dtype=torch.int32)
    strides = [
        number * states.itemsize for states in (keys, values) for number in (*states.stride()[:2], states.shape[2])
    ]
    native.kvshelf_pack(
        pointer(keys), pointer(values), pointer(mask), (ctypes.c_int64 * len(begin))(*begin),
        (ctypes.c_int64 * len(strides))(*strides), *map(pointer, packed), pointer(positions), ctypes.c_int64(heads),
        ctypes.c_int64(length), torch.get_num_threads(),
    )  # fmt: skip
    return packed[0], packed[1], positions
