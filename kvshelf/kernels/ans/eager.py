"""Encoding and decoding by the library `constriction`, a stream at a time. Imported where it is used: decoding in C
does without it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvshelf.kernels.ans.tables import Ints, Tables


def encode(numbers: Ints, tables: Tables, order: Sequence[int]) -> bytes:
    """See `kvshelf.kernels.ans`."""
    import constriction  # type: ignore[import-untyped]

    used = np.flatnonzero(numbers.any(axis=1))
    coder = constriction.stream.stack.AnsCoder()
    escapes: list[Ints] = []
    for table, channels in reversed(list(_alike(used, order))):  # the last symbol that is written is read first
        symbols = numbers[channels] + tables.reach(table)
        outside = (symbols < 0) | (symbols > 2 * tables.reach(table))
        escapes.insert(0, numbers[channels][outside])
        symbols[outside] = 2 * tables.reach(table) + 1
        coder.encode_reverse(symbols.ravel(), _model(tables, table))
    flags = np.zeros(-(-len(order) // 32) * 32, np.uint8)
    flags[used] = 1
    outside_bytes = _varints(np.concatenate([*escapes, np.empty(0, np.int32)]))
    head = len(outside_bytes).to_bytes(4, "little") + np.packbits(flags, bitorder="little").tobytes()
    padding = bytes(-len(outside_bytes) % 4)
    words: bytes = coder.get_compressed().astype("<u4").tobytes()
    return head + outside_bytes + padding + words


def decode(
    data: Tensor, sizes: Sequence[int], rows: Sequence[int], tables: Tables, order: Sequence[int]
) -> tuple[Tensor, list[bool]]:
    """See `kvshelf.kernels.ans`."""
    out = torch.zeros(len(order), sum(rows), dtype=torch.float32)
    sound = []
    starts, places = np.cumsum([0, *sizes]), np.cumsum([0, *rows])
    for (start, stop), (first, last) in zip(pairwise(starts), pairwise(places), strict=True):
        sound.append(_decode_run(data.numpy()[start:stop], out.numpy()[:, first:last], tables, order))
    return out, sound


def _decode_run(data: Any, out: Any, tables: Tables, order: Sequence[int]) -> bool:
    import constriction

    words, width = data.view("<u4"), -(-len(order) // 32)
    if len(words) < 1 + width or len(words) < 1 + width + (int(words[0]) + 3) // 4:
        return False
    nbytes = int(words[0])
    used = np.flatnonzero(np.unpackbits(words[1 : 1 + width].view(np.uint8), bitorder="little")[: len(order)])
    escapes = _from_varints(words[1 + width :].view(np.uint8)[:nbytes])
    stream = words[1 + width + (nbytes + 3) // 4 :]
    try:
        coder = constriction.stream.stack.AnsCoder(stream.astype(np.uint32))
    except ValueError:  # a stream never ends in a zero
        return False
    if escapes is None:
        return False
    taken = 0
    for table, channels in _alike(used, order):
        symbols = coder.decode(_model(tables, table), len(channels) * out.shape[1])
        outside = symbols == 2 * tables.reach(table) + 1
        numbers = (symbols - tables.reach(table)).astype(np.float32)
        count = int(outside.sum())
        if taken + count > len(escapes):
            return False
        numbers[outside] = escapes[taken : taken + count]
        taken += count
        out[channels] = numbers.reshape(len(channels), -1)
    return taken == len(escapes) and coder.is_empty()


def _alike(used: Any, order: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Neighbouring channels with the same table: one call of the library each."""
    for table, channels in groupby(used.tolist(), key=lambda channel: order[channel]):
        yield table, list(channels)


def _model(tables: Tables, table: int) -> Any:
    """The library's model of a table. `perfect` keeps frequencies that are multiples of 2^-24 as they are."""
    import constriction

    frequencies = tables.frequencies[table] / np.float32(tables.frequencies[table].sum())
    return constriction.stream.model.Categorical(frequencies.astype(np.float32), perfect=True)


def _varints(numbers: Ints) -> bytes:
    """Zigzag LEB128 of each number."""
    left = (numbers.astype(np.int64) << 1 ^ numbers.astype(np.int64) >> 63).tolist()
    out = bytearray()
    for number in left:
        while number > 127:
            out.append(number & 127 | 128)
            number >>= 7
        out.append(number)
    return bytes(out)


def _from_varints(data: Any) -> Any:
    """The numbers of `_varints`; None for bytes that it does not write."""
    found, value, shift = [], 0, 0
    for byte in data.tolist():
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            found.append((value >> 1) ^ -(value & 1))
            value = shift = 0
        elif shift > 28:
            return None
    return None if shift else np.array(found, np.int64).astype(np.int32)
