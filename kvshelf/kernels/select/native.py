"""Top-k by bisection and the copy of whole rows in C: see `native.c`.

Torch finds the k-th largest by a partial sort, and packs by an index that it makes first, 8 bytes an entry. Here a row
of scores is compared with some 20 thresholds, vector by vector in the processor's cache, and each kept key and value is
copied once. `keep_best` does all in one call: after a long prefill no code is in the processor's cache, and each of
torch's operations that it saves is 20 microseconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from kvshelf.kernels.native import compiled, pointer


def select(scores: Tensor, protected: Tensor, counts: Sequence[int]) -> Tensor:
    mask = torch.empty(scores.shape, dtype=torch.bool)
    ranks = torch.empty(scores.shape, dtype=torch.int32)
    scores, protected = scores.contiguous(), protected.contiguous()
    rows, length = scores.shape
    compiled().kvshelf_select(
        pointer(scores), pointer(protected), (ctypes.c_int64 * rows)(*counts), pointer(mask), pointer(ranks),
        ctypes.c_int64(rows), ctypes.c_int64(length), torch.get_num_threads(),
    )  # fmt: skip
    return mask


def pack(keys: Tensor, values: Tensor, mask: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    mask = mask.contiguous()
    heads, length = mask.shape
    begin = list(accumulate(counts, initial=0))
    packed = [states.new_empty(begin[-1], states.shape[2]) for states in (keys, values)]
    positions = torch.empty(begin[-1], dtype=torch.int32)
    compiled().kvshelf_pack(
        pointer(keys), pointer(values), pointer(mask), (ctypes.c_int64 * len(begin))(*begin), _strides(keys, values),
        *map(pointer, packed), pointer(positions), ctypes.c_int64(heads), ctypes.c_int64(length),
        torch.get_num_threads(),
    )  # fmt: skip
    return packed[0], packed[1], positions


def keep_best(
    keys: Tensor, values: Tensor, scores: Tensor, protected: Tensor, counts: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """None where a head keeps fewer than are protected."""
    scores, protected = scores.contiguous(), protected.contiguous()
    heads, length = scores.shape
    begin = list(accumulate(counts, initial=0))
    mask, ranks = torch.empty(heads, length, dtype=torch.uint8), torch.empty(heads, length, dtype=torch.int32)
    packed = [states.new_empty(begin[-1], states.shape[2]) for states in (keys, values)]
    positions = torch.empty(begin[-1], dtype=torch.int32)
    importance = torch.empty(begin[-1], dtype=torch.float32)
    done = compiled().kvshelf_keep_best(
        pointer(keys), pointer(values), pointer(scores), pointer(protected), (ctypes.c_int64 * heads)(*counts),
        (ctypes.c_int64 * len(begin))(*begin), _strides(keys, values), pointer(mask), pointer(ranks),
        *map(pointer, packed), pointer(positions), pointer(importance), ctypes.c_int64(heads), ctypes.c_int64(length),
        torch.get_num_threads(),
    )  # fmt: skip
    return (packed[0], packed[1], positions, importance) if done else None


def _strides(keys: Tensor, values: Tensor) -> ctypes.Array[ctypes.c_int64]:
    """Bytes from head to head, from row to row, and of a row, of keys and then of values."""
    of_both = (number for states in (keys, values) for number in (*states.stride()[:2], states.shape[2]))
    return (ctypes.c_int64 * 6)(*(number * keys.itemsize for number in of_both))
