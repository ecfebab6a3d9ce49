"""Entropy coding of integers by asymmetric numeral systems (Duda, arXiv 1311.2540): runs of rows, channel by channel.

Each run is a stream of its own, so that runs are decoded side by side. A long run has entries, the states of the
decoder before each 32 channels but the first, so that its channels are decoded side by side, too. All integers are
little-endian:

    u32                 bytes of the escapes; the highest bit says that there are entries
    u32[ceil(C / 32)]   a bit for each channel, the least significant first: whether it has any number but zero
    entries             for each of these words but the first: the decoder's state (u64), the words of the coder and
                        the bytes of escapes that lie before what its channels read (u32 each)
    bytes               escapes: numbers outside a channel's table, zigzag LEB128, in the order of the symbols; zeros
                        up to the next multiple of 4
    u32[...]            the words of `constriction.stream.stack.AnsCoder`, for the channels that are not all zero, one
                        after the other

Between a stream and its numbers there are only integers: every machine decodes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.ans import eager
from kvshelf.kernels.ans.tables import BITS, ENTRY_ROWS, ESCAPE, Ints, Runs, Tables
from kvshelf.kernels.checks import require
from kvshelf.kernels.dispatch import implementation
from kvshelf.kernels.rates import CPU

__all__ = [
    "BITS",
    "ENTRY_ROWS",
    "ESCAPE",
    "Runs",
    "Tables",
    "can_encode",
    "decode",
    "encode",
    "require_encoder",
    "side_by_side",
]


def can_encode() -> bool:
    """Whether the encoding library is installed. It has no build for ARM under Linux, where C decodes caches."""
    return find_spec("constriction") is not None


def require_encoder() -> None:
    """Raises `PolicyUnsupported` unless `can_encode`."""
    if not can_encode():
        raise PolicyUnsupported(
            "codec klt is written by the library constriction, which is not installed here (it has no build for ARM "
            "under Linux); use int4",
            param="codec",
        )


def encode(numbers: Ints, tables: Tables, order: Sequence[int], *, entry_rows: int = ENTRY_ROWS) -> bytes:
    """One run. numbers: `[C, rows]` int32. order: the table of each channel. entry_rows: a run has entries from this
    many rows on."""
    assert numbers.shape[0] == len(order)
    divided = numbers.shape[1] >= entry_rows and len(order) > 32
    return eager.encode(np.ascontiguousarray(numbers, np.int32), tables, order, divided=divided)


def side_by_side(device: torch.device) -> bool:
    """Whether this device decodes many streams together. For other devices the CPU decodes a few at a time."""
    return hasattr(implementation("ans", device), "decode_all")


def decode(arrays: Sequence[Runs], tables: Tables, device: torch.device = CPU) -> list[tuple[Tensor, list[bool]]]:
    """The numbers of each array's runs, one run after the other, and whether each run is sound: as `encode` writes it.

    Returns for each array `[C, rows of all its runs]` fp32 on the device; the numbers of an unsound run mean nothing.
    Whatever the bytes are, nothing beyond them is read, and no more memory taken than the result has. Waits for the
    device.

    Bytes: the streams once, 4 a number written. A symbol takes one look-up and one product, each waiting for the one
    before. So a CPU decodes runs four at a time, and CUDA decodes all parts of all runs in one launch.
    """
    for array in arrays:
        require(
            array.data.dtype == torch.uint8
            and array.data.dim() == 1
            and array.data.is_contiguous()
            and array.data.device.type == "cpu"
            and sum(array.sizes) == array.data.shape[0]
            and len(array.sizes) == len(array.rows)
            and all(size >= 0 and size % 4 == 0 for size in array.sizes)
            and all(0 <= table < len(tables.frequencies) for table in array.order),
            "ans",
            "data must be [bytes] uint8 of runs of these sizes",
            data=array.data,
        )
    form = implementation("ans", device)
    if side_by_side(device):
        decoded: list[tuple[Tensor, list[bool]]] = form.decode_all(arrays, tables, device)
        return decoded
    return [form.decode(array, tables) for array in arrays]
