"""Which tokens of its documents an answer read, where a selector chooses."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvshelf.artifact.records import PackedRecord, Recent
from kvshelf.engine.attention.attachment import Attached
from kvshelf.engine.decode.selection import Selection
from kvshelf.kernels.prefix_attention import SelectedPrefix


class Passages:
    """Counts how often one answer read each token of its documents.

    A read is one token of the answer at one KV head of a layer that chooses. Choices overwrite their tables, so `count`
    comes after each step.
    """

    def __init__(self, document: Attached) -> None:
        self._document = document
        self._reads = [torch.zeros(part.num_tokens, dtype=torch.int64) for part in document.parts]
        self._most = 0
        """Reads of a token that every head read every time."""

    def count(self, seen: Attached | Selection) -> None:
        """Add what one token of the answer read. A token that reads all chooses nothing, and does not count. On a
        device it waits for each choice."""
        for layer in range(self._document.num_layers):
            chosen = seen.prefixes(layer)
            if not any(isinstance(prefix, SelectedPrefix) for prefix in chosen):
                continue
            self._most += len(chosen[0].lengths)
            for (reads, record), prefix in zip(self._records(layer), chosen, strict=True):
                if not isinstance(prefix, SelectedPrefix):
                    continue  # it is empty
                rows, counts = prefix.chosen.rows, prefix.chosen.counts
                there = torch.arange(rows.shape[1], device=rows.device) < counts.unsqueeze(1)
                first = torch.tensor(record.offsets[:-1], device=rows.device).unsqueeze(1)
                _add(reads, record, (first + rows)[there])

    def shares(self) -> tuple[bytes, ...]:
        """Of each document, one byte for each token: round(255 * share of the reads that it could have had).

        Where no token of the answer chose, everything stored was read: the share is that of the heads that hold the
        token, in the layers that hold the whole document.
        """
        if not self._most:
            self._count_all()
        shares = (reads.double() / max(1, self._most) for reads in self._reads)
        return tuple((255 * share).round().to(torch.uint8).numpy().tobytes() for share in shares)

    def _count_all(self) -> None:
        for layer in range(self._document.num_layers):
            for number, (reads, record) in enumerate(self._records(layer)):
                if not isinstance(record, Recent):
                    _add(reads, record, torch.arange(record.entries))
                    self._most += record.kv_heads if number == 0 else 0

    def _records(self, layer: int) -> Iterator[tuple[Tensor, PackedRecord]]:
        """The record of each prefix of a layer, with the reads of its document."""
        for part, reads in zip(self._document.parts, self._reads, strict=True):
            for record in part.entries(layer):
                yield reads, record


def _add(reads: Tensor, record: PackedRecord, entries: Tensor) -> None:
    """Count these entries, which are rows of the record over all its heads."""
    positions = record.entry_positions
    found = positions[entries.to(positions.device)].cpu()
    reads.index_add_(0, found, torch.ones_like(found, dtype=reads.dtype))
