"""Encoding and decoding by the library `constriction`, a stream at a time. Imported where it is used: decoding in C
does without it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvshelf.kernels.ans.tables import ENTRIES, Ints, Runs, Tables


def encode(numbers: Ints, tables: Tables, order: Sequence[int], *, divided: bool) -> bytes:
    import constriction  # type: ignore[import-untyped]

    width, used = -(-len(order) // 32), np.flatnonzero(numbers.any(axis=1))
    coder = constriction.stream.stack.AnsCoder()
    entries, escapes = np.zeros((width, 4), "<u4"), [b""] * width
    for word in reversed(range(width)):  # the last symbol that is written is read first
        for table, channels in reversed(list(_alike(used[used // 32 == word], order))):
            symbols = numbers[channels] + tables.reach(table)
            outside = (symbols < 0) | (symbols > 2 * tables.reach(table))
            escapes[word] = _varints(numbers[channels][outside]) + escapes[word]
            symbols[outside] = 2 * tables.reach(table) + 1
            coder.encode_reverse(symbols.ravel(), _model(tables, table))
        entries[word, :3] = _place(coder)
    flags = np.zeros(32 * width, np.uint8)
    flags[used] = 1
    entries[1:, 3] = np.cumsum(list(map(len, escapes)))[:-1]
    outside_bytes = b"".join(escapes)
    first = len(outside_bytes) | (ENTRIES if divided else 0)
    head = first.to_bytes(4, "little") + np.packbits(flags, bitorder="little").tobytes()
    if divided:
        head += entries[1:].tobytes()
    padding = bytes(-len(outside_bytes) % 4)
    words: bytes = coder.get_compressed().astype("<u4").tobytes()
    return head + outside_bytes + padding + words


def decode(array: Runs, tables: Tables) -> tuple[Tensor, list[bool]]:
    out = torch.zeros(len(array.order), sum(array.rows), dtype=torch.float32)
    sound = []
    starts, places = np.cumsum([0, *array.sizes]), np.cumsum([0, *array.rows])
    for (start, stop), (first, last) in zip(pairwise(starts), pairwise(places), strict=True):
        sound.append(_decode_run(array.data.numpy()[start:stop], out.numpy()[:, first:last], tables, array.order))
    return out, sound


def _decode_run(data: Any, out: Any, tables: Tables, order: Sequence[int]) -> bool:
    import constriction

    words, width = data.view("<u4"), -(-len(order) // 32)
    if len(words) < 1 + width:
        return False
    nbytes, rest = int(words[0]) & ~ENTRIES, words[1 + width :]
    count = 4 * (width - 1) if int(words[0]) & ENTRIES else 0
    if len(rest) < count + (nbytes + 3) // 4:
        return False
    entries, rest = rest[:count].reshape(-1, 4).tolist(), rest[count:]
    used = np.flatnonzero(np.unpackbits(words[1 : 1 + width].view(np.uint8), bitorder="little")[: len(order)])
    escapes, ends = _from_varints(rest.view(np.uint8)[:nbytes])
    try:
        coder = constriction.stream.stack.AnsCoder(rest[(nbytes + 3) // 4 :].astype(np.uint32))
    except ValueError:  # a stream never ends in a zero
        return False
    if escapes is None:
        return False
    position = 0
    for word in range(width):
        if word and entries and entries[word - 1] != [*_place(coder), ends[position]]:
            return False
        for table, channels in _alike(used[used // 32 == word], order):
            symbols = coder.decode(_model(tables, table), len(channels) * out.shape[1])
            outside = symbols == 2 * tables.reach(table) + 1
            numbers = (symbols - tables.reach(table)).astype(np.float32)
            count = int(outside.sum())
            if position + count > len(escapes):
                return False
            numbers[outside] = escapes[position : position + count]
            position += count
            out[channels] = numbers.reshape(len(channels), -1)
    return position == len(escapes) and coder.is_empty()


def _place(coder: Any) -> tuple[int, int, int]:
    """Both halves of a coder's state, and the number of words before it."""
    words, state = coder.pos()
    return state & 0xFFFFFFFF, state >> 32, words


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
    zigzag = (numbers.astype(np.int64) << 1 ^ numbers.astype(np.int64) >> 63).tolist()
    out = bytearray()
    for number in zigzag:
        while number > 127:
            out.append(number & 127 | 128)
            number >>= 7
        out.append(number)
    return bytes(out)


def _from_varints(data: Any) -> tuple[Any, list[int]]:
    """The numbers that `_varints` wrote, and where each begins and the last ends. None for bytes that it never
    writes."""
    numbers, ends, value, shift = [], [0], 0, 0
    for end, byte in enumerate(data.tolist(), start=1):
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            numbers.append((value >> 1) ^ -(value & 1))
            ends.append(end)
            value = shift = 0
        elif shift > 28:
            return None, ends
    return None if shift else np.array(numbers, np.int64).astype(np.int32), ends
