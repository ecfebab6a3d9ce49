"""vLLM's attention on a CPU, with a page table for each KV head where a request needs it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from kvshelf.integrations.vllm.ragged.pages import HeadTables, StepRows


class RowsImpl(CPUAttentionBackendImpl):  # type: ignore[misc]  # without vLLM its type is unknown
    """Attention of one layer. rows: of the worker, if a connector of kvshelf reads caches into its pages."""

    rows: HeadTables | None = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *others: Any,
        **named: Any,
    ) -> Tensor:
        """As of vLLM's own, and writes the new entries first."""
        rows = None if self.rows is None or attn_metadata is None else self.rows.of(attn_metadata)
        if rows is not None:
            return self._by_rows(layer, (query, key, value), rows, attn_metadata, output)
        if attn_metadata is not None and key is not None and self.kv_sharing_target_layer_name is None:
            self.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
        attended: Tensor = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *others, **named)
        return attended

    def _by_rows(
        self, layer: Any, states: tuple[Tensor, Tensor, Tensor], rows: StepRows, metadata: Any, output: Tensor
    ) -> Tensor:
        """Each KV head of each request as a sequence of one head."""
        assert self.rows is not None
        at, pages, size = self.rows.index[layer.layer_name], self.rows.storage.rows, self.head_size
        count, group = metadata.num_actual_tokens, self.num_queries_per_kv
        query, key, value = (part[:count] for part in states)
        self.do_kv_cache_update(layer, key.reshape(-1, 1, size), value.reshape(-1, 1, size), pages, rows.slots[at])
        of_heads = replace(
            metadata,
            num_actual_tokens=len(rows.order),
            query_start_loc=rows.starts,
            seq_lens=rows.lengths[at],
            block_table=rows.tables[at],
            slot_mapping=rows.slots[at],
            scheduler_metadata=ops.cpu_attn_get_scheduler_metadata(
                num_reqs=len(rows.lengths[at]),
                num_heads=group,
                num_kv_heads=1,
                head_dim=size,
                seq_lens=rows.lengths[at],
                dtype=query.dtype,
                query_start_loc=rows.starts,
                causal=True,
                sliding_window_size=-1,
                isa=layer.isa,
                enable_kv_split=False,
            ),
        )
        queries = query.reshape(-1, group, size)[rows.order]
        attended = torch.empty_like(queries)
        super().forward(layer, queries, key, value, pages, of_heads, attended)
        output[:count].view(-1, group, size)[rows.order] = attended
        return output


class RowsBackend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's own but for `RowsImpl`, which writes entries itself: they go to other places for some requests."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[RowsImpl]:
        return RowsImpl
