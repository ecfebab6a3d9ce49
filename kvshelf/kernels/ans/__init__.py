"""Entropy coding of integers by asymmetric numeral systems (Duda, arXiv 1311.2540): runs of rows, channel by channel.

A run is a stream of its own, so that runs are decoded side by side. All integers are little-endian:

    u32                 bytes of the escapes
    u32[ceil(C / 32)]   a bit for each channel, the least significant first: whether it has any number but zero
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
from kvshelf.kernels.ans.tables import BITS, ESCAPE, Ints, Tables
from kvshelf.kernels.checks import require
from kvshelf.kernels.dispatch import implementation

__all__ = ["BITS", "ESCAPE", "Tables", "can_encode", "decode", "encode", "require_encoder"]


def can_encode() -> bool:
    """Whether the library that encodes is here. It has no build for ARM under Linux, where caches are read by C."""
    return find_spec("constriction") is not None


def require_encoder() -> None:
    """Raises `PolicyUnsupported` where `can_encode` is not so."""
    if not can_encode():
        raise PolicyUnsupported(
            "codec klt is written by the library constriction, which is not installed here (it has no build for ARM "
            "under Linux); use int4",
            param="codec",
        )


def encode(numbers: Ints, tables: Tables, order: Sequence[int]) -> bytes:
    """One run. numbers: `[C, rows]` int32; order: the table of each channel."""
    assert numbers.shape[0] == len(order)
    return eager.encode(np.ascontiguousarray(numbers, np.int32), tables, order)


def decode(
    data: Tensor, sizes: Sequence[int], rows: Sequence[int], tables: Tables, order: Sequence[int]
) -> tuple[Tensor, list[bool]]:
    """The numbers of several runs, one after the other, and which runs are what `encode` writes.

    data: `[bytes]` uint8 on the CPU, the runs; sizes: bytes of each, multiples of 4; rows: of each. Returns `[C, rows
    of all runs]` fp32, where only the runs that are sound mean anything. Whatever the bytes are, nothing beyond them is
    read, and no more memory taken than the result has.

    Bytes: the streams once, 4 a number written. A symbol takes one look-up and one product, each waiting for the one
    before; so runs are decoded four at a time.
    """
    require(
        data.dtype == torch.uint8
        and data.dim() == 1
        and data.is_contiguous()
        and data.device.type == "cpu"
        and sum(sizes) == data.shape[0]
        and len(sizes) == len(rows)
        and all(size >= 0 and size % 4 == 0 for size in sizes)
        and all(0 <= table < len(tables.frequencies) for table in order),
        "ans",
        "data must be [bytes] uint8 of runs of these sizes",
        data=data,
    )
    found: tuple[Tensor, list[bool]] = implementation("ans", data.device).decode(data, sizes, rows, tables, order)
    return found
