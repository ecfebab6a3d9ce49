"""The forward pass of a model without its Python: lists of instructions between one attention and the next.

The model's own code is recorded once, which takes a tenth of a second for eight layers, and needs no compiler. The
numbers are those of the model's modules, except for the last bits of sums. On a CPU the lists run in C; on a GPU as
products of torch and kernels of Triton, a dozen launches a layer in place of forty.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvshelf.engine.forward.lowering import Lowered, lower
from kvshelf.engine.forward.tracing import AttentionCall, trace
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
150,000 tokens: whoever wants many rows asks for some at a time."""

Attend = Callable[[AttentionCall, Tensor, Tensor, Tensor], Tensor | None]
"""An attention: of queries `[1, q_heads, N, D]`, keys `[1, kv_heads, N, D]` and values `[1, kv_heads, N, Dv]` of the
call's tokens, `[1, N, q_heads, Dv]` contiguous. None ends the pass."""

Before = Callable[[int, Tensor], None]
"""Takes the early queries of a layer `[1, q_heads, N, D]`, times the scaling of logits, before its attention runs."""

PlanAttention = Callable[[AttentionCall, Tensor, Tensor, Tensor, Tensor], Part | None]
"""An attention that runs later: the inputs of `Attend`, and `[N, q_heads, Dv]` where its result goes. None where only
`Attend` can attend."""

_LOG = logging.getLogger(__name__)


