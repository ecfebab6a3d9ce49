"""Column sums of causal attention in C, one query head at a time: see `native.c`.

Bytes: a head's queries are laid out by tiles once; keys are read once for each pass, rows once for every 256 keys, from
the cache. FLOPs: as the public function says, a product for each pass. Extra memory: two copies of one head's queries,
and 4 bytes a row.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from kvshelf.kernels.column_sums import eager
from kvshelf.kernels.native import Bf16Products, bf16_products, compiled, pointer

_ROWS = 32
"""Rows of a tile, two vectors."""

_MOST_DIM = 256


def column_sums(
    queries: Tensor, keys: Tensor, scale: float, local_rows: int = 0, every: int = 1, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if queries.shape[2] > _MOST_DIM:
        return eager.column_sums(queries, keys, scale, local_rows, every, lse)
    if keys.dtype != torch.bfloat16 or bf16_products() == Bf16Products.FP32:
        keys = keys.float()
    return eager.sums_by(_add_rows, queries, keys, scale, local_rows, every, lse)


def _add_rows(sums: Tensor, queries: Tensor, keys: Tensor, scale: float, lse: Tensor | None, rows: slice) -> None:
    native = compiled()
    queries = queries[:, rows]
    if keys.dtype == torch.bfloat16 and keys.shape[2] % 32:  # AMX takes channels in whole 64 bytes
        keys = torch.nn.functional.pad(keys, (0, -keys.shape[2] % 32))
    (q_heads, num_rows, _), (kv_heads, num_keys, dim) = queries.shape, keys.shape
    if not num_rows:
        return
    limits = _padded(torch.arange(num_keys - (num_rows - 1) * rows.step, num_keys + 1, rows.step).int()).view(-1, _ROWS)
    least, most = limits.amin(dim=1), limits.amax(dim=1)
    lses = sums.new_empty(q_heads, limits.numel()) if lse is None else _padded(lse[:, rows] * math.log2(math.e))
    sizes = (ctypes.c_int64 * 4)(len(limits), dim, num_keys, keys.stride(1))
    products = Bf16Products.FP32 if keys.dtype == torch.float32 else bf16_products()
    for head in range(q_heads):
        tiles = _tiles(
            queries[head].to(keys.dtype), len(limits), dim, _ROWS // 2 if products == Bf16Products.TILES else _ROWS
        )
        native.kvshelf_column_sums(
            pointer(tiles), pointer(keys[head * kv_heads // q_heads]), pointer(limits), pointer(least), pointer(most),
            pointer(lses[head]), lse is not None, pointer(sums[head]), sizes,
            ctypes.c_float(scale * math.log2(math.e)), products, torch.get_num_threads(),
        )  # fmt: skip


def _padded(of_rows: Tensor) -> Tensor:
    """`[..., R]` with zeros up to whole tiles."""
    return torch.nn.functional.pad(of_rows, (0, -of_rows.shape[-1] % _ROWS)).contiguous()


def _tiles(queries: Tensor, num_tiles: int, dim: int, lanes: int) -> Tensor:
    """Queries `[R, D]` as `[-1, dim, lanes]`, rows in the lanes, where bf16 channels go in pairs."""
    rows = queries.new_zeros(num_tiles * _ROWS, dim)
    rows[: queries.shape[0], : queries.shape[1]] = queries
    if rows.dtype == torch.bfloat16:
        rows = rows.view(torch.int32)
    return rows.view(num_tiles * _ROWS // lanes, lanes, -1).transpose(1, 2).contiguous()
