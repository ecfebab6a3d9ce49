"""Entries in the pages of vLLM: how they are written, and whether a vLLM reads them so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvshelf.errors import MissingExtra
from kvshelf.integrations.vllm.ragged.plugin import TESTED

Rows = tuple[Tensor, Tensor]
"""Keys and values `[entries, heads, D]` of a layer."""

QUESTION: Final = 16
"""Tokens that read the pages of a self-test."""

TOLERANCE: Final = {torch.float32: 0.01, torch.float16: 0.05, torch.bfloat16: 0.1}
"""Of values drawn with a deviation of 1; a question that reads other entries is off by about 1."""


def write_rows(layer: Any, rows: Rows, first: int, pages: Sequence[int], page: int) -> None:
    """Write the entries from `first` on to their places. layer: of vLLM. pages: of all entries, `page` in each."""
    places = torch.arange(first, first + len(rows[0]))
    slots = torch.tensor(pages)[places // page] * page + places % page
    device = layer.kv_cache.device
    keys, values = (part.to(device) for part in rows)
    layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots.to(device))


def require_read_back(config: Any, layers: Mapping[str, Any], pages: int, version: str) -> None:
    """Write entries into some of the `pages` of every layer, and have vLLM's own attention read them; milliseconds a
    layer. Before the first request, because it leaves the entries there. layers: of vLLM, by name.

    Raises `MissingExtra` where a layer reads other entries than were written, or has no such functions any more.
    """
    for name, layer in layers.items():
        try:
            with set_current_vllm_config(config), torch.inference_mode():
                error = _error(config, name, layer, pages)
        except Exception as failure:  # an unknown version may raise anything
            raise _unusable(version, f"{name}: {type(failure).__name__}: {failure}") from failure
        if not error <= TOLERANCE[config.model_config.dtype]:
            raise _unusable(version, f"{name} reads other entries than were written, by {error:.3g} at most")


def _unusable(version: str, why: str) -> MissingExtra:
    return MissingExtra(
        f"kvshelf cannot fill the pages of vLLM {version}: {why}; install a tested version, {' or '.join(TESTED)}"
    )


def _error(config: Any, name: str, layer: Any, pages: int) -> float:
    """The largest difference between vLLM's attention to entries in its pages and torch's to the same entries."""
    page, device = config.cache_config.block_size, layer.kv_cache.device
    entries = page + QUESTION
    used = range(pages - 2, 0, -2)[
        : -(-entries // page)
    ]  # apart, descending, others around: a miss hits no other memory
    draw = torch.Generator()
    draw.seed()  # not what an earlier test has left in the pages
    keys, values = torch.randn(2, entries, layer.num_kv_heads, layer.head_size, generator=draw)
    group = layer.num_heads // layer.num_kv_heads
    places = torch.arange(QUESTION) * entries // QUESTION
    queries = 2 * (keys[places] + keys[page:]).repeat_interleave(group, 1)  # one entry and its own: a mean tells less
    dtype = config.model_config.dtype
    queries, keys, values = (part.to(dtype) for part in (queries, keys, values))
    write_rows(layer, (keys, values), 0, used, page)
    new, read = slice(page, None), torch.empty(QUESTION, layer.num_heads, layer.head_size, dtype=dtype, device=device)
    layer.impl.forward(
        layer,
        *(part.to(device) for part in (queries, keys[new], values[new])),
        layer.kv_cache,
        _metadata(config, name, layer, torch.tensor([list(used)], dtype=torch.int32, device=device)),
        output=read,
    )
    mask = torch.arange(entries) <= torch.arange(page, entries)[:, None]
    q, k, v = (part.float().transpose(0, 1) for part in (queries, keys, values))
    k, v = (part.repeat_interleave(group, 0) for part in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=layer.impl.scale)
    return float((read.float().cpu() - expected.transpose(0, 1)).abs().max())


def _metadata(config: Any, name: str, layer: Any, table: Tensor) -> Any:
    """What a layer's attention is told of `QUESTION` tokens behind one full page. table: int32 `[1, pages]`."""
    page, device = config.cache_config.block_size, table.device
    entries = page + QUESTION
    places = torch.arange(page, entries, device=device)
    starts = torch.tensor([0, QUESTION], dtype=torch.int32)
    builder = layer.get_attn_backend().get_builder_cls()
    return builder(layer.get_kv_cache_spec(config), [name], config, device).build(
        0,
        CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor([entries], dtype=torch.int32, device=device),
            num_reqs=1,
            num_actual_tokens=QUESTION,
            max_query_len=QUESTION,
            max_seq_len=entries,
            block_table_tensor=table,
            slot_mapping=table[0].long()[places // page] * page + places % page,
        ),
    )
