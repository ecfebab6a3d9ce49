"""Many answers, one forward pass per step: the tokens of all rows in one flat sequence.

A step takes the next token of every answer, or the question of a new one. The tokens of a row see the row's document
and the row's suffix, at the row's positions. Rows that share a document are adjacent, so that its prefix is read once.
Only suffixes are padded, and no prefix is copied. A question about several documents has a pass of its own, in which
attention also tells how much of it goes to each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from itertools import groupby
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvshelf.api.answers import Piece
from kvshelf.artifact.records import State
from kvshelf.engine.attention.attached import AttachedStates, PassingLayer, in_line, with_readers
from kvshelf.engine.attention.attachment import Attached, Wait, block
from kvshelf.engine.attention.function import Attended, ForwardContext
from kvshelf.engine.attention.latents import Absorbed, Handover, LatentStates
from kvshelf.engine.attention.states import Source, StatefulCache, StateLayer, alone, together
from kvshelf.engine.decode.generation import Generation
from kvshelf.engine.decode.hooks import NOT_COMPLETE, NOTHING_SHOWN, Shown, Wants
from kvshelf.engine.decode.reduction import OwnPrefixes
from kvshelf.engine.decode.selection import SeenDocument, Selection
from kvshelf.engine.decode.slots.choices import Choices
from kvshelf.engine.decode.slots.seating import SEATED, PassOutcome, SlotPass
from kvshelf.engine.decode.slots.slots import Slots
from kvshelf.engine.decode.suffixes import Slab, SuffixPool
from kvshelf.engine.decode.turns import Turn
from kvshelf.engine.forward.calls import EarlyQueries
from kvshelf.engine.forward.passes import Passes
from kvshelf.engine.progress import Checkpoint, nothing
from kvshelf.kernels.native import Part
from kvshelf.kernels.prefix_attention import BatchLayout, LogitRules, Prefix, Scratch, SuffixRows, attention_part
from kvshelf.model.caches import cache_class
from kvshelf.model.devices import Devices
from kvshelf.model.layers import LayerKind, readers

MAX_NEW_TOKENS = 512
"""Most tokens of one step. A longer question takes several steps, so that the other answers still get their tokens."""

_MOST_RATED = 128
"""Tokens whose logits are made at once: of 150,000 tokens each they take 77 MB in fp32."""
_OWN_PASS = Wants.MASSES | Wants.LIKELIHOOD


class DecodeBatch:
    """The open answers of one model. Not thread-safe: one thread owns the model.

    The answer of a row does not depend on the other rows, except for last bits of sums. Where it would (a RoPE that
    changes with the longest position of the call), `one_by_one` gives every row a forward pass of its own.
    """

    def __init__(self, passes: Passes, slots: Slots | None = None) -> None:
        """slots: where rows of one token each sit whose hooks want nothing of their pass; None: nowhere."""
        self._passes = passes
        self._slots = slots
        self._kinds = kinds = passes.facts.kinds
        self._with_states = any(kind.states for kind in kinds)
        self._one_by_one = passes.facts.one_by_one
        self._pool = SuffixPool(len(kinds))
        self._plans: list[_Plan] = []
        """The last ones, the latest first: two, because a selection may choose in every other step."""

    @property
    def nbytes(self) -> int:
        """Bytes that the suffixes of all open answers hold, without their states."""
        return self._pool.nbytes

    def step(
        self, generations: Sequence[Generation], checkpoint: Checkpoint | None = None, wait: Wait = block
    ) -> list[Piece | Exception]:
        """Run one forward pass, and one for each question about several documents; with recurrent states, one for all
        rows of equally many tokens. Returns, for each answer, the text that became final (possibly "") or its error.

        An answer that had an error is over: `leave` is all that may follow. `checkpoint` is called after each layer and
        may raise to abandon the step. If the step raises, every answer stays as it was; where rows have forward passes
        of their own, each row gets the error of its own pass instead. `wait` is called while a document's next layer
        has not arrived, and may step other answers meanwhile.
        """
        if self._one_by_one and len(generations) > 1:
            return [self._step_alone(generation, checkpoint, wait) for generation in generations]
        steps = self._admit(generations)
        outs = [self._forward(step, checkpoint or nothing, wait) for step in steps]
        # From here on every answer has moved on, so nothing may be raised.
        told: dict[int, Piece | Exception] = {}
        for step, out in zip(steps, outs, strict=True):
            told |= self._take(step, out)
        return [told.get(id(generation), Piece("")) for generation in generations]

    def _step_alone(self, generation: Generation, checkpoint: Checkpoint | None, wait: Wait) -> Piece | Exception:
        try:
            return self.step([generation], checkpoint, wait)[0]
        except Exception as exc:  # raising it would lose the texts of the answers before this one
            return exc

    def _admit(self, generations: Sequence[Generation]) -> list[_Step]:
        """One step of all answers but for those that need a pass of their own; with states, one for all with equally
        many tokens. Each row gets one token; the rest of `MAX_NEW_TOKENS` goes to the shortest questions first, so that
        a long question delays only itself. A question alone takes all of these, whatever the others take: what it
        chooses must not depend on them."""
        most = MAX_NEW_TOKENS if self._passes.tokens_at_once is None else 0
        left = max(0, most - len(generations))
        admitted: list[_Admitted] = []
        for generation in sorted(generations, key=lambda each: len(each.pending)):
            assert generation.pending, "an answer that had an error is over"
            wants = generation.wants
            alone = bool(wants & _OWN_PASS) or (Wants.QUERIES in wants and not generation.token_ids)
            room = min(most, _MOST_RATED) if Wants.LIKELIHOOD in wants else most
            more = min(len(generation.pending) - 1, max(0, room - 1) if alone else left)
            left -= 0 if alone else more
            admitted.append(_Admitted(generation, 1 + more, wants, id(generation) if alone else 0))

        def alike(each: _Admitted) -> tuple[int, int]:
            return each.tokens if self._with_states else 0, each.alone

        groups = groupby(sorted(admitted, key=alike), key=alike)
        return [_Step.of(list(same), self._pool, self._passes.devices) for _, same in groups]

    def _plan(self, step: _Step) -> _Plan:
        plan = next((plan for plan in self._plans if plan.continued_by(step)), None) or _Plan(step)
        self._plans = [plan, *(other for other in self._plans if other is not plan)][:2]
        return plan

    def _forward(self, step: _Step, checkpoint: Checkpoint, wait: Wait) -> _Out:
        if self._slots is not None and step.sits and not self._with_states:
            return _Out(self._in_slots(self._slots, step, checkpoint, wait), [])
        plan = self._plan(step)
        past = _StepPast(step, self._kinds, checkpoint, wait, plan, self._passes)
        if not self._with_states:
            logits = self._passes.continuing(step.token_ids, step.positions, past, step.last_tokens)[0]
            if step.rating:
                step.rate(logits)
                logits = logits[len(logits) - len(step.asking) :].clone()
            step.weigh_suffixes(plan.weights)
            return _Out(Choices.of(logits, step.asking), [])
        rows, tokens = len(step.places), step.places[0].count
        ids, positions = step.token_ids.view(rows, tokens), step.positions.view(rows, tokens)
        last = torch.tensor([tokens - 1], device=ids.device)
        asking = [row for row, place in enumerate(step.places) if place.complete]
        logits = self._passes.continuing(ids, positions, past, last)[asking, 0]
        step.weigh_suffixes(plan.weights)
        return _Out(Choices.of(logits, step.asking), past.cache.states())

    def _in_slots(self, slots: Slots, step: _Step, checkpoint: Checkpoint, wait: Wait) -> Choices:
        """A step whose rows sit in slots."""
        seating = slots.seating(step.asking, step.wants, self._passes.model.config.vocab_size)
        step.read = seating.documents

        def forward(checkpoint: Checkpoint) -> PassOutcome:
            step.sitting = sitting = seating.begun()
            past = _StepPast(step, self._kinds, checkpoint, wait, None, self._passes)
            every = torch.arange(sitting.layout.num_tokens, device=sitting.ids.device)
            return sitting.ended(self._passes.continuing(sitting.ids, sitting.positions, past, every)[0])

        outcome = slots.run(seating, forward, checkpoint)
        for place, seat in zip(step.places, seating.seats, strict=True):
            if place.wants:
                place.sat(outcome, seat)
        return Choices.chosen(outcome.tokens.tolist(), [slot for slot, _ in seating.seats], outcome.logits, step.asking)

    def _take(self, step: _Step, out: _Out) -> dict[int, Piece | Exception]:
        """Give every row what its pass showed, and those whose question has run their next token. Returns the text or
        the error of each; an error of one answer, whatever it is, ends that answer alone."""
        told: dict[int, Piece | Exception] = {}
        for row, (place, shown) in enumerate(zip(step.places, step.shown(), strict=True)):
            if self._with_states:
                place.generation.row.states = [alone(of_layer, row) for of_layer in out.states]
            try:
                place.generation.ran(place.count, shown)
            except Exception as exc:
                told[id(place.generation)] = exc
        for row, generation in enumerate(step.asking):
            if generation.closing or id(generation) in told:
                continue
            try:
                told[id(generation)] = out.choices.taken(generation, row)
                if generation.finished:
                    continue
                if (copied := generation.copies()) is not None:
                    self._pool.insert(generation.row, copied.place, copied.entries, copied.layers)
                if (length := generation.reduced()) is not None:
                    self._pool.shrink(generation.row, length)
            except Exception as exc:
                told[id(generation)] = exc
        return told

    def keep(self, generation: Generation) -> None:
        """Give a closed answer, of which no token is pending, its turn."""
        row = generation.row
        assert row.slab is not None
        states = row.states or [()] * len(self._kinds)
        copied = tuple(tuple(each._replace(tensor=each.tensor.clone()) for each in layer) for layer in states)
        generation.turn = Turn(generation.turn_ids, row.slab.of(row), copied)

    def leave(self, generation: Generation) -> None:
        """Free the suffix of an answer, finished or abandoned. It cannot be stepped again."""
        self._plans.clear()  # they hold the suffixes' memory
        self._pool.release(generation.row)


class _Admitted(NamedTuple):
    """A row of the next step: so many of its pending `tokens`, and what its hooks want of their pass. alone: the same
    for rows that may share a pass."""

    generation: Generation
    tokens: int
    wants: Wants
    alone: int


class _Out(NamedTuple):
    """What a pass gave. choices: of the rows whose next token can be chosen. states: of each layer that has some,
    `[rows, ...]`."""

    choices: Choices
    states: list[list[State]]


@dataclass(frozen=True)
class _Place:
    """The tokens of one row in a step: `first` to `first + count` of the batch. `complete`: no token is left for a
    later step, so the row's next token can be chosen."""

    generation: Generation
    first: int
    count: int
    complete: bool
    slab: Slab
    wants: Wants
    states: dict[int, Attended] = field(default_factory=dict)
    """Of each layer, where its hooks want them. In a step that is abandoned they are lost with it."""
    weights: dict[int, Tensor] = field(default_factory=dict)
    """Of its suffix at each layer, `[q_heads, S]`, likewise."""

    def observe(self, attended: Attended, first: int) -> None:
        """Keep the states of a layer for its hooks. first: of its tokens."""
        own = slice(first, first + self.count)
        queries, keys, values = (
            in_line(states)[:, :, own] for states in (attended.queries, attended.keys, attended.values)
        )
        self.states[attended.layer_idx] = replace(attended, queries=queries, keys=keys, values=values)

    def sat(self, outcome: PassOutcome, seat: tuple[int, int]) -> None:
        """Keep what a pass over slots shows. seat: its slot, and the number of its slab."""
        (slot, slab), row = seat, self.generation.row
        if Wants.STATES in self.wants:
            for attended in outcome.states:
                self.observe(attended, slot)
        if self.weighed:
            for layer, weights in outcome.weights.items():
                self.weights[layer] = weights[slab][row.slot, :, : row.stored + 1]

    @property
    def weighed(self) -> bool:
        """Whether its hooks want the weights of its suffix."""
        return bool(self.wants) and Wants.WEIGHTS in self.wants


