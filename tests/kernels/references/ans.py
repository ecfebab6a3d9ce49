"""The naive form: one symbol after the other, in Python's integers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from kvshelf.kernels.ans.tables import BITS, ENTRIES, ESCAPE, Runs, Tables

_PRECISION = 24
_WORD = 1 << 32


def decode(array: Runs, tables: Tables) -> tuple[Tensor, list[bool]]:
    """See `kvshelf.kernels.ans`."""
    out: list[Tensor] = []
    sound: list[bool] = []
    whole = bytes(array.data.tolist())
    for start, stop in pairwise(accumulate(array.sizes, initial=0)):
        numbers = torch.zeros(len(array.order), array.rows[len(out)])
        sound.append(_run(whole[start:stop], numbers, tables, array.order))
        out.append(numbers)
    return torch.cat(out, dim=1) if out else torch.zeros(len(array.order), 0), sound


def _run(data: bytes, numbers: Tensor, tables: Tables, order: Sequence[int]) -> bool:
    words = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
    flags = -(-len(order) // 32)
    if len(words) < 1 + flags:
        return False
    nbytes, behind = words[0] % ENTRIES, 1 + flags
    entries = [words[behind + 4 * e : behind + 4 * e + 4] for e in range(flags - 1)] if words[0] >= ENTRIES else []
    behind += 4 * len(entries)
    if len(words) < behind + -(-nbytes // 4):
        return False
    escapes, taken = _escapes(data[4 * behind : 4 * behind + nbytes]), 0
    stream = words[behind + -(-nbytes // 4) :]
    if escapes is None or (stream and not stream[-1]):
        return False
    state = 0
    for _ in range(2):
        state = state * _WORD + stream.pop() if stream else state
    for channel, table in enumerate(order):
        if entries and channel and channel % 32 == 0:
            low, high, left, before = entries[channel // 32 - 1]
            if (state, len(stream), taken) != (high << 32 | low, left, before):
                return False
        if not words[1 + channel // 32] >> channel % 32 & 1:
            continue
        for row in range(numbers.shape[1]):
            value, share = tables.slots[table, state >> (_PRECISION - BITS) & (1 << BITS) - 1].tolist()
            low = (share & 0xFFFF) << (_PRECISION - BITS) | state & (1 << _PRECISION - BITS) - 1
            state = (share >> 16 << (_PRECISION - BITS)) * (state >> _PRECISION) + low
            if state < _WORD and stream:
                state = state * _WORD + stream.pop()
            if value == ESCAPE:
                if not escapes:
                    return False
                value, size = escapes.pop(0)
                taken += size
            numbers[channel, row] = value
    return not state and not stream and not escapes


def _escapes(data: bytes) -> list[tuple[int, int]] | None:
    """Each number, and its bytes."""
    numbers, value, shift = [], 0, 0
    for byte in data:
        if shift > 28:
            return None
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            numbers.append((value >> 1 ^ -(value & 1), shift // 7))
            value = shift = 0
    return None if shift else numbers
