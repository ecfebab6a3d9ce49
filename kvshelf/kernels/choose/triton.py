"""The choice in three launches for a document, one of them for all of a question's documents: see
`kvshelf.kernels.choose`.

`_score` reads each summary once and writes the units' scores and rows. `_take`, a program for each head, looks for the
least score that still has room, two bits of its int32 image at a time, as `select` does, but counts rows. `_fill`
writes the rows of what is taken. Torch's operations take 50 to 58 launches and move 6 times the bytes for pages in
bf16, 31 times for units of one row by columns. A coarser choice before this one (`parents`) and guesses are left to
them. Share of the limit: not measured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvshelf.kernels.choose import Choice, eager
from kvshelf.kernels.tiles import image_of, least_kept, rows_of_tile, warps

_WIDEST = 512
_BLOCK = 1024
"""Units that a program of `_take` and `_fill` looks at together."""


def choose(queries: Tensor, choice: Choice) -> None:
    if choice.basis is not None or any(units.parents is not None or units.width > _WIDEST for units in choice.units):
        return eager.choose(queries, choice)
    heads = len(choice.units[0].counts)
    members = queries.float().view(heads, -1, queries.shape[1])
    if choice.columns is not None:
        members = members.gather(2, choice.columns.unsqueeze(1).expand(-1, members.shape[1], -1))
    members = members.contiguous()
    most = [max(units.counts) for units in choice.units]
    scores = torch.empty(heads, sum(most), dtype=torch.float32, device=queries.device)
    rows = torch.empty_like(scores, dtype=torch.int32)
    places = [sum(most[:number]) for number in range(len(most))]
    for units, place, count in zip(choice.units, places, most, strict=True):
        width = triton.next_power_of_2(units.width)
        block = rows_of_tile(width)
        span = units.low if units.span is None else units.span
        strides = [table.stride()[:: -1 if units.by_column else 1] for table in (units.low, span)]
        _score[(triton.cdiv(count, block), heads)](
            members, units.low, span, units.ends, units.forced.view(torch.uint8), units.starts, scores, rows, place,
            count, scores.shape[1], *strides[0], *strides[1], units.scale, choice.linear, choice.relu,
            GROUP=members.shape[1], WIDTH=units.width, BLOCK_WIDTH=width, BLOCK=block, SPAN=units.span is not None,
            MEAN=choice.group == "mean", FORCE=choice.force, num_warps=warps(block * width),
        )  # fmt: skip
    tile = {"BLOCK": min(_BLOCK, triton.next_power_of_2(sum(most))), "num_warps": 4}
    _take[(heads,)](scores, rows, sum(most), choice.budget, CUT=choice.cut, **tile)
    for units, chosen, place in zip(choice.units, choice.chosen, places, strict=True):
        _fill[(heads,)](
            rows, units.ends, units.starts, chosen.rows, chosen.counts, place, sum(most), chosen.rows.shape[1], **tile
        )
    return None


@triton.jit
def _score(
    members, low, span, ends, forced, starts, scores, rows, place, most, num_units,
    low_unit, low_column, span_unit, span_column, scale, linear, relu,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    MEAN: tl.constexpr, FORCE: tl.constexpr,
):  # fmt: skip
    """Scores of a document's units, and their rows: negative for forced ones, 0 where a head has no such unit."""
    head = tl.program_id(1)
    first = tl.load(starts + head)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = unit < tl.load(starts + head + 1) - first
    index = (first + unit).to(tl.int64)
    columns = tl.arange(0, BLOCK_WIDTH)
    inside = exists[:, None] & (columns < WIDTH)[None, :]
    lows = tl.load(low + index[:, None] * low_unit + columns[None, :] * low_column, mask=inside, other=0.0)
    lows = lows.to(tl.float32)
    spans = lows
    if SPAN:
        spans = tl.load(span + index[:, None] * span_unit + columns[None, :] * span_column, mask=inside, other=0.0)
        spans = spans.to(tl.float32)
    best = tl.full([BLOCK], 0.0 if MEAN else float("-inf"), tl.float32)
    for member in range(GROUP):
        query = tl.load(members + (head * GROUP + member) * WIDTH + columns, mask=columns < WIDTH, other=0.0)
        score = tl.sum(lows * query[None, :], axis=1)
        if SPAN:
            feature = linear * query + relu * tl.where(query < 0, 0.0, query)
            score += scale * tl.sum(spans * feature[None, :], axis=1)
        if MEAN:
            best += score
        else:
            best = tl.maximum(best, score, propagate_nan=tl.PropagateNan.ALL)
    if MEAN:
        best /= GROUP
    end = tl.load(ends + index, mask=exists, other=0)
    size = end - tl.load(ends + index - 1, mask=exists & (unit > 0), other=0)
    if FORCE:
        size = tl.where(tl.load(forced + index, mask=exists, other=0) != 0, -size, size)
    target = head.to(tl.int64) * num_units + place + unit
    tl.store(scores + target, best, mask=unit < most)
    tl.store(rows + target, size, mask=unit < most)


