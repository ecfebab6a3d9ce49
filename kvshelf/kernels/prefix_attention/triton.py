"""Prefix attention in two kernels: one over splits of the prefixes, and one over the suffixes, which also combines the
splits' results.

A split is a run of rows of one head of a prefix (flash decoding). Its program keeps up to 64 query rows (tokens of a
share times query heads of a KV head) and their running softmax, reads keys and values tile by tile, dequantizes them in
registers, and writes output and log-sum-exp to fp32 scratch. The second kernel has a program for each block of query
rows of a row of a suffix and KV head: causal attention over the suffix, joined by the splits of its share, all in one
running softmax. There are no atomics: two runs give the same bits.

Launches a layer: one for each kind of prefix in the batch (plain, int4, merged, ...) and one for each of
`layout.suffixes`, whatever the number of documents; streamed prefixes run in torch's operations. Copies to the device:
the lengths once a step, and one copy a layer whenever prefixes or shares change. Scratch: 4 bytes * N * q_heads *
splits * (Dv + 1).

Batch 1, 32k rows a head, Llama-3.1-8B (8 KV heads of 4 query heads, D = 128, bf16): 134 MB of keys and values a layer,
31 us at the 4.3 TB/s that an H200 copies, against 0.54 GFLOP, 2.1 with 4 query rows padded to the 16 of a tensor
core's tile, 3 us at 788 TFLOP/s: bytes are the limit. Its 132 multiprocessors take two programs each; 32 splits of
1024 rows for each of the 8 heads are 256 programs, 97 % of the places in one round. Writing and reading the splits'
results moves 0.5 MB each way, 0.8 % of the bytes. By these numbers the first kernel can come near the copy rate; the
second adds a launch and some ten dependent loads (four splits at a time), a few us, which is most of what the design
loses at batch 1. Share of the limit on a GPU: not measured.

Slots of a merged prefix are folded by class, eight to a row (`heads.py`), so that a class's key and value are read and
multiplied once and not once per slot: gathered by slot, 32k slots would read as many bytes from the L2 cache as the
whole uncompressed prefix has. An exponential per slot and query row remains, for the padded 16 rows too.

Tiles are 64 rows by the head size for 16-bit states, 32 for slots, fp32 and D above 128; two are loading while one is
in use. That is 72 KiB of shared memory a program, so that two fit on an A100 as on an H100, and 64 KiB or more in
flight on each multiprocessor, where 32 KB cover 4.3 TB/s at a latency of 1 us. Codes of 4 bits take a quarter of that.
Questions of hundreds of tokens attend to their suffix without splits, in blocks of 32 query rows: not optimal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kvshelf.kernels.choose import choose
from kvshelf.kernels.prefix_attention import eager
from kvshelf.kernels.prefix_attention.heads import SLOTS_PER_ROW, PrefixKind
from kvshelf.kernels.prefix_attention.prefixes import BatchLayout, LogitRules, Prefix, choices_of
from kvshelf.kernels.prefix_attention.splits import attend_splits
from kvshelf.kernels.prefix_attention.union import attend_suffixes
from kvshelf.kernels.prefix_attention.work import COLUMNS, LEAST_SPLIT, Setting, WorkTable, work_of
from kvshelf.kernels.tiles import INTERPRETED

_WIDEST = 256
"""Most channels of a head."""


def prefix_attention(
    queries: Tensor,
    prefixes: Sequence[Sequence[Prefix]],
    suffixes: Sequence[tuple[Tensor, Tensor]],
    layout: BatchLayout,
    rules: LogitRules,
    least_split: int = LEAST_SPLIT,
    weights: Sequence[Tensor | None] = (),
) -> Tensor:
    """least_split: fewest rows of a prefix for one program. Torch's operations compute by rules beside the scale, for
    heads as wide as latents, of which no tile fits the shared memory, and the weights, from the log-sum-exps."""
    if not rules.plain or queries.shape[-1] > _WIDEST:
        return eager.prefix_attention(queries, prefixes, suffixes, layout, rules, weights)
    num_tokens, q_heads, _ = queries.shape
    kv_heads, value_dim = suffixes[0][1].shape[1], suffixes[0][1].shape[3]
    out = queries.new_empty(num_tokens, q_heads, value_dim)
    united = queries.new_empty(num_tokens, q_heads, dtype=torch.float32) if weights else None
    splits = None
    for parts, end in zip(prefixes, layout.share_ends, strict=True):
        for choice in choices_of(parts):
            choose(queries[end - 1], choice)
    if any(prefixes):
        setting = Setting(kv_heads, q_heads // kv_heads, queries.itemsize, _places(queries.device), least_split)
        table = work_of(prefixes, layout, setting)
        splits = _attend_prefixes(queries, prefixes, layout, table, value_dim, kv_heads, rules)
    tokens, tables = layout.tables
    for rows, shares, (keys, values) in zip(layout.suffixes, tables, suffixes, strict=True):
        _attend_suffixes(queries, keys, values, (out, united), (shares, tokens), splits, rows.new, rules.scale)
    if united is not None:
        eager.tell_weights(queries, prefixes, suffixes, layout, rules, united, weights)
    return out


class _SplitResults(NamedTuple):
    """Results of all splits: `[scratch rows, Dv]`, log-sum-exps `[scratch rows]`, and each share's rows among them."""

    outs: Tensor
    lses: Tensor
    shares: Tensor


