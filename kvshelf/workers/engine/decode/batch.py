"""Many answers, one forward pass per step: the tokens of all rows in one flat sequence.

A step takes the next token of every answer, or the question of a new one. The tokens of a row see the row's document
and the row's suffix, at the row's positions. Rows that share a document are adjacent, so that its prefix is read once.
Only suffixes are padded, and no prefix is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvshelf.errors import CacheUnusable
from kvshelf.kernels.native import Part
from kvshelf.kernels.prefix_attention import BatchLayout, LogitRules, Scratch, SuffixRows, attention_part
from kvshelf.workers.engine.attention.attached import AttachedStates, PassingLayer
from kvshelf.workers.engine.attention.attachment import Attachment, Wait, block
from kvshelf.workers.engine.decode.generation import Checkpoint, Generation
from kvshelf.workers.engine.decode.suffixes import Slab, SuffixPool
from kvshelf.workers.engine.forward.passes import Passes

MAX_NEW_TOKENS = 512
"""Most tokens of one step. A longer question takes several steps, so that the other answers still get their tokens."""


class DecodeBatch:
    """The open answers of one model. Not thread-safe: one thread owns the model.

    The answer of a row does not depend on the other rows, except for last bits of sums. Where it would (a RoPE that
    changes with the longest position of the call), `one_by_one` gives every row a forward pass of its own.
    """

    def __init__(self, passes: Passes, *, one_by_one: bool = False) -> None:
        self._passes = passes
        self._one_by_one = one_by_one
        self._layers: int = passes.model.config.num_hidden_layers
        self._pool = SuffixPool(self._layers)
        self._plan: _Plan | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the suffixes of all open answers hold."""
        return self._pool.nbytes

    def step(
        self, generations: Sequence[Generation], checkpoint: Checkpoint | None = None, wait: Wait = block
    ) -> list[str | Exception]:
        """Run one forward pass. Returns, for each answer, the text that became final (possibly "") or its error.

        An answer that had an error is over: `leave` is all that may follow. `checkpoint` is called after each layer and
        may raise to abandon the step. If the step raises, every answer stays as it was; where rows have forward passes
        of their own, each row gets the error of its own pass instead. `wait` is called while a document's next layer
        has not arrived, and may step other answers meanwhile.
        """
        if self._one_by_one and len(generations) > 1:
            return [self._told_alone(generation, checkpoint, wait) for generation in generations]
        step = _Step.of(generations, self._pool, self._passes.model.device)
        if self._plan is None or not self._plan.continued_by(step):
            self._plan = _Plan(step)
        past = _StepPast(step, self._layers, checkpoint or _nothing, wait, self._plan)
        logits = self._passes.continuing(step.token_ids, step.positions, past, step.last_tokens)[0]
        likeliest = _likeliest(logits)
        # From here on every answer has moved on, so nothing may be raised.
        for place in step.places:
            place.generation.appended(place.count)
        asking = [place.generation for place in step.places if place.complete]
        told = {id(g): _token_taken(g, logits, row, likeliest[row]) for row, g in enumerate(asking)}
        return [told.get(id(generation), "") for generation in generations]

    def _told_alone(self, generation: Generation, checkpoint: Checkpoint | None, wait: Wait) -> str | Exception:
        try:
            return self.step([generation], checkpoint, wait)[0]
        except Exception as exc:  # raising it would lose the texts of the answers before this one
            return exc

    def leave(self, generation: Generation) -> None:
        """Free the suffix of an answer, finished or abandoned. It cannot be stepped again."""
        self._plan = None  # it holds the suffixes' memory
        self._pool.release(generation.row)


@dataclass(frozen=True)
class _Place:
    """The tokens of one row in a step: `first` to `first + count` of the batch. `complete`: no token is left for a
    later step, so the row's next token can be chosen."""

    generation: Generation
    first: int
    count: int
    complete: bool
    slab: Slab