class _Here(NamedTuple):
    """What the attentions of a step share on one device."""

    groups: list[_SuffixGroup]
    layout: BatchLayout


class _Step:
    """The tokens of one step, their positions, and the rows that they belong to."""

    def __init__(self, places: Sequence[_Place], devices: Devices) -> None:
        self.places = places
        self._devices = devices
        self.rating = Wants.LIKELIHOOD in places[0].wants
        """Whether it tells how likely its tokens are; it then has one row."""
        self.log_probs: Tensor | None = None
        self.asking = [place.generation for place in places if place.complete]
        """Whose next token can be chosen behind it."""
        self.observing = [place for place in places if place.wants and Wants.STATES in place.wants]
        self.choosing = [place for place in places if place.wants and Wants.QUERIES in place.wants]
        self.guessing = [place for place in places if place.wants and Wants.EARLY in place.wants]
        self.documents, self._shares = _shares(places)
        weighing = Wants.MASSES in places[0].wants and places[0].complete
        self.read: Sequence[SeenDocument] = places[0].generation.seen_parts if weighing else self.documents
        """Whose prefixes its attention reads, one after the other."""
        self.weigh = self._weigh if weighing else None
        self.masses: list[Tensor] = []
        """Of the documents of a question about several that ends here, `[documents]` in each layer."""
        self.sitting: SlotPass | None = None
        """The pass over slots in which its rows sit."""

    @property
    def wants(self) -> Wants:
        """What the hooks of its rows want."""
        return reduce(or_, (place.wants for place in self.places if place.wants), Wants.NOTHING)

    @property
    def sits(self) -> bool:
        """Whether its rows can sit in slots."""
        single = all(place.count == 1 and place.complete for place in self.places)
        # What an answer has beside its slab is elsewhere after each reduction, and a pass tells what that was given.
        beside = any(isinstance(document, OwnPrefixes) for document in self.documents)
        return single and not beside and self.wants in SEATED and all(document.arrived for document in self.documents)

    @cached_property
    def _inputs(self) -> Tensor:
        ids = [token for p in self.places for token in p.generation.pending[: p.count]]
        positions = [p.generation.next_position + i for p in self.places for i in range(p.count)]
        return torch.tensor([[ids], [positions]], device=self._devices.inputs)

    @property
    def token_ids(self) -> Tensor:
        return self._inputs[0]

    @property
    def positions(self) -> Tensor:
        return self._inputs[1]

    @property
    def last_tokens(self) -> Tensor:
        """The tokens whose logits it needs."""
        last = [p.first + p.count - 1 for p in self.places if p.complete]
        last = list(range(self.positions.shape[1])) if self.rating else last
        return torch.tensor(last, dtype=torch.int64, device=self._devices.inputs)  # an empty list would be floats

    @cached_property
    def here(self) -> list[_Here]:
        """Of each layer, on its device."""
        starts = tuple(document.next_position for document in self.documents)
        made = []
        for device in self._devices.each:
            groups = _suffix_groups(self.places, device)
            rows = tuple(group.rows for group in groups)
            made.append(_Here(groups, BatchLayout(self._shares, rows, device, starts)))
        return [made[number] for number in self._devices.numbers]

    @cached_property
    def memory(self) -> tuple[object, ...]:
        """What its attentions have addresses of: the same in the next step, but for the lengths of suffixes."""
        return (*self.documents, self._shares, *(group.memory for group in self.here[0].groups))

    def write(self, layer: int, *new: Tensor) -> tuple[list[tuple[Tensor, ...]], BatchLayout]:
        """Append the states of a layer, `[1, kv_heads, N, D]`, to the suffixes. Returns these and their layout."""
        if self.sitting is not None:
            return [group.write(layer, *new) for group in self.sitting.groups], self.sitting.layout
        groups, layout = self.here[layer]
        return [group.write(layer, *new) for group in groups], layout

    def room(self, plan: _Plan | None, layer: int, q_heads: int) -> Sequence[Tensor | None]:
        """Where the attention of a layer tells the rows that ask for it what their tokens gave to their suffixes."""
        if self.sitting is not None:
            return self.sitting.room(layer, q_heads)
        assert plan is not None, "rows sit nowhere"
        return plan.room(layer, self, q_heads)

    def observe(self, attended: Attended) -> None:
        """Keep the states of a layer for the rows whose hooks want them."""
        if self.sitting is not None:
            self.sitting.observe(attended)
            return
        for place in self.observing:
            place.observe(attended, place.first)

    def choose(self, places: Sequence[_Place], layer: int, wait: Wait, queries: Tensor) -> None:
        """Give the rows whose hooks want them their queries, of `[N, q_heads, D]`."""
        for place in places:
            place.generation.before(layer, queries[place.first : place.first + place.count], wait)

    def weigh_suffixes(self, weights: Mapping[int, Sequence[Tensor | None]]) -> None:
        """Give the rows whose hooks want them their weights, of each layer as a plan makes them."""
        for layer, of_groups in weights.items():
            for group, of_rows in zip(self.here[layer].groups, of_groups, strict=True):
                if of_rows is not None:
                    group.tell(layer, of_rows)

    def shown(self) -> Iterator[Shown]:
        """What the pass showed of each row."""
        for place in self.places:
            if place.wants:
                yield Shown(place.states, self.masses, place.weights, place.complete, self.log_probs)
            else:
                yield NOTHING_SHOWN if place.complete else NOT_COMPLETE

    def rate(self, logits: Tensor) -> None:
        """Keep what logits `[T, vocabulary]` give the tokens that follow, and not the logits: other steps come."""
        (place,) = self.places
        following = torch.tensor(place.generation.pending[1 : place.count + 1], device=logits.device)
        rows = logits[: len(following)].float()
        chosen = rows.gather(-1, following[:, None])[:, 0] if len(following) else rows.new_zeros(0)
        self.log_probs = chosen - rows.logsumexp(dim=-1)

    def _weigh(self, masses: Tensor) -> None:
        self.masses.append(masses[:, -1].mean(1))  # of [documents, N, q_heads]

    @classmethod
    def of(cls, admitted: Sequence[_Admitted], pool: SuffixPool, devices: Devices) -> _Step:
        """Rows of one document are adjacent."""
        places, first = [], 0
        by_document = sorted(admitted, key=lambda each: (each.generation.document.number, each.generation.seen.number))
        for generation, count, wants, _ in by_document:
            slab = pool.reserve(generation.row, generation.row.stored + count)
            places.append(_Place(generation, first, count, count == len(generation.pending), slab, wants))
            first += count
        return cls(places, devices)


