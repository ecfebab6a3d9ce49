"""Decoding on CUDA, in one launch for all runs of all arrays: see `kvshelf.kernels.ans`.

A lane decodes a stream, or the part of one between two entries: the channels of one word of flags. A warp has 32 lanes;
those of the same channels in neighbouring runs lie side by side, because they look into the same table. No lane waits
for another. A lane must end where the next one's entry says, and the first begins at the stream's own end, so that a
run with any wrong entry is unsound.

The limit is the time of a step of a lane (a look-up, a product and a refill, each waiting for the one before), over the
lanes that a card holds. Keys and values of 16 layers of 1,024 channels have 8,192 lanes at 8k tokens. Without entries
they would have 256, and 5e10 symbols a second would leave each step 5 ns, less than a look-up in the L1 cache takes.
The next word of a stream is therefore loaded before it is needed. Share of the limit: not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kvshelf.kernels.ans.tables import ENTRIES, Runs, Tables
from kvshelf.kernels.staging import carried

_LANES = 32
_OF_A_RUN = 7
"""Numbers of a run in the table of `_fields`."""


def decode_all(arrays: Sequence[Runs], tables: Tables, device: torch.device) -> list[tuple[Tensor, list[bool]]]:
    shapes = [(len(array.order), sum(array.rows)) for array in arrays]
    places = list(accumulate((channels * rows for channels, rows in shapes), initial=0))
    out = torch.zeros(places[-1], dtype=torch.float32, device=device)
    runs, lanes = _laid_out(arrays, places)
    bad = torch.zeros(len(runs), dtype=torch.int32, device=device)
    if len(lanes):
        streams = torch.cat([array.data for array in arrays])
        tables_of = torch.tensor([table for array in arrays for table in array.order], dtype=torch.int32)
        host_tables = [streams, tables_of, torch.from_numpy(runs), torch.from_numpy(lanes)]
        data, orders, of_runs, of_lanes = carried(host_tables, device, {})
        _decode[(triton.cdiv(len(lanes), _LANES),)](
            data.view(torch.int32), data, orders, tables.slots_on(device).view(torch.int64),
            of_runs, of_lanes, len(lanes), out, bad, FIELDS=_OF_A_RUN, LANES=_LANES, num_warps=1,
        )  # fmt: skip
    sound = [not wrong for wrong in bad.tolist()]
    ends = accumulate((len(array.sizes) for array in arrays), initial=0)
    return [
        (codes.view(shape), sound[first : first + len(array.sizes)])
        for codes, shape, array, first in zip(
            torch.split(out, [channels * rows for channels, rows in shapes]), shapes, arrays, ends, strict=False
        )
    ]


def _laid_out(arrays: Sequence[Runs], places: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The fields of each run, `[runs, 7]` int64, and the run and the word of flags of each lane, `[lanes, 2]`
    int32."""
    runs: list[np.ndarray] = [np.empty((0, _OF_A_RUN), np.int64)]
    lanes: list[np.ndarray] = [np.empty((0, 2), np.int32)]
    data = orders = count = 0
    for array, place in zip(arrays, places, strict=False):
        sizes, rows = (np.array(counts, np.int64) for counts in (array.sizes, array.rows))
        starts, channels = np.cumsum(sizes) - sizes, len(array.order)
        fields = np.empty((len(sizes), _OF_A_RUN), np.int64)
        fields[:, 0], fields[:, 1], fields[:, 2] = (data + starts) // 4, sizes // 4, rows
        fields[:, 3], fields[:, 4] = channels, orders
        fields[:, 5], fields[:, 6] = place + np.cumsum(rows) - rows, rows.sum()
        runs.append(fields)
        words = array.data.numpy().view("<u4")
        divided = np.array(
            [size > 0 and words[start // 4] >= ENTRIES for start, size in zip(starts, sizes, strict=True)]
        )
        width = max(1, -(-channels // 32))
        # A run without entries has one lane.
        has_lane = np.arange(width)[:, None] <= np.where(divided, width, 0)[None, :]
        word, run = np.nonzero(has_lane)  # word by word, and run by run within
        lanes.append(np.stack([run + count, word], axis=1).astype(np.int32))
        data, orders, count = data + int(sizes.sum()), orders + channels, count + len(sizes)
    return np.concatenate(runs), np.concatenate(lanes)


@triton.jit
def _word(words, index, mask):
    """Words of streams as uint64, 0 where `mask` is not set."""
    return tl.load(words + index, mask=mask, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def _fields(fields, live):
    """The fields of each lane's run: where its words begin, how many they are, its rows and channels, where the tables
    of its channels and its output begin, and the distance of two channels there."""
    head = tl.load(fields, mask=live, other=0)
    size = tl.load(fields + 1, mask=live, other=0)
    rows = tl.load(fields + 2, mask=live, other=0).to(tl.int32)
    channels = tl.load(fields + 3, mask=live, other=0).to(tl.int32)
    order = tl.load(fields + 4, mask=live, other=0)
    place = tl.load(fields + 5, mask=live, other=0)
    stride = tl.load(fields + 6, mask=live, other=0)
    return head, size, rows, channels, order, place, stride


@triton.jit
def _number(escaped, position, nbytes, going, LANES: tl.constexpr):
    """Of each lane that is `going`: its escaped number, of up to 5 bytes, the position behind that, and whether the
    bytes end too early. No branch: a warp would wait there."""
    number = tl.zeros([LANES], tl.int64)
    cut = going & (position < 0)
    for step in tl.static_range(5):
        reading = going & (position < nbytes)
        byte = tl.load(escaped + position, mask=reading, other=0).to(tl.int64)
        number |= (byte & 127) << (7 * step)
        position += reading.to(tl.int64)
        cut = cut | (going & ~reading)
        going = reading & (byte >= 128)
    return (number >> 1) ^ -(number & 1), position, cut | going


@triton.jit
def _decode(
    words, escaped, orders, slots, runs, lanes, num_lanes, out, bad,
    FIELDS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = lane < num_lanes
    run = tl.load(lanes + 2 * lane, mask=live, other=0)
    word = tl.load(lanes + 2 * lane + 1, mask=live, other=0)
    fields = runs + run.to(tl.int64) * FIELDS
    head, size, rows, channels, order, place, stride = _fields(fields, live)

    width = (channels + 31) // 32
    fits = live & (size > width)
    first = _word(words, head, fits).to(tl.int64)
    divided = first >= 0x80000000
    nbytes = first & 0x7FFFFFFF
    entries = head + 1 + width
    escapes = entries + tl.where(divided, 4 * (width - 1), 0)
    begin = escapes + (nbytes + 3) // 4
    end = head + size
    fits = fits & (begin <= end)
    fits = fits & ((begin == end) | (_word(words, end - 1, fits & (begin < end)) != 0))

    inside = fits & (word > 0)
    entry = entries + 4 * (word - 1)
    words_before = tl.where(word > 0, _word(words, entry + 2, inside).to(tl.int64), end - begin)
    position = _word(words, entry + 3, inside).to(tl.int64)
    fits = fits & (words_before <= end - begin) & (position <= nbytes)
    state = _word(words, entry, inside) | (_word(words, entry + 1, inside) << 32)
    for _ in tl.static_range(2):
        opening = fits & (word == 0) & (words_before > 0)
        state = tl.where(opening, (state << 32) | _word(words, begin + words_before - 1, opening), state)
        words_before -= opening.to(tl.int64)

    channel = word * 32
    last = tl.where(divided, tl.minimum(channel + 32, channels), channels)
    upcoming = _word(words, begin + words_before - 1, fits & (words_before > 0))
    cut = live & (word < 0)
    escaped += escapes * 4
    for _ in range(tl.max(tl.where(fits, last - channel, 0), axis=0)):
        used = fits & (channel < last)
        flags = _word(words, head + 1 + channel // 32, used)
        used = used & (((flags >> (channel % 32).to(tl.uint64)) & 1) != 0)
        table = slots + tl.load(orders + order + channel, mask=used, other=0).to(tl.int64) * 4096
        target = out + place + channel.to(tl.int64) * stride
        count = tl.where(used, rows, 0)
        for row in range(tl.max(count, axis=0)):
            on = row < count
            slot = tl.load(table + ((state >> 12) & 4095).to(tl.int64), mask=on, other=0)
            value = slot.to(tl.int32)
            share = (slot >> 32).to(tl.uint64)
            low = ((share & 0xFFFF) << 12) | (state & 4095)
            after = ((share >> 16) << 12) * (state >> 24) + low
            refill = on & (after < 4294967296) & (words_before > 0)
            state = tl.where(on, tl.where(refill, (after << 32) | upcoming, after), state)
            words_before -= refill.to(tl.int64)
            upcoming = tl.where(refill, _word(words, begin + words_before - 1, refill & (words_before > 0)), upcoming)
            is_escape = value == -0x7FFFFFFF - 1
            number, position, short = _number(escaped, position, nbytes, on & is_escape, LANES)
            cut = cut | short
            tl.store(target + row, tl.where(is_escape, number.to(tl.int32), value).to(tl.float32), mask=on)
        channel += 1

    between = fits & divided & (word + 1 < width)
    entry += 4
    ends = _word(words, entry, between) | (_word(words, entry + 1, between) << 32)
    words_left = _word(words, entry + 2, between).to(tl.int64)
    bytes_taken = tl.where(between, _word(words, entry + 3, between).to(tl.int64), nbytes)
    sound = fits & ~cut & (state == ends) & (words_before == words_left) & (position == bytes_taken)
    tl.store(bad + run, 1, mask=live & ~sound)
