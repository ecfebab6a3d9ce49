"""The forward pass of a model without its Python: lists of instructions between one attention and the next.

The model's own code is recorded once, and its numbers are those of the modules but for the last bits of sums. On a CPU
the lists run in C; on a GPU as products of torch and kernels of Triton, a dozen launches a layer in place of forty.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvshelf.engine.forward.calls import AttentionCall, trace
from kvshelf.engine.forward.lowering import Lowered, lower
from kvshelf.kernels.native import Part, run_parts
from kvshelf.kernels.rowwise import row_programs
from kvshelf.kernels.rowwise.fusing import products_of_one
from kvshelf.kernels.rowwise.instructions import Buffer
from kvshelf.kernels.rowwise.native import BLOCK_ROWS, RowProgram
from kvshelf.model.prepacking import PanelLinear, join_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Logits = Callable[[Tensor], Tensor]
"""Makes the logits `[1, kept, vocabulary]` of the tokens of a pass that a tensor `[kept]` numbers. A vocabulary has
150,000 tokens: a caller that needs many rows makes some at a time."""

Attend = Callable[[AttentionCall, Tensor, Tensor, Tensor], Tensor | None]
"""An attention: of queries `[1, q_heads, N, D]`, keys `[1, kv_heads, N, D]` and values `[1, kv_heads, N, Dv]` of the
call's tokens, `[1, N, q_heads, Dv]` contiguous. None ends the pass."""

Before = Callable[[int, Tensor], None]
"""Called with the early queries of a layer `[1, q_heads, N, D]`, times the scaling of logits, before its attention."""

PlanAttention = Callable[[AttentionCall, Tensor, Tensor, Tensor, Tensor], Part | None]
"""An attention that runs later, from the inputs of `Attend` and `[N, q_heads, Dv]` for its result. None where only
`Attend` can attend."""

_LOG = logging.getLogger(__name__)