@triton.jit
def _ranked(scores, rows, units, num_units, stride, row_stride):
    """Images of scores, and the rows of units that are not forced."""
    inside = units < num_units
    image = image_of(tl.load(scores + units * stride, mask=inside, other=0.0))
    return image, tl.maximum(tl.load(rows + units * row_stride, mask=inside, other=0), 0)


@triton.jit
def _take(scores, rows, num_units, budget, CUT: tl.constexpr, BLOCK: tl.constexpr):
    """Replace the rows of each unit of a head by those of it that are read."""
    scores += tl.program_id(0).to(tl.int64) * num_units
    rows += tl.program_id(0).to(tl.int64) * num_units
    lanes = tl.arange(0, BLOCK)
    room = budget
    for start in range(0, num_units, BLOCK):
        size = tl.load(rows + start + lanes, mask=start + lanes < num_units, other=0)
        room += tl.sum(tl.minimum(size, 0), axis=0)
    least = least_kept(_ranked, scores, rows, num_units, 1, 1, room, BLOCK)
    for start in range(0, num_units, BLOCK):
        image, size = _ranked(scores, rows, start + lanes, num_units, 1, 1)
        room -= tl.sum(tl.where(image > least, size, 0), axis=0)
    for start in range(0, num_units, BLOCK):
        units = start + lanes
        image, size = _ranked(scores, rows, units, num_units, 1, 1)
        tied = tl.where(image == least, size, 0)
        partial = tl.minimum(tied, tl.maximum(room - (tl.cumsum(tied, axis=0) - tied), 0))
        if not CUT:
            partial = tl.where(partial < tied, 0, partial)
        room -= tl.sum(tied, axis=0)
        is_forced = -tl.minimum(tl.load(rows + units, mask=units < num_units, other=0), 0)
        tl.store(rows + units, tl.where(image > least, size, partial) + is_forced, mask=units < num_units)


@triton.jit
def _fill(rows, ends, starts, chosen, counts, place, num_units, most, BLOCK: tl.constexpr):
    """Write the rows of a document that a head reads, ascending, and how many they are."""
    head = tl.program_id(0)
    first = tl.load(starts + head)
    count = tl.load(starts + head + 1) - first
    rows += head.to(tl.int64) * num_units + place
    chosen += head.to(tl.int64) * most
    done = tl.full((), 0, tl.int32)
    for start in range(0, count, BLOCK):
        units = start + tl.arange(0, BLOCK)
        sizes = tl.load(rows + units, mask=units < count, other=0)
        before = tl.load(ends + first + units - 1, mask=(units < count) & (units > 0), other=0)
        target = chosen + done + tl.cumsum(sizes, axis=0) - sizes
        for row in range(tl.max(sizes, axis=0)):
            tl.store(target + row, before + row, mask=row < sizes)
        done += tl.sum(sizes, axis=0)
    tl.store(counts + head, done)