def _attend_prefixes(
    queries: Tensor,
    prefixes: Sequence[Sequence[Prefix]],
    layout: BatchLayout,
    table: WorkTable,
    value_dim: int,
    kv_heads: int,
    rules: LogitRules,
) -> _SplitResults:
    _, q_heads, dim = queries.shape
    outs = queries.new_empty(table.scratch_rows, value_dim, dtype=torch.float32)
    lses = queries.new_empty(table.scratch_rows, dtype=torch.float32)
    for kind, items in table.launches:
        attend_splits[len(items),](
            queries, items, outs, lses, *queries.stride()[:2], rules.scale * math.log2(math.e),
            DIM=dim, HEADS=q_heads // kv_heads, COLUMNS=COLUMNS, UPCAST=INTERPRETED, **kind_constants(kind),
            **split_tiles(kind, queries.itemsize, table.block_m),
        )  # fmt: skip
    for share, place, start in table.streamed:
        end, count = layout.share_ends[share], layout.shares[share]
        tokens = queries[end - count : end].view(count, kv_heads, q_heads // kv_heads, dim)
        rows = tokens.transpose(0, 1).reshape(1, kv_heads, -1, dim)
        part, lse = eager.attend_prefix(rows, prefixes[share][place], rules)
        stop = start + lse.numel()
        outs[start:stop] = part.flatten(0, 2)
        lses[start:stop] = lse.flatten() * math.log2(math.e)
    return _SplitResults(outs, lses, table.shares)


def _attend_suffixes(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    results: tuple[Tensor, Tensor | None],
    tables: tuple[Tensor, Tensor],
    splits: _SplitResults | None,
    new: int,
    scale: float,
) -> None:
    """Fill the results of these rows' tokens: output, and log-sum-exps where there is a tensor for them. tables: first
    token and length of each row; the share of each token."""
    out, united = results
    kv_heads, dim, value_dim = keys.shape[1], keys.shape[3], values.shape[3]
    heads = queries.shape[1] // kv_heads
    tiles = suffix_tiles(dim, value_dim, queries.itemsize, new * heads)
    blocks = -(-new * heads // tiles["BLOCK_M"])
    attend_suffixes[(keys.shape[0] * blocks, kv_heads)](
        queries, keys, values, out, out if united is None else united, *tables,
        *((splits.shares, splits.outs, splits.lses) if splits is not None else (tables[1], out, out)),
        *queries.stride()[:2], *keys.stride()[:2], *values.stride()[:2], new, scale * math.log2(math.e),
        DIM=dim, VALUE_DIM=value_dim, HEADS=heads, KEY_STRIDE=keys.stride(2), VALUE_STRIDE=values.stride(2),
        ALIGNED=aligned(keys, values), PREFIXED=splits is not None, TELLING=united is not None, UPCAST=INTERPRETED,
        **tiles,
    )  # fmt: skip


def kind_constants(kind: PrefixKind) -> dict[str, int | bool]:
    """The compile-time arguments of `attend_splits` that follow from the kind of prefix."""
    named = {"KEY": kind.keys, "VALUE": kind.values}
    return {"SLOTS": SLOTS_PER_ROW if kind.merged else 0, "SELECTED": kind.selected} | {
        f"{name}_{field.upper()}": value for name, rows in named.items() for field, value in rows._asdict().items()
    }


def split_tiles(kind: PrefixKind, itemsize: int, block_m: int) -> dict[str, int]:
    """The tile sizes of `attend_splits`."""
    sizes = _head_blocks(kind.keys.dim, kind.values.dim)
    wide = max(sizes.values()) * itemsize > 256 or itemsize == 4
    block_n = 32 if wide or kind.merged or kind.selected else 64  # rows that lie apart have a scale each
    warps = 8 if wide or block_m == 64 else 4
    return sizes | {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "num_stages": 3}


def suffix_tiles(dim: int, value_dim: int, itemsize: int, rows: int) -> dict[str, int]:
    """The tile sizes of `attend_suffixes`, for `rows` query rows of a KV head."""
    sizes = _head_blocks(dim, value_dim)
    wide = max(sizes.values()) * itemsize > 256 or itemsize == 4
    block_m = min(32, max(16, triton.next_power_of_2(rows)))
    block_s = max(1, (512 if block_m == 16 else 128) // sizes["BLOCK_DV"])  # so that registers hold accumulators too
    return sizes | {
        "BLOCK_M": block_m,
        "BLOCK_N": 32 if wide else 64,
        "BLOCK_S": block_s,
        "num_warps": 8 if wide else 4,
        "num_stages": 2,
    }


def _head_blocks(dim: int, value_dim: int) -> dict[str, int]:
    return {"BLOCK_D": max(16, triton.next_power_of_2(dim)), "BLOCK_DV": max(16, triton.next_power_of_2(value_dim))}


def aligned(*tensors: Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes, so that loads can be 16 bytes wide."""
    starts = [tensor.data_ptr() for tensor in tensors]
    steps = [stride * tensor.itemsize for tensor in tensors for stride in tensor.stride()[:-1]]
    return all(number % 16 == 0 for number in (*starts, *steps))


def _places(device: torch.device) -> int:
    """Programs that run at a time: two for each multiprocessor."""
    if device.type != "cuda":
        return 264  # of an H100, for the interpreter
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count
