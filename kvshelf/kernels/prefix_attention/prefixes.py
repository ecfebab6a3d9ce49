"""What a KV head may attend to before the suffix: tensors as they are, rows made when read, and merged tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvshelf.kernels.prefix_attention.attend import attend, combine, rows_per_block

_ROWS_PER_BLOCK = 1024
"""Rows of a `StreamedPrefix` made at once: keys and values are 512 KiB at D = 128 in bf16, and stay in the L2 cache."""

Block = Callable[[int, int], tuple[Tensor, Tensor]]
"""`block(start, stop)` makes the keys `[stop - start, D]` and values `[stop - start, Dv]` of these rows, in the dtype
and on the device of the queries. It is called anew at every attention; what it returns is not kept."""


class Prefix(Protocol):
    """Tokens that every query sees, for one KV head."""

    def attend(self, rows: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attention of `[R, D]` queries over these tokens alone: the output `[R, Dv]` in a floating dtype of its choice
        and the log-sum-exp of the logits `[R]` in fp32, which is -inf (and the output 0) if there are no tokens."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class DensePrefix:
    """Keys `[K, D]` and values `[K, Dv]`, read in place, in the dtype of the queries.

    Bytes: every key and value once. FLOPs: 2 * R * K * (D + Dv).
    """

    keys: Tensor
    values: Tensor

    def attend(self, rows: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """See `Prefix.attend`. The output has the dtype of the queries."""
        out, lse = attend(rows[None, None], self.keys[None, None], self.values[None, None], scale)
        return out[0, 0], lse[0, 0]


@dataclass(frozen=True, eq=False, slots=True)
class StreamedPrefix:
    """Rows that exist only while they are read: quantized ones, or keys that are still to be rotated.

    1024 rows are made, attended to and thrown away at a time, so that a long prefix never stands in memory at full
    size. Bytes: what `block` reads, plus each block written and read once in cache. FLOPs: 2 * R * K * (D + Dv) and
    those of `block`, which do not depend on R.
    """

    num_rows: int
    block: Block

    def attend(self, rows: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """See `Prefix.attend`. The blocks are summed in fp32; the output is fp32 unless there is only one."""
        out, lse = self._attend_block(0, rows, scale)
        for start in range(_ROWS_PER_BLOCK, self.num_rows, _ROWS_PER_BLOCK):
            out, lse = combine(out, lse, *self._attend_block(start, rows, scale))
        return out, lse

    def _attend_block(self, start: int, rows: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        keys, values = self.block(start, min(start + _ROWS_PER_BLOCK, self.num_rows))
        return DensePrefix(keys, values).attend(rows, scale)


@dataclass(frozen=True, eq=False, slots=True)
class MergedPrefix:
    """Tokens (slots) that share the key direction and the value of a class.

    Slot i stands for a token with key `slot_scales[i] * keys[c]` and value `values[c]`, c = `slot_classes[i]`:

        logit_i = slot_scales[i] * (scale * q . keys[c]),  mass_c = sum of softmax(logit)_i over the slots of c,
        out = mass @ values.

    This is exact, and nothing of size slots x D is made: the keys are multiplied once per class. `block(0,
    num_classes)` makes all classes of the head at once, for they are few. slot_scales: `[slots]` fp32; slot_classes:
    `[slots]` int64 in 0..num_classes-1. A class without a slot has no mass.
    Bytes: each class once, slots * 12, and 3 passes over R * slots fp32 logits. FLOPs: 2 * R * classes * (D + Dv) +
    about 5 * R * slots.
    """

    num_classes: int
    block: Block
    slot_scales: Tensor
    slot_classes: Tensor

    def attend(self, rows: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """See `Prefix.attend`. Logits, masses and output are fp32; the queries go in blocks of rows."""
        keys, values = self.block(0, self.num_classes)
        keys_t, values = keys.float().T, values.float()
        outs, lses = [], []
        for block in torch.split(rows, rows_per_block(self.slot_scales.shape[0])):
            logits = torch.matmul(block.float() * scale, keys_t)  # [rows, classes]
            slots = logits.index_select(1, self.slot_classes).mul_(self.slot_scales)  # [rows, slots]
            lse = slots.logsumexp(dim=-1)
            mass = torch.zeros_like(logits).index_add_(1, self.slot_classes, slots.sub_(lse.unsqueeze(-1)).exp_())
            outs.append(torch.matmul(mass, values))
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)