def _shares(places: Sequence[_Place]) -> tuple[list[Attached | Selection], tuple[int, ...]]:
    """The documents in the order of the batch, or what answers see of them, and how many tokens see each."""
    documents: list[Attached | Selection] = []
    counts: list[int] = []
    for place in places:
        if not documents or documents[-1] is not place.generation.seen:
            documents.append(place.generation.seen)
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
            lengths=tuple(rows[s].generation.row.stored + self._new if s in rows else 1 for s in self._slots),
            first=tuple(rows[s].first if s in rows else -1 for s in self._slots),
            new=self._new,
            asked=tuple(s in rows and rows[s].weighed for s in self._slots),
        )
        self.memory = (slab, slab.slots, self._slots, self.rows.first, self._new, self.rows.asked)
        self._asking = [p for p in places if self.rows.asked[p.generation.row.slot - self._slots.start]]
        self._first = places[0].first
        self._start = places[0].generation.row.stored
        self._slots_and_lengths = [(p.generation.row.slot, p.generation.row.stored) for p in places]
        whole = sum(p.count for p in places) == tokens
        self._tokens = None if whole else torch.tensor([p.first for p in places], device=device)
        self._places: Tensor | None = None

    def weights(self, q_heads: int, device: torch.device) -> Tensor | None:
        """Room for the weights of the rows that ask for theirs, `[rows, q_heads, capacity]` fp32; None if none does."""
        shape = len(self._slots), q_heads, self._slab.capacity
        return torch.empty(shape, device=device) if self._asking else None

    def tell(self, layer: int, weights: Tensor) -> None:
        """Give the rows that ask for them their weights at a layer, over their suffixes with this step's token."""
        for place in self._asking:
            row = place.generation.row
            place.weights[layer] = weights[row.slot - self._slots.start, :, : row.stored + place.count]

    def states(self, layer: int, *given: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of the group's rows `[rows, kv_heads, capacity, D]`, or a layer's latents, with room for
        those of this step, `[1, kv_heads, N, D]`."""
        rows = slice(self._slots.start, self._slots.stop)
        return tuple(held[rows] for held in self._slab.states(layer, *given))

    def write(self, layer: int, *given: Tensor) -> tuple[Tensor, ...]:
        """As `states`, with this step's states appended."""
        for states, (new,) in zip(self._slab.states(layer, *given), given, strict=True):
            if self._new == 1:
                by_token = new.transpose(0, 1)  # [N, kv_heads, D]
                own = by_token if self._tokens is None else by_token.index_select(0, self._tokens)
                # By one index: an assignment by two indices and a slice is a dozen small operations.
                states.view(-1, states.shape[3]).index_copy_(0, self._rows_in(states), own.reshape(-1, states.shape[3]))
            else:
                end = self._start + self._new
                states[self._slots[0], :, self._start : end] = new[:, self._first : self._first + self._new]
        return self.states(layer, *given)

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

    def __init__(self, index: int, step: _Step, wait: Wait, plan: _Plan | None) -> None:
        super().__init__()
        self._index = index
        self._step = step
        self._wait = wait
        self._plan = plan

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Append every row's new states to its suffix, once every document of the step has this layer."""
        prefixes = self._prefixes()
        written, layout = self._step.write(self._index, in_line(key_states), in_line(value_states))
        suffixes = [(keys, values) for keys, values in written]
        choosing = self._step.choosing
        choose = partial(self._step.choose, choosing, self._index, self._wait) if choosing else None
        room = partial(self._step.room, self._plan, self._index)
        states = AttachedStates(
            prefixes, suffixes, layout, key_states, value_states, None, self._step.weigh, choose, room
        )
        self.visible = states, states
        return self.visible

    def _prefixes(self) -> list[tuple[Prefix, ...]]:
        return [document.prefixes(self._index, self._wait) for document in self._step.read]


class _BatchStateLayer(StateLayer, _BatchLayer):
    """One that has states, too."""

    def __init__(
        self, index: int, step: _Step, wait: Wait, plan: _Plan | None, number_of_states: int, source: Source
    ) -> None:
        _BatchLayer.__init__(self, index, step, wait, plan)
        StateLayer.__init__(self, number_of_states, source)


class _LatentBatchLayer(_BatchLayer):
    """A layer of one step with latents: what it hands on to the module is this step's tokens alone."""

    def __init__(
        self, index: int, step: _Step, wait: Wait, plan: _Plan | None, absorbed: Absorbed, handover: Handover
    ) -> None:
        super().__init__(index, step, wait, plan)
        self._absorbed = absorbed
        self._handover = handover

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """As of a `_BatchLayer`. Latents and rotated parts lie side by side; values are the latents, not a copy."""
        prefixes = self._prefixes()
        joined, rank = torch.cat([key_states, value_states], dim=-1), key_states.shape[-1]
        written, layout = self._step.write(self._index, in_line(joined))
        suffixes = [(keys, keys[..., :rank]) for (keys,) in written]
        past = AttachedStates(prefixes, suffixes, layout, joined, key_states, None, self._step.weigh)
        self._handover.give(self._index, LatentStates(key_states, value_states, (past, self._absorbed)))
        return key_states, value_states


class _Plan:
    """The attentions of a step, which later steps take over as long as they differ in the lengths of suffixes alone."""

    def __init__(self, step: _Step) -> None:
        self._memory = step.memory
        self._scratch = Scratch()
        self._parts: list[tuple[list[int], Part | None]] = []
        self._layout = step.here[0].layout  # a recorded model is on one device
        self.weights: dict[int, list[Tensor | None]] = {}
        """Of each layer, for each group of suffixes, what `room` has made; empty where no row asks for its weights."""

    def continued_by(self, step: _Step) -> bool:
        """Whether it is the plan of this step, too, with whose lengths it goes on."""
        if not self._parts or step.memory != self._memory:
            return False
        for table, group in zip(self._layout.tables[1], step.here[0].groups, strict=True):
            table[:, 1] = torch.tensor(group.rows.lengths, dtype=torch.int32)
        for sight, since in self._layout.sights.items():
            since.copy_(step.here[0].layout.since(*sight))
        return True

    def room(self, layer: int, step: _Step, q_heads: int) -> Sequence[Tensor | None]:
        """Where the attention of a layer tells the rows that ask for it what their tokens gave to their suffixes."""
        here = step.here[layer]
        if layer not in self.weights and any(any(group.rows.asked) for group in here.groups):
            self.weights[layer] = [group.weights(q_heads, here.layout.device) for group in here.groups]
        return self.weights.get(layer, ())

    def part(
        self, layer: int, states: tuple[Tensor, Tensor, Tensor], out: Tensor, made: Callable[..., Part | None]
    ) -> Part | None:
        """The attention of a layer: the one that was planned, or `made(layout, scratch)`."""
        addresses = [tensor.data_ptr() for tensor in (*states, out)]
        if layer >= len(self._parts) or self._parts[layer][0] != addresses:
            self._parts[layer:] = [(addresses, made(self._layout, self._scratch))]
        return self._parts[layer][1]


class _StepPast(ForwardContext):
    """The documents and suffixes that the tokens of a step continue; see `Past`."""

    def __init__(
        self,
        step: _Step,
        kinds: Sequence[LayerKind],
        checkpoint: Checkpoint,
        wait: Wait,
        plan: _Plan | None,
        passes: Passes,
    ) -> None:
        self._step = step
        self._wait = wait
        self._plan = plan
        self._absorbed = passes.absorbed
        self.handover = Handover(passes.absorbed)
        self._reads = readers(kinds)
        layers = [self._layer(index, kind) for index, kind in enumerate(kinds)]
        self.cache = cache_class(StatefulCache, passes.model)(layers=with_readers(layers, self._reads))
        self.checkpoint = checkpoint
        self.guesses = bool(step.guessing)
        self.calls = EarlyQueries(passes.model) if self.guesses and passes.early_program is None else None
        unseen = not (step.weigh or step.observing or step.choosing)
        self.planned = plan is not None and unseen and all(document.arrived for document in step.documents)

    def _layer(self, index: int, kind: LayerKind) -> StateLayer | _BatchLayer:
        def source() -> list[State]:
            return together([self._states(place.generation, index) for place in self._step.places])

        if not kind.attends:
            return StateLayer(kind.states, source)
        given = index, self._step, self._wait, self._plan
        if index in self._absorbed:
            return _LatentBatchLayer(*given, self._absorbed[index], self.handover)
        if not kind.states:
            return _BatchLayer(*given)
        return _BatchStateLayer(*given, kind.states, source)

    @property
    def hides(self) -> bool:
        return self.calls is not None

    def before_attention(self, layer: Attended) -> None:
        early = None if self.calls is None else self.calls.of(layer.module)
        if early is not None:
            self.guess(layer.layer_idx, early)

    def guess(self, layer: int, early: Tensor) -> None:
        self._step.choose(self._step.guessing, layer, self._wait, in_line(early)[0].transpose(0, 1))

    def after_attention(self, layer: Attended) -> None:
        self._step.observe(layer)
        self.checkpoint()

    def _states(self, generation: Generation, layer: int) -> Sequence[State]:
        """Of one row, before the step: its own, or its document's where it has none yet."""
        own = generation.row.states
        return own[layer] if own is not None else generation.document.states(layer, self._wait)

    def plan(self, layer: int, states: tuple[Tensor, Tensor, Tensor], rules: LogitRules, out: Tensor) -> Part | None:
        """The attention of a layer, over its documents and suffixes, or those of the layer that it reads: whose states
        of this step are then written once more."""
        of, plan = self._reads.get(layer, layer), self._plan
        assert plan is not None, "as `planned` says"

        def made(layout: BatchLayout, scratch: Scratch) -> Part | None:
            prefixes = [document.prefixes(of, self._wait) for document in self._step.documents]
            held = (group.states(of, *states[1:]) for group in self._step.here[layer].groups)
            suffixes = [(keys, values) for keys, values in held]
            room = plan.room(layer, self._step, states[0].shape[1])
            return attention_part(states, prefixes, suffixes, layout, rules, out, scratch, room)

        return plan.part(layer, states, out, made)