class _Step:
    """The tokens of one step, their positions, and the rows that they belong to."""

    def __init__(self, places: Sequence[_Place], device: torch.device) -> None:
        self.places = places
        ids = [token for p in places for token in p.generation.pending[: p.count]]
        positions = [p.generation.next_position + i for p in places for i in range(p.count)]
        self.token_ids, self.positions = torch.tensor([[ids], [positions]], device=device)
        last = [p.first + p.count - 1 for p in places if p.complete]
        self.last_tokens = torch.tensor(last, dtype=torch.int64, device=device)  # an empty list would be floats
        self.documents, shares = _shares(places)
        self.groups = _suffix_groups(places, device)
        starts = tuple(document.next_position for document in self.documents)
        self.layout = BatchLayout(shares, tuple(group.rows for group in self.groups), device, starts)
        self.memory = (*self.documents, shares, *(group.memory for group in self.groups))
        """What its attentions have addresses of: the same in the next step, but for the lengths of suffixes."""

    @classmethod
    def of(cls, generations: Sequence[Generation], pool: SuffixPool, device: torch.device) -> _Step:
        """Rows of one document are adjacent. Each row gets one token; the rest of the step goes to the shortest
        questions first, so that a long question delays only itself."""
        left = max(0, MAX_NEW_TOKENS - len(generations))
        counts: dict[int, int] = {}
        for generation in sorted(generations, key=lambda g: len(g.pending)):
            assert generation.pending, "an answer that had an error is over"
            more = min(len(generation.pending) - 1, left)
            left -= more
            counts[id(generation)] = 1 + more
        places, first = [], 0
        for generation in sorted(generations, key=lambda g: id(g.document)):
            count = counts[id(generation)]
            slab = pool.reserve(generation.row, generation.row.length + count)
            places.append(_Place(generation, first, count, count == len(generation.pending), slab))
            first += count
        return cls(places, device)


def _shares(places: Sequence[_Place]) -> tuple[list[Attachment], tuple[int, ...]]:
    """The documents in the order of the batch, and how many tokens see each."""
    documents: list[Attachment] = []
    counts: list[int] = []
    for place in places:
        if not documents or documents[-1] is not place.generation.document:
            documents.append(place.generation.document)
            counts.append(0)
        counts[-1] += place.count
    return documents, tuple(counts)


