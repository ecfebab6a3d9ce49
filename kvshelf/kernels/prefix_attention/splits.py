"""The kernel of one split: some query rows over a run of rows of one head of a prefix, however the rows are kept."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_splits(
    queries, items, outs, lses, token_stride, head_stride, scale,
    DIM: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HEADS: tl.constexpr, SLOTS: tl.constexpr,
    SELECTED: tl.constexpr, KEY_BITS: tl.constexpr, KEY_GROUP: tl.constexpr, KEY_BY_TOKENS: tl.constexpr,
    KEY_STRIDE: tl.constexpr, KEY_ALIGNED: tl.constexpr,
    VALUE_BITS: tl.constexpr, VALUE_GROUP: tl.constexpr, VALUE_BY_TOKENS: tl.constexpr,
    VALUE_STRIDE: tl.constexpr, VALUE_ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    COLUMNS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Item `program_id(0)` of `items` `[n, COLUMNS]` int64 (see work.py).

    queries: `[N, q_heads, D]`. outs: `[scratch rows, Dv]` fp32, each the softmax of its split; lses: `[scratch rows]`
    fp32, its log-sum-exp to the base 2. scale: already times log2(e). HEADS: query heads of a KV head. SLOTS: slots of
    a row of a merged prefix; 0 for other prefixes, whose rows are tokens. SELECTED: whether a table names the rows.
    With KEY_DIM below DIM the keys are pruned.
    """
    item = items + tl.program_id(0).to(tl.int64) * COLUMNS
    start, stop = tl.load(item + 4), tl.load(item + 5)
    keys, key_scales, key_zeros = tl.load(item + 7), tl.load(item + 8), tl.load(item + 9)
    values, value_scales, value_zeros = tl.load(item + 10), tl.load(item + 11), tl.load(item + 12)
    if SLOTS > 0:
        classes, slot_scales, slot_stride, num_rows = _slots_of(item)
        stop = tl.minimum(stop, num_rows)
    if SELECTED:
        named = tl.load(item + 13).to(tl.pointer_type(tl.int32))
        stop = tl.minimum(stop, tl.load(tl.load(item + 14).to(tl.pointer_type(tl.int32))).to(tl.int64))
    query, row, live = _queries_of(item, queries, token_stride, head_stride, DIM, KEY_DIM, HEADS, BLOCK_M, BLOCK_D)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for first in range(start, stop, BLOCK_N):
        rows = first + tl.arange(0, BLOCK_N)
        inside = rows < stop
        if SLOTS > 0:
            at_slots = slot_scales + rows
            rows = tl.load(classes + rows, mask=inside, other=0).to(tl.int64)
        if SELECTED:
            rows = tl.load(named + rows, mask=inside, other=0).to(tl.int64)
        key = load_rows(
            keys, key_scales, key_zeros, rows, inside, first, stop, query.dtype,
            KEY_DIM, BLOCK_N, BLOCK_D, KEY_BITS, KEY_GROUP, KEY_BY_TOKENS, KEY_STRIDE, KEY_ALIGNED,
            SLOTS == 0 and not SELECTED,
        )  # fmt: skip
        value = load_rows(
            values, value_scales, value_zeros, rows, inside, first, stop, query.dtype,
            VALUE_DIM, BLOCK_N, BLOCK_DV, VALUE_BITS, VALUE_GROUP, VALUE_BY_TOKENS, VALUE_STRIDE, VALUE_ALIGNED,
            SLOTS == 0 and not SELECTED,
        )  # fmt: skip
        logits = dot(query, tl.trans(key), UPCAST) * scale
        if SLOTS > 0:
            new_top = tl.maximum(top, _slots_top(logits, at_slots, slot_stride, inside, SLOTS))
            weights = _slots_weights(logits, at_slots, slot_stride, inside, new_top, SLOTS)
            top, mass, acc = add_weighted(top, mass, acc, new_top, weights, value, UPCAST)
        else:
            top, mass, acc = add_keys(top, mass, acc, logits, inside[None, :], value, UPCAST)
    _store_split(item, outs, lses, row, live, top, mass, acc, VALUE_DIM, BLOCK_DV)


@triton.jit
def _slots_of(item):
    """Classes and scales of the rows of a merged head, the stride of the scales, and how many rows there are."""
    bounds = tl.load(item + 16).to(tl.pointer_type(tl.int64))
    begin = tl.load(bounds)
    classes = tl.load(item + 13).to(tl.pointer_type(tl.int32)) + begin
    scales = tl.load(item + 14).to(tl.pointer_type(tl.float32)) + begin
    return classes, scales, tl.load(item + 15), tl.load(bounds + 1) - begin