class ForwardProgram:
    """One model's forward pass. Not thread-safe, but attentions may run the same program in between. in_c: whether C
    runs it, which takes attentions that run later, too."""

    def __init__(self, calls: Sequence[AttentionCall], lowered: Lowered, kind: type[RowProgram]) -> None:
        self.in_c = kind is RowProgram
        self._calls = calls
        self._lowered = lowered
        self._segments = [_Segment(i, lowered, kind) for i in range(len(lowered.segments))]
        self._room = _Room(self._segments, lowered)

    @classmethod
    def of(cls, model: PreTrainedModel, *, early: bool = False) -> ForwardProgram | None:
        """The program of a model on a GPU, or whose weights are in panels; None where a program is of no use, or the
        model's code is no list of instructions. Then the model itself runs. On a GPU weights that multiply the same
        values are joined in place. early: with early queries, see `trace`."""
        panels = [module for module in model.modules() if isinstance(module, PanelLinear)]
        others = (module for module in model.modules() if not isinstance(module, PanelLinear))
        experts = any(weight.dim() > 2 for module in others for weight in module.parameters(recurse=False))
        kind = row_programs(model.device)
        plain = kind is not RowProgram
        if kind is None or experts or not (plain or panels):
            return None
        try:
            traced = trace(model, early=early)
            if plain:  # nothing may refer to a list, and with it to the weights as they were, while they are joined
                segments = lower(traced, plain).segments
                groups = [group for segment in segments for group in products_of_one(segment)]
                del segments
                join_weights(model, groups)
            return cls(traced.calls, lower(traced, plain), kind)
        except Exception as exc:  # whatever a model's code raises on tensors without numbers
            _LOG.info("%s runs by its own modules, which is slower: %s", type(model).__name__, exc)
            return None

    def run(self, token_ids: Tensor, positions: Tensor, attend: Attend, before: Before | None = None) -> Logits | None:
        """One pass. Returns the function of its logits; None where `attend` ended it. token_ids, positions: `[1, N]`.
        before: called with the early queries of each layer that has some."""
        tokens, lowered = token_ids.shape[1], self._lowered
        rows = dict(self._entries(token_ids, positions))
        layers = zip(self._segments[:-1], self._calls, lowered.attended, lowered.early, strict=True)
        for segment, call, (*states, out), early in layers:
            segment.run(rows, tokens)
            if before is not None and early is not None:
                before(call.layer, early.tensor(rows[early.buffer]))
            result = attend(call, *(value.tensor(rows[value.buffer]) for value in states))
            if result is None:
                return None
            rows[out.buffer] = result.view(tokens, -1).to(lowered.buffers[out.buffer].dtype)
            segment.forget(rows)
            del result
        return partial(self._logits, rows)

    def run_planned(
        self,
        token_ids: Tensor,
        positions: Tensor,
        plan: PlanAttention,
        kept: Tensor,
        checkpoint: Callable[[], None],
        before: Before | None = None,
    ) -> Tensor | None:
        """Logits `[1, kept, vocabulary]`, as of `run`. Few tokens pass through all layers in one call of C, because
        Python between two layers takes as long as a layer; more tokens, and passes with `before`, in one call for each
        layer. None, before anything has run, where `plan` returns None."""
        tokens = token_ids.shape[1]
        rows, attended, early = self._room.laid_out(tokens)
        attentions: list[Part] = []
        for call, states in zip(self._calls, attended, strict=True):
            attention = plan(call, *states)
            if attention is None:
                return None
            attentions.append(attention)
        for buffer, numbers in self._entries(token_ids, positions):
            rows[buffer].copy_(numbers)
        parts: list[Part] = []
        for segment, attention, call, queries in zip(self._segments[:-1], attentions, self._calls, early, strict=True):
            parts.append(segment.program.part(rows, tokens))
            if before is not None and queries is not None:
                run_parts(parts)
                parts.clear()
                before(call.layer, queries)
            parts.append(attention)
            if tokens > BLOCK_ROWS:
                run_parts(parts)
                parts.clear()
                checkpoint()
        if parts:
            run_parts(parts)
            checkpoint()
        return self._logits(rows, kept)

    def _entries(self, token_ids: Tensor, positions: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The buffers with which the segments begin, `[N, width]`."""
        tokens = token_ids.shape[1]
        tensors = self._lowered.first(tokens, token_ids, positions)
        for value, tensor in zip(self._lowered.entries, tensors, strict=True):
            dtype = self._lowered.buffers[value.buffer].dtype
            yield value.buffer, tensor.movedim(value.at, 0).reshape(tokens, -1).to(dtype).contiguous()

    def _logits(self, rows: Mapping[int, Tensor], kept: Tensor) -> Tensor:
        last = self._segments[-1]
        kept_rows = {buffer: rows[buffer].index_select(0, kept) for buffer in last.inputs}
        last.run(kept_rows, len(kept))
        leavings = (value.tensor(kept_rows[value.buffer]) for value in self._lowered.leavings)
        (logits,) = self._lowered.last(len(kept), *leavings)
        return logits


class _Room:
    """Memory for all buffers of a pass, before it runs. Few tensors are enough, because buffers of one kind, one used
    after the other, share a tensor."""

    def __init__(self, segments: Sequence[_Segment], lowered: Lowered) -> None:
        self._lowered = lowered
        self._kinds: list[_Kind] = []
        self._number: dict[int, int] = {}
        self._laid: tuple[int, dict[int, Tensor], list[tuple[Tensor, ...]], list[Tensor | None]] | None = None
        free: dict[_Kind, list[int]] = {}
        for value in lowered.entries:
            self._take(value.buffer, free)
        for segment, (*_, out) in zip(segments, lowered.attended, strict=False):
            for buffer in (*segment.outputs, out.buffer):
                self._take(buffer, free)
            for buffer in segment.last_uses & self._number.keys():
                free[_kind(lowered.buffers[buffer])].append(self._number[buffer])

    def _take(self, buffer: int, free: dict[_Kind, list[int]]) -> None:
        kind = _kind(self._lowered.buffers[buffer])
        if not free.setdefault(kind, []):
            self._kinds.append(kind)
            free[kind].append(len(self._kinds) - 1)
        self._number[buffer] = free[kind].pop()

    def laid_out(self, rows: int) -> tuple[dict[int, Tensor], list[tuple[Tensor, ...]], list[Tensor | None]]:
        """The tensors of all buffers, `[rows, width]`; for each attention its queries, keys and values in the model's
        shapes, with `[rows, q_heads, Dv]` for its result; and its early queries. The same until the number of rows
        changes."""
        if self._laid is None or self._laid[0] != rows:
            memory = [torch.empty(rows, width, dtype=dtype) for width, dtype in self._kinds]
            buffers = {buffer: memory[number] for buffer, number in self._number.items()}
            attended = [
                (*(value.tensor(buffers[value.buffer]) for value in states), out.tensor(buffers[out.buffer])[0])
                for *states, out in self._lowered.attended
            ]
            early = [None if value is None else value.tensor(buffers[value.buffer]) for value in self._lowered.early]
            self._laid = rows, buffers, attended, early
        return self._laid[1:]


_Kind = tuple[int, torch.dtype]
"""Elements of a row, and their dtype."""


def _kind(buffer: Buffer) -> _Kind:
    return buffer.width, buffer.dtype


class _Segment:
    """The instructions before one attention, or after the last. inputs: the earlier buffers that it or its attention
    reads, or the logits behind the last. outputs: the buffers that it adds to these. last_uses: the buffers that
    nothing reads after its attention."""

    def __init__(self, index: int, lowered: Lowered, kind: type[RowProgram]) -> None:
        instructions, buffers = lowered.segments[index], lowered.buffers
        uses = [_read(i, lowered) for i in range(len(lowered.segments))]
        later = set().union(*uses[index + 1 :])
        written = {instruction.out.buffer for instruction in instructions}
        self.inputs = sorted(uses[index] - written)
        self.outputs = {buffer: _kind(buffers[buffer]) for buffer in written & (later | _read_behind(index, lowered))}
        self.last_uses = (uses[index] | set(self.outputs)) - later
        self.program = kind(instructions, buffers, [*self.inputs, *self.outputs])

    def run(self, rows: dict[int, Tensor], count: int) -> None:
        """Add the outputs to `rows`, which has the inputs, each `[count, width]`."""
        device = rows[self.inputs[0]].device
        for buffer, (width, dtype) in self.outputs.items():
            rows[buffer] = torch.empty(count, width, dtype=dtype, device=device)
        self.program.run(rows, count)

    def forget(self, rows: dict[int, Tensor]) -> None:
        """Drop the buffers that nothing reads after its attention."""
        for buffer in self.last_uses:
            rows.pop(buffer, None)


def _read(index: int, lowered: Lowered) -> set[int]:
    """The buffers that a segment, or the attention or logits behind it, read; no constants."""
    read = {place.buffer for instruction in lowered.segments[index] for place in instruction.places[1:]}
    return {buffer for buffer in read if lowered.buffers[buffer].constant is None} | _read_behind(index, lowered)


def _read_behind(index: int, lowered: Lowered) -> set[int]:
    """The buffers that the attention behind a segment, or the logits, read."""
    last = index == len(lowered.attended)
    values = lowered.leavings if last else (*lowered.attended[index][:3], lowered.early[index])
    return {value.buffer for value in values if value is not None}
