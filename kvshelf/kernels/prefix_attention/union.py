"""The kernel that ends an attention: a row's own suffix, joined with the results of its prefixes' splits."""

from __future__ import annotations

import triton
import triton.language as tl

from kvshelf.kernels.prefix_attention.splits import add_keys, dot


@triton.jit(do_not_specialize=["new"])
def attend_suffixes(
    queries, keys, values, out, united, rows, tokens, shares, outs, lses, token_stride, head_stride,
    key_row_stride, key_head_stride, value_row_stride, value_head_stride, new, scale,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HEADS: tl.constexpr,
    KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, ALIGNED: tl.constexpr, PREFIXED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_S: tl.constexpr, TELLING: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A block of query rows of one row of a suffix and KV head.

    queries: `[N, q_heads, D]`. keys, values: `[rows, kv_heads, capacity, D or Dv]`. out: `[N, q_heads, Dv]`,
    contiguous. united: `[N, q_heads]` fp32, the log-sum-exps of all that a token sees, natural logarithms; written only
    if TELLING. rows: `[rows, 2]` int32, first token and length. tokens: `[N, 3]` int32, the share, the place in it and
    the share's token count. shares: `[shares, 1 + kv_heads]` int64, first scratch row and splits of each head. outs:
    `[scratch rows, Dv]`, lses: `[scratch rows]`, fp32, to the base 2. shares, outs and lses are read only if PREFIXED.
    scale: times log2(e). KEY_STRIDE, VALUE_STRIDE: from token to token. ALIGNED: every row of keys and values begins at
    a multiple of 16 bytes. BLOCK_S: splits taken in at once.
    """
    blocks = tl.cdiv(new * HEADS, BLOCK_M)
    slab, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    head, kv_heads = tl.program_id(1), tl.num_programs(1)
    first, length = tl.load(rows + 2 * slab), tl.load(rows + 2 * slab + 1)
    if first < 0:
        return
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < new * HEADS
    nth = tl.minimum(row // HEADS, new - 1)
    token = (first + nth).to(tl.int64)
    q_head = head * HEADS + row % HEADS
    dims, columns = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    at = queries + token * token_stride + q_head * head_stride
    query = tl.load(at[:, None] + dims[None, :], mask=live[:, None] & (dims < DIM)[None, :], other=0.0)
    keys += slab.to(tl.int64) * key_row_stride + head.to(tl.int64) * key_head_stride
    values += slab.to(tl.int64) * value_row_stride + head.to(tl.int64) * value_head_stride
    if ALIGNED:
        keys, values = tl.multiple_of(keys, 16), tl.multiple_of(values, 16)
    top, mass, acc = _attend_own(
        query, keys, values, length - new + nth + 1, scale,
        DIM, VALUE_DIM, KEY_STRIDE, VALUE_STRIDE, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, UPCAST,
    )  # fmt: skip
    if PREFIXED:
        top, mass, acc = _join_splits(
            top, mass, acc, tokens + 3 * token, shares, outs, lses, head, kv_heads, row, live,
            VALUE_DIM, HEADS, BLOCK_DV, BLOCK_S,
        )  # fmt: skip
    into = out + (token * kv_heads * HEADS + q_head)[:, None] * VALUE_DIM + columns[None, :]
    if TELLING:
        tl.store(united + token * kv_heads * HEADS + q_head, (top + tl.log2(mass)) * 0.6931471805599453, mask=live)
    acc = acc / mass[:, None]
    tl.store(into, acc.to(out.dtype.element_ty), mask=live[:, None] & (columns < VALUE_DIM)[None, :])


@triton.jit
def _attend_own(
    query, keys, values, visible, scale,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The running softmax of query rows over the first `visible` tokens of their suffix. Its largest logit is finite,
    for every token sees the first one."""
    dims, columns = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    end = tl.max(visible, 0)
    for start in range(0, end, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)
        inside = (places < end)[:, None]
        place = places.to(tl.int64)[:, None]
        key = tl.load(keys + place * KEY_STRIDE + dims[None, :], mask=inside & (dims < DIM)[None, :], other=0.0)
        mask = inside & (columns < VALUE_DIM)[None, :]
        value = tl.load(values + place * VALUE_STRIDE + columns[None, :], mask=mask, other=0.0)
        logits = dot(query, tl.trans(key), UPCAST) * scale
        top, mass, acc = add_keys(top, mass, acc, logits, places[None, :] < visible[:, None], value, UPCAST)
    return top, mass, acc


@triton.jit
def _join_splits(
    top, mass, acc, token, shares, outs, lses, head, kv_heads, row, live,
    VALUE_DIM: tl.constexpr, HEADS: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The running softmax, with those of the splits added. token: address of each row's entry in `tokens`."""
    # Scratch is 16-byte aligned, which a launch would find out but an ahead-of-time compiler cannot.
    outs = tl.multiple_of(outs.to(tl.int64).to(tl.pointer_type(tl.float32)), 16)
    columns = tl.arange(0, BLOCK_DV)
    share = tl.load(token)
    within = tl.load(token + 1) * HEADS + row % HEADS
    share_rows = (tl.load(token + 2) * HEADS).to(tl.int64)
    base = tl.load(shares + share * (1 + kv_heads)) + within
    count = tl.load(shares + share * (1 + kv_heads) + 1 + head)
    for start in range(0, tl.max(count, 0).to(tl.int32), BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)[:, None]
        scratch = base[None, :] + (split * kv_heads + head) * share_rows[None, :]  # [BLOCK_S, BLOCK_M]
        inside = (split < count[None, :]) & live[None, :]
        lse = tl.load(lses + scratch, mask=inside, other=float("-inf"))
        places = outs + scratch[:, :, None] * VALUE_DIM + columns[None, None, :]
        part = tl.load(places, mask=inside[:, :, None] & (columns < VALUE_DIM)[None, None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        weights = tl.exp2(lse - new_top[None, :])
        fade = tl.exp2(top - new_top)
        mass = mass * fade + tl.sum(weights, 0)
        acc = acc * fade[:, None] + tl.sum(part * weights[:, :, None], 0)
        top = new_top
    return top, mass, acc