class _SuffixGroup:
    """Rows of a step whose suffixes one operation reads, and where their new states are written.

    Either all rows of a slab that take one token each, or one row that takes several.
    """

    def __init__(self, slab: Slab, places: Sequence[_Place], tokens: int, device: torch.device) -> None:
        """tokens: of the whole step."""
        self._slab = slab
        self._new = places[0].count
        rows = {p.generation.row.slot: p for p in places}
        self._slots = range(min(rows), max(rows) + 1)
        self.rows = SuffixRows(
            lengths=tuple(rows[s].generation.row.length + self._new if s in rows else 1 for s in self._slots),
            first=tuple(rows[s].first if s in rows else -1 for s in self._slots),
            new=self._new,
        )
        self.memory = (slab, slab.slots, self._slots, self.rows.first, self._new)
        self._first = places[0].first
        self._start = places[0].generation.row.length
        self._slots_and_lengths = [(p.generation.row.slot, p.generation.row.length) for p in places]
        whole = sum(p.count for p in places) == tokens
        self._tokens = None if whole else torch.tensor([p.first for p in places], device=device)
        self._places: Tensor | None = None

    def states(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the group's rows `[rows, kv_heads, capacity, D]`, with room for this step's keys `[1,
        kv_heads, N, D]` and values."""
        rows = slice(self._slots.start, self._slots.stop)
        held = self._slab.states(layer, keys, values)
        return held[0][rows], held[1][rows]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As `states`, with this step's keys and values appended."""
        for states, new in zip(self._slab.states(layer, keys, values), (keys[0], values[0]), strict=True):
            if self._new == 1:
                by_token = new.transpose(0, 1)  # [N, kv_heads, D]
                own = by_token if self._tokens is None else by_token.index_select(0, self._tokens)
                # By one index: an assignment by two indices and a slice is a dozen small operations.
                states.view(-1, states.shape[3]).index_copy_(0, self._rows_in(states), own.reshape(-1, states.shape[3]))
            else:
                end = self._start + self._new
                states[self._slots[0], :, self._start : end] = new[:, self._first : self._first + self._new]
        return self.states(layer, keys, values)

    def _rows_in(self, states: Tensor) -> Tensor:
        """Where the new states of each token and head stand among the rows of `[slots * kv_heads * capacity, D]`: the
        same for keys and values, and in every layer with as many heads."""
        _, heads, capacity, _ = states.shape
        if self._places is None or len(self._places) != heads * len(self._slots_and_lengths):
            at = [(slot * heads + head) * capacity + n for slot, n in self._slots_and_lengths for head in range(heads)]
            self._places = torch.tensor(at, device=states.device)
        return self._places


def _suffix_groups(places: Sequence[_Place], device: torch.device) -> list[_SuffixGroup]:
    tokens = sum(place.count for place in places)
    single: dict[int, list[_Place]] = {}
    for place in places:
        if place.count == 1:
            single.setdefault(id(place.slab), []).append(place)
    groups = [_SuffixGroup(rows[0].slab, rows, tokens, device) for rows in single.values()]
    return groups + [_SuffixGroup(place.slab, [place], tokens, device) for place in places if place.count > 1]


class _BatchLayer(PassingLayer):
    """One layer of one step, as transformers sees it. The suffixes belong to the batch."""

    def __init__(self, index: int, step: _Step, wait: Wait) -> None:
        super().__init__()
        self._index = index
        self._step = step
        self._wait = wait

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Append every row's new states to its suffix, once every document of the step has this layer."""
        prefixes = [document.prefixes(self._index, self._wait) for document in self._step.documents]
        suffixes = [group.write(self._index, key_states, value_states) for group in self._step.groups]
        states = AttachedStates(prefixes, suffixes, self._step.layout, key_states, value_states, first_position=None)
        return states, states


class _Plan:
    """The attentions of a step, which later steps take over as long as they differ in the lengths of suffixes alone."""

    def __init__(self, step: _Step) -> None:
        self._memory = step.memory
        self._scratch = Scratch()
        self._parts: list[tuple[list[int], Part | None]] = []
        self._layout = step.layout

    def continued_by(self, step: _Step) -> bool:
        """Whether it is the plan of this step, too, with whose lengths it goes on."""
        if not self._parts or step.memory != self._memory:
            return False
        for table, group in zip(self._layout.tables[1], step.groups, strict=True):
            table[:, 1] = torch.tensor(group.rows.lengths, dtype=torch.int32)
        for sight, since in self._layout.sights.items():
            since.copy_(step.layout.since(*sight))
        return True

    def part(
        self, layer: int, states: tuple[Tensor, Tensor, Tensor], out: Tensor, made: Callable[..., Part | None]
    ) -> Part | None:
        """The attention of a layer: the one that was planned, or `made(layout, scratch)`."""
        addresses = [tensor.data_ptr() for tensor in (*states, out)]
        if layer >= len(self._parts) or self._parts[layer][0] != addresses:
            self._parts[layer:] = [(addresses, made(self._layout, self._scratch))]
        return self._parts[layer][1]


class _StepPast:
    """The documents and suffixes that the tokens of a step continue; see `Past`."""

    def __init__(self, step: _Step, layers: int, checkpoint: Checkpoint, wait: Wait, plan: _Plan) -> None:
        self._step = step
        self._wait = wait
        self._plan = plan
        self.cache = Cache(layers=[_BatchLayer(i, step, wait) for i in range(layers)])
        self.checkpoint = checkpoint
        self.planned = all(document.arrived for document in step.documents)

    def plan(self, layer: int, states: tuple[Tensor, Tensor, Tensor], rules: LogitRules, out: Tensor) -> Part | None:
        """The attention of a layer, over its documents and suffixes."""

        def made(layout: BatchLayout, scratch: Scratch) -> Part | None:
            prefixes = [document.prefixes(layer, self._wait) for document in self._step.documents]
            suffixes = [group.states(layer, *states[1:]) for group in self._step.groups]
            return attention_part(states, prefixes, suffixes, layout, rules, out, scratch)

        return self._plan.part(layer, states, out, made)


def _nothing() -> None:
    """No checkpoint."""


def _likeliest(logits: Tensor) -> list[int | None]:
    """The best token of each row of logits `[rows, vocabulary]`; None where a logit is not a number.

    One reduction and one copy to the host for all rows. The maximum of a row with a NaN is NaN.
    """
    best, token = logits.max(dim=-1)
    return [choice if sound else None for choice, sound in zip(token.tolist(), best.isfinite().tolist(), strict=True)]


def _token_taken(generation: Generation, logits: Tensor, row: int, likeliest: int | None) -> str | Exception:
    """Choose the next token of one answer from its row of logits `[rows, vocabulary]` and add it."""
    if likeliest is None:
        return CacheUnusable(
            "the model's logits after this cache are not numbers, so no answer can be given. If the model overflows in "
            "float16, load it with dtype bfloat16 or float32; an imported cache may hold such numbers itself"
        )
    try:
        return generation.take(generation.sample(logits[row]) if generation.samples else likeliest)
    except Exception as exc:  # any error of one answer ends that answer alone
        return exc
