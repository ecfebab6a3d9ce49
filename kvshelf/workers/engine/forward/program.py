"""The forward pass of a model without its Python: lists of instructions in C between one attention and the next.

The model's own code is recorded once, which takes a tenth of a second for eight layers, and needs no compiler. The
numbers are those of the model's modules, except for the last bits of sums.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvshelf.kernels.rowwise import RowProgram, available
from kvshelf.workers.engine.forward.lowering import Lowered, lower
from kvshelf.workers.engine.forward.tracing import AttentionCall, trace
from kvshelf.workers.model.prepacking import PanelLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Attend = Callable[[AttentionCall, Tensor, Tensor, Tensor], Tensor | None]
"""An attention: of queries `[1, q_heads, N, D]`, keys `[1, kv_heads, N, D]` and values `[1, kv_heads, N, Dv]` of the
call's tokens, `[1, N, q_heads, Dv]` contiguous. None ends the pass."""

_LOG = logging.getLogger(__name__)


class ForwardProgram:
    """One model's forward pass. Not thread-safe, but attentions may run the same program in between."""

    def __init__(self, calls: Sequence[AttentionCall], lowered: Lowered) -> None:
        self._calls = calls
        self._lowered = lowered
        self._segments = [_Segment(i, lowered) for i in range(len(lowered.segments))]

    @classmethod
    def of(cls, model: PreTrainedModel) -> ForwardProgram | None:
        """The program of a model whose weights are in panels; None where there is no use in one, or a model's code does
        something that a list of instructions cannot say. Then the model itself runs."""
        modules = list(model.modules())
        experts = [
            m
            for m in modules
            if not isinstance(m, PanelLinear) and any(w.dim() > 2 for w in m.parameters(recurse=False))
        ]
        if not available() or experts or not any(isinstance(module, PanelLinear) for module in modules):
            return None
        try:
            traced = trace(model)
            return cls(traced.calls, lower(traced))
        except Exception as exc:  # whatever a model's code raises on tensors without numbers
            _LOG.info("%s runs by its own modules, which is slower: %s", type(model).__name__, exc)
            return None

    def run(self, token_ids: Tensor, positions: Tensor, attend: Attend, kept: Tensor | None) -> Tensor | None:
        """Logits `[1, kept, vocabulary]` of the tokens numbered in `kept` `[kept]`; None without `kept`, when all ends
        with the last attention. token_ids, positions: `[1, N]`."""
        tokens, lowered = token_ids.shape[1], self._lowered
        entered = lowered.first(tokens, token_ids, positions)
        held = {
            value.buffer: found.movedim(value.at, 0).reshape(tokens, -1).contiguous()
            for value, found in zip(lowered.entries, entered, strict=True)
        }
        for segment, call, (*given, out) in zip(self._segments[:-1], self._calls, lowered.attended, strict=True):
            segment.run(held, tokens)
            found = attend(call, *(each.tensor(held[each.buffer]) for each in given))
            if found is None:
                return None
            held[out.buffer] = found.view(tokens, -1)
            segment.forget(held)
            del found
        if kept is None:
            return None
        last = self._segments[-1]
        rows = {buffer: held[buffer].index_select(0, kept) for buffer in last.given}
        last.run(rows, len(kept))
        (logits,) = lowered.last(len(kept), *(value.tensor(rows[value.buffer]) for value in lowered.leavings))
        return logits


class _Segment:
    """The instructions before one attention, or after the last. given: the buffers from before that it or its attention
    needs, or the logits behind the last."""

    def __init__(self, index: int, lowered: Lowered) -> None:
        instructions, buffers = lowered.segments[index], lowered.buffers
        uses = [_used(i, lowered) for i in range(len(lowered.segments))]
        later = set().union(*uses[index + 1 :])
        written = {each.out.buffer for each in instructions}
        self.given = sorted(uses[index] - written)
        self._made = {buffer: buffers[buffer].width for buffer in written & (later | _taken(index, lowered))}
        self._done_with = (uses[index] | set(self._made)) - later
        self._program = RowProgram(instructions, buffers, [*self.given, *self._made])

    def run(self, held: dict[int, Tensor], rows: int) -> None:
        """Add what it makes to `held`, which has the buffers of `given`, each `[rows, width]`."""
        for buffer, width in self._made.items():
            held[buffer] = torch.empty(rows, width)
        self._program.run(held, rows)

    def forget(self, held: dict[int, Tensor]) -> None:
        """Drop what nothing needs after its attention."""
        for buffer in self._done_with:
            held.pop(buffer, None)


def _used(index: int, lowered: Lowered) -> set[int]:
    """The buffers that a segment reads, and those taken behind it; no constants."""
    read = {place.buffer for each in lowered.segments[index] for place in each.places[1:]}
    return {buffer for buffer in read if lowered.buffers[buffer].constant is None} | _taken(index, lowered)


def _taken(index: int, lowered: Lowered) -> set[int]:
    """The buffers that a segment leaves to its attention, or to the logits."""
    taken = lowered.attended[index][:3] if index < len(lowered.attended) else lowered.leavings
    return {value.buffer for value in taken}