class ForwardProgram:
    """One model's forward pass. Not thread-safe, but attentions may run the same program in between. in_c: whether C
    runs it, which takes attentions that run later, too."""

    def __init__(self, calls: Sequence[AttentionCall], lowered: Lowered, kind: type[RowProgram] = RowProgram) -> None:
        self.in_c = kind is RowProgram
        self._calls = calls
        self._lowered = lowered
        self._segments = [_Segment(i, lowered, kind) for i in range(len(lowered.segments))]
        self._room = _Room(self._segments, lowered)

    @classmethod
    def of(cls, model: PreTrainedModel, *, early: bool = False) -> ForwardProgram | None:
        """The program of a model on a GPU, or whose weights are in panels; None where there is no use in one, or a
        model's code does something that a list of instructions cannot say. Then the model itself runs. On a GPU weights
        that multiply the same values are joined in place. early: with early queries, see `trace`."""
        modules = list(model.modules())
        experts = [
            m
            for m in modules
            if not isinstance(m, PanelLinear) and any(w.dim() > 2 for w in m.parameters(recurse=False))
        ]
        kind = row_programs(model.device)
        plain = kind is not RowProgram
        if kind is None or experts or not (plain or any(isinstance(module, PanelLinear) for module in modules)):
            return None
        try:
            traced = trace(model, early=early)
            if plain:  # nothing may hold a list, and with it the weights as they were, while they are joined
                segments = lower(traced, plain).segments
                groups = [group for segment in segments for group in products_of_one(segment)]
                del segments
                join_weights(model, groups)
            return cls(traced.calls, lower(traced, plain), kind)
        except Exception as exc:  # whatever a model's code raises on tensors without numbers
            _LOG.info("%s runs by its own modules, which is slower: %s", type(model).__name__, exc)
            return None

    def run(self, token_ids: Tensor, positions: Tensor, attend: Attend, before: Before | None = None) -> Logits | None:
        """One pass, whose logits can be asked for. None where `attend` ended it. token_ids, positions: `[1, N]`.
        before: is given the early queries of each layer that has some."""
        tokens, lowered = token_ids.shape[1], self._lowered
        held = dict(self._entered(token_ids, positions))
        each_layer = zip(self._segments[:-1], self._calls, lowered.attended, lowered.early, strict=True)
        for segment, call, (*given, out), early in each_layer:
            segment.run(held, tokens)
            if before is not None and early is not None:
                before(call.layer, early.tensor(held[early.buffer]))
            found = attend(call, *(each.tensor(held[each.buffer]) for each in given))
            if found is None:
                return None
            held[out.buffer] = found.view(tokens, -1).to(lowered.buffers[out.buffer].dtype)
            segment.forget(held)
            del found
        return partial(self._logits, held)

    def run_planned(
        self,
        token_ids: Tensor,
        positions: Tensor,
        plan: PlanAttention,
        kept: Tensor,
        checkpoint: Callable[[], None],
        before: Before | None = None,
    ) -> Tensor | None:
        """Logits `[1, kept, vocabulary]`, as of `run`, but few tokens pass through all layers in one call of C, because
        Python between two layers takes as long as they do; and more in a call a layer, as with `before`. None, before
        anything has run, where `plan` gives None."""
        tokens = token_ids.shape[1]
        held, attended, early = self._room.laid_out(tokens)
        attentions: list[Part] = []
        for call, given in zip(self._calls, attended, strict=True):
            attention = plan(call, *given)
            if attention is None:
                return None
            attentions.append(attention)
        for buffer, numbers in self._entered(token_ids, positions):
            held[buffer].copy_(numbers)
        parts: list[Part] = []
        for segment, attention, call, queries in zip(self._segments[:-1], attentions, self._calls, early, strict=True):
            parts.append(segment.part(held, tokens))
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
        return self._logits(held, kept)

    def _entered(self, token_ids: Tensor, positions: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The buffers with which the segments begin, `[N, width]`."""
        tokens = token_ids.shape[1]
        entered = self._lowered.first(tokens, token_ids, positions)
        for value, found in zip(self._lowered.entries, entered, strict=True):
            dtype = self._lowered.buffers[value.buffer].dtype
            yield value.buffer, found.movedim(value.at, 0).reshape(tokens, -1).to(dtype).contiguous()

    def _logits(self, held: Mapping[int, Tensor], kept: Tensor) -> Tensor:
        last = self._segments[-1]
        rows = {buffer: held[buffer].index_select(0, kept) for buffer in last.given}
        last.run(rows, len(kept))
        (logits,) = self._lowered.last(
            len(kept), *(value.tensor(rows[value.buffer]) for value in self._lowered.leavings)
        )
        return logits


class _Room:
    """Memory for all buffers of a pass, before it runs: few, because a buffer that is done with makes room for others
    of its kind."""

    def __init__(self, segments: Sequence[_Segment], lowered: Lowered) -> None:
        self._lowered = lowered
        self._kinds: list[_Kind] = []
        self._number: dict[int, int] = {}
        self._laid: tuple[int, dict[int, Tensor], list[tuple[Tensor, ...]], list[Tensor | None]] | None = None
        free: dict[_Kind, list[int]] = {}
        for value in lowered.entries:
            self._take(value.buffer, free)
        for segment, (*_, out) in zip(segments, lowered.attended, strict=False):
            for buffer in (*segment.made, out.buffer):
                self._take(buffer, free)
            for buffer in segment.done_with & self._number.keys():
                free.setdefault(_kind(lowered.buffers[buffer]), []).append(self._number[buffer])

    def _take(self, buffer: int, free: dict[_Kind, list[int]]) -> None:
        kind = _kind(self._lowered.buffers[buffer])
        if not free.get(kind):
            self._kinds.append(kind)
            free[kind] = [len(self._kinds) - 1]
        self._number[buffer] = free[kind].pop()

    def laid_out(self, rows: int) -> tuple[dict[int, Tensor], list[tuple[Tensor, ...]], list[Tensor | None]]:
        """The tensors of all buffers, `[rows, width]`, and for each attention the queries, keys and values as the model
        has them, with `[rows, q_heads, Dv]` for its result, and its early queries. The same until the number of rows
        changes."""
        if self._laid is None or self._laid[0] != rows:
            memory = [torch.empty(rows, width, dtype=dtype) for width, dtype in self._kinds]
            held = {buffer: memory[number] for buffer, number in self._number.items()}
            attended = [
                (*(each.tensor(held[each.buffer]) for each in given), out.tensor(held[out.buffer])[0])
                for *given, out in self._lowered.attended
            ]
            early = [None if each is None else each.tensor(held[each.buffer]) for each in self._lowered.early]
            self._laid = rows, held, attended, early
        return self._laid[1:]


_Kind = tuple[int, torch.dtype]
"""Elements of a row, and what they are."""


def _kind(buffer: Buffer) -> _Kind:
    return buffer.width, buffer.dtype


class _Segment:
    """The instructions before one attention, or after the last. given: the buffers from before that it or its attention
    needs, or the logits behind the last. made: what it adds to these. done_with: what nothing needs
    after its attention."""

    def __init__(self, index: int, lowered: Lowered, kind: type[RowProgram]) -> None:
        instructions, buffers = lowered.segments[index], lowered.buffers
        uses = [_used(i, lowered) for i in range(len(lowered.segments))]
        later = set().union(*uses[index + 1 :])
        written = {each.out.buffer for each in instructions}
        self.given = sorted(uses[index] - written)
        self.made = {buffer: _kind(buffers[buffer]) for buffer in written & (later | _taken(index, lowered))}
        self.done_with = (uses[index] | set(self.made)) - later
        self._program = kind(instructions, buffers, [*self.given, *self.made])

    def run(self, held: dict[int, Tensor], rows: int) -> None:
        """Add what it makes to `held`, which has the buffers of `given`, each `[rows, width]`."""
        device = held[self.given[0]].device
        for buffer, (width, dtype) in self.made.items():
            held[buffer] = torch.empty(rows, width, dtype=dtype, device=device)
        self._program.run(held, rows)

    def part(self, held: Mapping[int, Tensor], rows: int) -> Part:
        """As `run`, with room in `held` for what it makes."""
        return self._program.part(held, rows)

    def forget(self, held: dict[int, Tensor]) -> None:
        """Drop what nothing needs after its attention."""
        for buffer in self.done_with:
            held.pop(buffer, None)


def _used(index: int, lowered: Lowered) -> set[int]:
    """The buffers that a segment reads, and those taken behind it; no constants."""
    read = {place.buffer for each in lowered.segments[index] for place in each.places[1:]}
    return {buffer for buffer in read if lowered.buffers[buffer].constant is None} | _taken(index, lowered)


def _taken(index: int, lowered: Lowered) -> set[int]:
    """The buffers that a segment leaves to its attention, or to the logits."""
    last = index == len(lowered.attended)
    taken = lowered.leavings if last else (*lowered.attended[index][:3], lowered.early[index])
    return {value.buffer for value in taken if value is not None}