@triton.jit
def _queries_of(
    item, queries, token_stride, head_stride,
    DIM: tl.constexpr, KEY_DIM: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The query rows of an item, `[BLOCK_M, BLOCK_D]`, with the channels that its keys have; their numbers in the
    share; and which of them exist."""
    row = tl.load(item + 2) + tl.arange(0, BLOCK_M)
    live = row < tl.load(item + 1)
    q_head = tl.load(item + 3) * HEADS + row % HEADS
    at = queries + (tl.load(item) + row // HEADS) * token_stride + q_head * head_stride
    dims = tl.arange(0, BLOCK_D)
    inside = dims < KEY_DIM
    if KEY_DIM < DIM:
        dims = tl.load(tl.load(item + 18).to(tl.pointer_type(tl.int32)) + dims, mask=inside, other=0)
    query = tl.load(at[:, None] + dims[None, :], mask=live[:, None] & inside[None, :], other=0.0)
    return query, row, live


@triton.jit
def _store_split(item, outs, lses, row, live, top, mass, acc, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr):
    # A split beyond the last row of a merged head has no mass; its 0 and -inf take no part in the union.
    out_row = tl.load(item + 6) + row
    columns = tl.arange(0, BLOCK_DV)
    acc = acc / tl.where(mass > 0, mass, 1.0)[:, None]
    lse = tl.where(mass > 0, top + tl.log2(tl.where(mass > 0, mass, 1.0)), float("-inf"))
    into = outs + out_row[:, None] * VALUE_DIM + columns[None, :]
    tl.store(into, acc, mask=live[:, None] & (columns < VALUE_DIM)[None, :])
    tl.store(lses + out_row, lse, mask=live)


@triton.jit
def add_keys(top, mass, acc, logits, seen, value, UPCAST: tl.constexpr):
    """Take a block of keys into the running softmax of each query row: its largest logit, its mass to the base 2, and
    its weighted sum of values. seen: which keys a row sees."""
    logits = tl.where(seen, logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    return add_weighted(top, mass, acc, new_top, tl.exp2(logits - new_top[:, None]), value, UPCAST)


@triton.jit
def add_weighted(top, mass, acc, new_top, weights, value, UPCAST: tl.constexpr):
    """As `add_keys`, for known weights: exp2(logit - new_top) of each key."""
    fade = tl.exp2(top - new_top)
    mass = mass * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None] + dot(weights.to(value.dtype), value, UPCAST)
    return new_top, mass, acc


@triton.jit
def dot(a, b, UPCAST: tl.constexpr):
    """a @ b with fp32 accumulation. UPCAST: in the interpreter, which multiplies the bits of bf16 as integers."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _slots_top(logits, scales, stride, inside, SLOTS: tl.constexpr):
    """The largest logit of all slots of each query row: that of slot s of row n is scale[s, n] times the row's."""
    top = tl.full([logits.shape[0]], float("-inf"), tl.float32)
    for slot in tl.static_range(SLOTS):
        factor = tl.load(scales + slot * stride, mask=inside, other=float("nan"))[None, :]
        top = tl.maximum(top, tl.max(tl.where(factor == factor, logits * factor, float("-inf")), 1))
    return top


@triton.jit
def _slots_weights(logits, scales, stride, inside, top, SLOTS: tl.constexpr):
    """The sum over a row's slots of exp2(logit - top): the mass of a class, which all its slots give to one value."""
    weights = tl.zeros_like(logits)
    for slot in tl.static_range(SLOTS):
        factor = tl.load(scales + slot * stride, mask=inside, other=float("nan"))[None, :]
        weights += tl.exp2(tl.where(factor == factor, logits * factor, float("-inf")) - top[:, None])
    return weights


@triton.jit
def load_rows(
    data, scales, zeros, rows, inside, first, stop,
    dtype: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, BY_TOKENS: tl.constexpr, STRIDE: tl.constexpr, ALIGNED: tl.constexpr,
    IN_ORDER: tl.constexpr,
):  # fmt: skip
    """Rows of one head, `[BLOCK_N, BLOCK_D]` in `dtype`, 0 outside; `IN_ORDER`: they are first, first + 1, ..."""
    if BITS == 0:
        columns = tl.arange(0, BLOCK_D)
        mask = inside[:, None] & (columns < DIM)[None, :]
        data = data.to(tl.pointer_type(dtype))
        if ALIGNED:
            data = tl.multiple_of(data, 16)
        loaded = tl.load(data + rows[:, None] * STRIDE + columns[None, :], mask=mask, other=0.0)
    else:
        codes = _codes(data, rows, inside, DIM, BLOCK_D, BITS, STRIDE, ALIGNED)
        scale = _of_group(scales, rows, inside, first, stop, DIM, BLOCK_N, BLOCK_D, GROUP, BY_TOKENS, IN_ORDER)
        zero = _of_group(zeros, rows, inside, first, stop, DIM, BLOCK_N, BLOCK_D, GROUP, BY_TOKENS, IN_ORDER)
        loaded = (zero + codes * scale).to(dtype)
    return loaded


@triton.jit
def _codes(
    data, rows, inside,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BITS: tl.constexpr, STRIDE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Codes `[BLOCK_N, BLOCK_D]` fp32. A byte is read once, and taken apart in registers; with 3 bits each code reads
    the two bytes that it may lie in."""
    PER_BYTE: tl.constexpr = 8 // BITS if BITS != 3 else 1
    columns = tl.arange(0, BLOCK_D // PER_BYTE)
    mask = inside[:, None] & (columns < (DIM + PER_BYTE - 1) // PER_BYTE)[None, :]
    data = data.to(tl.pointer_type(tl.uint8))
    if ALIGNED:
        data = tl.multiple_of(data, 16)
    byte = columns * BITS // 8 if BITS == 3 else columns
    packed = tl.load(data + rows[:, None] * STRIDE + byte[None, :], mask=mask, other=0)
    if BITS == 3:
        more = mask & (byte + 1 < (DIM * BITS + 7) // 8)[None, :]
        high = tl.load(data + rows[:, None] * STRIDE + byte[None, :] + 1, mask=more, other=0)
        packed = ((packed.to(tl.int32) | (high.to(tl.int32) << 8)) >> (columns * BITS % 8)[None, :]) & 7
    if BITS == 4:
        packed = tl.interleave(packed & 15, packed >> 4)
    if BITS == 2:
        even = tl.interleave(packed & 3, (packed >> 4) & 3)
        packed = tl.interleave(even, tl.interleave((packed >> 2) & 3, packed >> 6))
    return packed.to(tl.float32)


@triton.jit
def _of_group(
    table, rows, inside, first, stop,
    DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, BY_TOKENS: tl.constexpr,
    IN_ORDER: tl.constexpr,
):  # fmt: skip
    """A scale or zero for each code, `[BLOCK_N, BLOCK_D]` fp32. Groups that are powers of two are read once and spread
    in registers; others, and those of rows in any order, are read for each code, mostly from the L1 cache."""
    table = table.to(tl.pointer_type(tl.bfloat16))
    columns = tl.arange(0, BLOCK_D)
    POWER_OF_2: tl.constexpr = GROUP & (GROUP - 1) == 0
    if BY_TOKENS and POWER_OF_2 and IN_ORDER:
        SIZE: tl.constexpr = GROUP if GROUP < BLOCK_N else BLOCK_N
        groups = first // GROUP + tl.arange(0, BLOCK_N // SIZE)
        mask = (groups * GROUP < stop)[:, None] & (columns < DIM)[None, :]
        numbers = tl.load(table + groups[:, None] * DIM + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        numbers = tl.broadcast_to(numbers[:, None, :], [BLOCK_N // SIZE, SIZE, BLOCK_D]).reshape([BLOCK_N, BLOCK_D])
    elif BY_TOKENS:
        at = table + (rows // GROUP)[:, None] * DIM + columns[None, :]
        numbers = tl.load(at, mask=inside[:, None] & (columns < DIM)[None, :], other=0.0).to(tl.float32)
    elif POWER_OF_2:
        WIDTH: tl.constexpr = GROUP if GROUP < BLOCK_D else BLOCK_D
        groups = tl.arange(0, BLOCK_D // WIDTH)
        mask = inside[:, None] & (groups * GROUP < DIM)[None, :]
        at = table + rows[:, None] * tl.cdiv(DIM, GROUP) + groups[None, :]
        numbers = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        numbers = tl.broadcast_to(numbers[:, :, None], [BLOCK_N, BLOCK_D // WIDTH, WIDTH]).reshape([BLOCK_N, BLOCK_D])
    else:
        at = table + rows[:, None] * tl.cdiv(DIM, GROUP) + (columns // GROUP)[None, :]
        numbers = tl.load(at, mask=inside[:, None] & (columns < DIM)[None, :], other=0.0).to(tl.float32)
    return numbers
