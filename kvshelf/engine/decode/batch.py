"""Many answers, one forward pass per step: the tokens of all rows in one flat sequence, each behind its document."""

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

    Rows that share a document are adjacent, so that its prefix is read once. Only suffixes are padded, and no prefix is
    copied. A question about several documents has a pass of its own, which also tells how much attention each got.

    The answer of a row does not depend on the other rows, except for last bits of sums. Where it would (a RoPE that
    changes with the longest position of the call), `one_by_one` gives every row a forward pass of its own.
    """

    def __init__(self, passes: Passes, slots: Slots | None = None) -> None:
        """slots: where rows of one token each sit; None: nowhere."""
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
        steps = self._admit(generations, wait)
        choices = [self._forward(step, checkpoint or nothing) for step in steps]
        # From here on every answer has moved on, so nothing may be raised.
        outcomes: dict[int, Piece | Exception] = {}
        for step, chosen in zip(steps, choices, strict=True):
            outcomes |= self._take(step, chosen)
        return [outcomes.get(id(generation), Piece("")) for generation in generations]

    def _step_alone(self, generation: Generation, checkpoint: Checkpoint | None, wait: Wait) -> Piece | Exception:
        try:
            return self.step([generation], checkpoint, wait)[0]
        except Exception as exc:  # raising it would lose the texts of the answers before this one
            return exc

    def _admit(self, generations: Sequence[Generation], wait: Wait) -> list[_Step]:
        """One step of all answers but for those that need a pass of their own; with states, one for all with equally
        many tokens. Each row gets one token; the rest of `MAX_NEW_TOKENS` goes to the shortest questions first, so that
        a long question delays only itself. One with its own pass takes all: its choice must not depend on others."""
        most = MAX_NEW_TOKENS if self._passes.tokens_at_once is None else 0
        room = max(0, most - len(generations))
        passes: dict[tuple[int, int], list[_Admitted]] = {}
        for generation in sorted(generations, key=lambda generation: len(generation.pending)):
            assert generation.pending, "an answer that had an error is over"
            wants, tokens = generation.wants, len(generation.pending)
            alone = bool(wants & _OWN_PASS) or (Wants.QUERIES in wants and not generation.token_ids)
            if alone:
                tokens = min(tokens, max(1, min(most, _MOST_RATED) if Wants.LIKELIHOOD in wants else most))
            else:
                tokens = min(tokens, 1 + room)
                room -= tokens - 1
            key = tokens if self._with_states else 0, id(generation) if alone else 0
            passes.setdefault(key, []).append(_Admitted(generation, tokens, wants))
        return [_Step.of(rows, self._pool, self._passes.devices, wait) for _, rows in sorted(passes.items())]

    def _plan(self, step: _Step) -> _Plan:
        plan = next((plan for plan in self._plans if plan.continued_by(step)), None) or _Plan(step)
        self._plans = [plan, *(other for other in self._plans if other is not plan)][:2]
        return plan

    def _forward(self, step: _Step, checkpoint: Checkpoint) -> Choices:
        if self._slots is not None and step.sits and not self._with_states:
            return self._in_slots(self._slots, step, checkpoint)
        step.plan = self._plan(step)
        past = _StepPast(step, checkpoint, self._passes)
        ids, positions = step.inputs
        if self._with_states:
            rows, tokens = len(step.places), step.places[0].count
            last = torch.tensor([tokens - 1], device=ids.device)
            logits = self._passes.continuing(ids.view(rows, tokens), positions.view(rows, tokens), past, last)
            logits = logits[[row for row, place in enumerate(step.places) if place.complete], 0]
            step.states = past.cache.states()
        else:
            logits = self._passes.continuing(ids, positions, past, step.last_tokens)[0]
            if step.rating:
                step.rate(logits)
                logits = logits[len(logits) - len(step.asking) :].clone()
        step.weigh_suffixes(step.plan.weights)
        return Choices.of(logits, step.asking)

    def _in_slots(self, slots: Slots, step: _Step, checkpoint: Checkpoint) -> Choices:
        """A step whose rows sit in slots."""
        seating = slots.seating(step.asking, step.wants, self._passes.model.config.vocab_size)
        step.read = seating.documents

        def forward(checkpoint: Checkpoint) -> PassOutcome:
            step.sitting = sitting = seating.begin()
            past = _StepPast(step, checkpoint, self._passes)
            every = torch.arange(sitting.layout.num_tokens, device=sitting.ids.device)
            return sitting.end(self._passes.continuing(sitting.ids, sitting.positions, past, every)[0])

        outcome = slots.run(seating, forward, checkpoint)
        for place, seat in zip(step.places, seating.seats, strict=True):
            if place.wants:
                place.take(outcome, seat)
        return Choices.chosen(outcome.tokens.tolist(), [slot for slot, _ in seating.seats], outcome.logits, step.asking)

    def _take(self, step: _Step, choices: Choices) -> dict[int, Piece | Exception]:
        """Give every row what its pass showed, and those whose question has run their next token. Returns the text or
        the error of each; an error of one answer, whatever it is, ends that answer alone."""
        outcomes: dict[int, Piece | Exception] = {}
        for row, (place, shown) in enumerate(zip(step.places, step.shown(), strict=True)):
            if self._with_states:
                place.generation.row.states = [alone(states, row) for states in step.states]
            try:
                place.generation.ran(place.count, shown)
            except Exception as exc:
                outcomes[id(place.generation)] = exc
        for row, generation in enumerate(step.asking):
            if generation.closing or id(generation) in outcomes:
                continue
            try:
                outcomes[id(generation)] = choices.take(generation, row)
                if generation.finished:
                    continue
                if (copied := generation.copies()) is not None:
                    self._pool.insert(generation.row, copied.place, copied.entries, copied.layers)
                if (length := generation.reduced()) is not None:
                    self._pool.shrink(generation.row, length)
            except Exception as exc:
                outcomes[id(generation)] = exc
        return outcomes

    def keep(self, generation: Generation) -> None:
        """Give a closed answer, of which no token is pending, its turn."""
        row = generation.row
        assert row.slab is not None
        layers = row.states or [()] * len(self._kinds)
        states = tuple(tuple(state._replace(tensor=state.tensor.clone()) for state in layer) for layer in layers)
        generation.turn = Turn(generation.turn_ids, row.slab.of(row), states)

    def leave(self, generation: Generation) -> None:
        """Free the suffix of an answer, finished or abandoned. It cannot be stepped again."""
        self._plans.clear()  # they hold the suffixes' memory
        self._pool.release(generation.row)


class _Admitted(NamedTuple):
    """A row of the next step: so many of its pending `tokens`, and what its hooks want of their pass."""

    generation: Generation
    tokens: int
    wants: Wants


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

    def take(self, outcome: PassOutcome, seat: tuple[int, int]) -> None:
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

    def __init__(self, places: Sequence[_Place], devices: Devices, wait: Wait) -> None:
        self.places = places
        self._devices = devices
        self._wait = wait
        self.rating = Wants.LIKELIHOOD in places[0].wants
        """Whether it tells how likely its tokens are; it then has one row."""
        self.log_probs: Tensor | None = None
        self.asking = [place.generation for place in places if place.complete]
        """Whose next token can be chosen behind it."""
        self.observing = [place for place in places if place.wants and Wants.STATES in place.wants]
        self.choosing = [place for place in places if place.wants and Wants.QUERIES in place.wants]
        self.guessing = [place for place in places if place.wants and Wants.EARLY in place.wants]
        # The documents in the order of the batch, or what answers see of them, and how many tokens see each.
        shares = [
            (document, sum(place.count for place in same))
            for document, same in groupby(places, key=lambda place: place.generation.seen)
        ]
        self.documents: Sequence[Attached | Selection] = [document for document, _ in shares]
        self._shares = tuple(tokens for _, tokens in shares)
        weighing = Wants.MASSES in places[0].wants and places[0].complete
        self.read: Sequence[SeenDocument] = places[0].generation.seen_parts if weighing else self.documents
        """Whose prefixes its attention reads, one after the other."""
        self.masses: list[Tensor] = []
        """Of the documents of a question about several that ends here, `[documents]` in each layer."""
        self.weigh = self._weigh if weighing else None
        self.plan: _Plan | None = None
        """Of its attentions; None where its rows sit in slots."""
        self.sitting: SlotPass | None = None
        """The pass over slots in which its rows sit."""
        self.states: list[list[State]] = []
        """Behind it, of each layer that has some, `[rows, ...]`."""

    @property
    def wants(self) -> Wants:
        return reduce(or_, (place.wants for place in self.places if place.wants), Wants.NOTHING)

    @property
    def sits(self) -> bool:
        """Whether its rows can sit in slots."""
        single = all(place.count == 1 and place.complete for place in self.places)
        # What an answer has beside its slab is elsewhere after each reduction, and a pass tells what that was given.
        beside = any(isinstance(document, OwnPrefixes) for document in self.documents)
        return single and not beside and self.wants in SEATED and all(document.arrived for document in self.documents)

    @property
    def inputs(self) -> Tensor:
        """Ids and positions of its tokens, `[2, 1, N]` int64."""
        ids = [token for p in self.places for token in p.generation.pending[: p.count]]
        positions = [p.generation.next_position + i for p in self.places for i in range(p.count)]
        return torch.tensor([[ids], [positions]], device=self._devices.inputs)

    @property
    def last_tokens(self) -> Tensor:
        """The tokens whose logits it needs."""
        last = [p.first + p.count - 1 for p in self.places if p.complete]
        last = list(range(self.places[0].count)) if self.rating else last
        return torch.tensor(last, dtype=torch.int64, device=self._devices.inputs)  # an empty list would be floats

    @cached_property
    def here(self) -> list[_Here]:
        """Of each layer, on its device."""
        starts = tuple(document.next_position for document in self.documents)
        of_devices = []
        for device in self._devices.distinct:
            groups = _suffix_groups(self.places, device)
            rows = tuple(group.rows for group in groups)
            of_devices.append(_Here(groups, BatchLayout(self._shares, rows, device, starts)))
        return [of_devices[number] for number in self._devices.numbers]

    @cached_property
    def memory(self) -> tuple[object, ...]:
        """What its attentions have addresses of: the same in the next step, but for the lengths of suffixes."""
        return (*self.documents, self._shares, *(group.memory for group in self.here[0].groups))

    def prefixes(self, layer: int) -> list[tuple[Prefix, ...]]:
        """Those that its attention reads at a layer, once every document has it."""
        return [document.prefixes(layer, self._wait) for document in self.read]

    def source(self, layer: int) -> list[State]:
        """The states of a layer before it: each row's own, or its document's where it has none yet."""
        answers = [place.generation for place in self.places]
        return together(
            [
                answer.document.states(layer, self._wait) if answer.row.states is None else answer.row.states[layer]
                for answer in answers
            ]
        )

    def write(self, layer: int, *new: Tensor) -> tuple[list[tuple[Tensor, ...]], BatchLayout]:
        """Append the states of a layer, `[1, kv_heads, N, D]`, to the suffixes. Returns these and their layout."""
        here = self.here[layer] if self.sitting is None else self.sitting
        return [group.write(layer, *new) for group in here.groups], here.layout

    def room(self, layer: int, q_heads: int) -> Sequence[Tensor | None]:
        """Where the attention of a layer tells the rows that ask for it what their tokens gave to their suffixes."""
        if self.sitting is not None:
            return self.sitting.room(layer, q_heads)
        assert self.plan is not None, "rows sit nowhere"
        return self.plan.room(layer, self.here[layer], q_heads)

    def observe(self, attended: Attended) -> None:
        """Keep the states of a layer for the rows whose hooks want them."""
        if self.sitting is not None:
            self.sitting.observe(attended)
            return
        for place in self.observing:
            place.observe(attended, place.first)

    def choose(self, places: Sequence[_Place], layer: int, queries: Tensor) -> None:
        """Give the rows whose hooks want them their queries, of `[N, q_heads, D]`."""
        for place in places:
            place.generation.before(layer, queries[place.first : place.first + place.count], self._wait)

    def weigh_suffixes(self, weights: Mapping[int, Sequence[Tensor | None]]) -> None:
        """Give the rows whose hooks want them their weights, of each layer as a plan makes them."""
        for layer, of_groups in weights.items():
            for group, of_rows in zip(self.here[layer].groups, of_groups, strict=True):
                if of_rows is not None:
                    group.tell(layer, of_rows)

    def shown(self) -> Iterator[Shown]:
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
    def of(cls, admitted: Sequence[_Admitted], pool: SuffixPool, devices: Devices, wait: Wait) -> _Step:
        """Rows of one document are adjacent."""
        places, first = [], 0
        by_document = sorted(admitted, key=lambda row: (row.generation.document.number, row.generation.seen.number))
        for generation, count, wants in by_document:
            slab = pool.reserve(generation.row, generation.row.stored + count)
            places.append(_Place(generation, first, count, count == len(generation.pending), slab, wants))
            first += count
        return cls(places, devices, wait)


class _SuffixGroup:
    """Rows of a step whose suffixes one operation reads, and where their new states are written.

    Either all rows of a slab that take one token each, or one row that takes several.
    """

    def __init__(self, places: Sequence[_Place], tokens: int, device: torch.device) -> None:
        """tokens: of the whole step."""
        self._slab = slab = places[0].slab
        self._new = places[0].count
        rows = {p.generation.row.slot: p for p in places}
        self._slots = range(min(rows), max(rows) + 1)
        weighed = {slot: place for slot, place in rows.items() if place.weighed}
        self._asking = weighed.values()
        self.rows = SuffixRows(
            lengths=tuple(rows[s].generation.row.stored + self._new if s in rows else 1 for s in self._slots),
            first=tuple(rows[s].first if s in rows else -1 for s in self._slots),
            new=self._new,
            observed=tuple(s in weighed for s in self._slots),
        )
        self.memory = (slab, slab.slots, self._slots, self.rows.first, self._new, self.rows.observed)
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

    def states(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of the group's rows `[rows, kv_heads, capacity, D]`, or a layer's latents, with room for
        those of this step, `[1, kv_heads, N, D]`."""
        rows = slice(self._slots.start, self._slots.stop)
        return tuple(states[rows] for states in self._slab.states(layer, *new))

    def write(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """As `states`, with this step's states appended."""
        for states, (own,) in zip(self._slab.states(layer, *new), new, strict=True):
            if self._new == 1:
                by_token = own.transpose(0, 1)  # [N, kv_heads, D]
                by_token = by_token if self._tokens is None else by_token.index_select(0, self._tokens)
                # By one index: an assignment by two indices and a slice is a dozen small operations.
                flat = states.view(-1, states.shape[3])
                flat.index_copy_(0, self._rows_in(states), by_token.reshape(-1, states.shape[3]))
            else:
                end = self._start + self._new
                states[self._slots[0], :, self._start : end] = own[:, self._first : self._first + self._new]
        return self.states(layer, *new)

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
    groups = [*single.values(), *([place] for place in places if place.count > 1)]
    return [_SuffixGroup(group, tokens, device) for group in groups]


class _BatchLayer(PassingLayer):
    """One layer of one step, as transformers sees it. The suffixes belong to the batch."""

    def __init__(self, index: int, step: _Step) -> None:
        super().__init__()
        self._index = index
        self._step = step

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Append every row's new states to its suffix, once every document of the step has this layer."""
        step, index = self._step, self._index
        prefixes = step.prefixes(index)
        written, layout = step.write(index, in_line(key_states), in_line(value_states))
        suffixes = [(keys, values) for keys, values in written]
        choose = partial(step.choose, step.choosing, index) if step.choosing else None
        room = partial(step.room, index)
        states = AttachedStates(prefixes, suffixes, layout, key_states, value_states, None, step.weigh, choose, room)
        self.visible = states, states
        return self.visible


class _BatchStateLayer(StateLayer, _BatchLayer):
    """One that has states, too."""

    def __init__(self, index: int, step: _Step, number_of_states: int, source: Source) -> None:
        _BatchLayer.__init__(self, index, step)
        StateLayer.__init__(self, number_of_states, source)


class _LatentBatchLayer(_BatchLayer):
    """A layer of one step with latents: what it hands on to the module is this step's tokens alone."""

    def __init__(self, index: int, step: _Step, absorbed: Absorbed, handover: Handover) -> None:
        super().__init__(index, step)
        self._absorbed = absorbed
        self._handover = handover

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """As of a `_BatchLayer`. Latents and rotated parts lie side by side; values are the latents, not a copy."""
        prefixes = self._step.prefixes(self._index)
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

    def room(self, layer: int, here: _Here, q_heads: int) -> Sequence[Tensor | None]:
        """As `_Step.room`. here: of the layer."""
        if layer not in self.weights and any(any(group.rows.observed) for group in here.groups):
            self.weights[layer] = [group.weights(q_heads, here.layout.device) for group in here.groups]
        return self.weights.get(layer, ())

    def part(
        self, layer: int, tensors: Sequence[Tensor], make: Callable[[BatchLayout, Scratch], Part | None]
    ) -> Part | None:
        """The attention of a layer: the one that was planned for the addresses of these tensors, or a new one."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        if layer >= len(self._parts) or self._parts[layer][0] != addresses:
            self._parts[layer:] = [(addresses, make(self._layout, self._scratch))]
        return self._parts[layer][1]


class _StepPast(ForwardContext):
    """The documents and suffixes that the tokens of a step continue; see `Past`."""

    def __init__(self, step: _Step, checkpoint: Checkpoint, passes: Passes) -> None:
        self._step = step
        self._absorbed = passes.absorbed
        self.handover = Handover(passes.absorbed)
        kinds = passes.facts.kinds
        self._reads = readers(kinds)
        layers = [self._layer(index, kind) for index, kind in enumerate(kinds)]
        self.cache = cache_class(StatefulCache, passes.model)(layers=with_readers(layers, self._reads))
        self.checkpoint = checkpoint
        self.guesses = bool(step.guessing)
        self.calls = EarlyQueries(passes.model) if self.guesses and passes.early_program is None else None
        unseen = not (step.weigh or step.observing or step.choosing)
        self.planned = step.plan is not None and unseen and all(document.arrived for document in step.documents)

    def _layer(self, index: int, kind: LayerKind) -> StateLayer | _BatchLayer:
        if not kind.attends:
            return StateLayer(kind.states, partial(self._step.source, index))
        if index in self._absorbed:
            return _LatentBatchLayer(index, self._step, self._absorbed[index], self.handover)
        if not kind.states:
            return _BatchLayer(index, self._step)
        return _BatchStateLayer(index, self._step, kind.states, partial(self._step.source, index))

    @property
    def hides(self) -> bool:
        return self.calls is not None

    def before_attention(self, layer: Attended) -> None:
        early = None if self.calls is None else self.calls.of(layer.module)
        if early is not None:
            self.guess(layer.layer_idx, early)

    def guess(self, layer: int, early: Tensor) -> None:
        self._step.choose(self._step.guessing, layer, in_line(early)[0].transpose(0, 1))

    def after_attention(self, layer: Attended) -> None:
        self._step.observe(layer)
        self.checkpoint()

    def plan(self, layer: int, states: tuple[Tensor, Tensor, Tensor], rules: LogitRules, out: Tensor) -> Part | None:
        """The attention of a layer, over its documents and suffixes, or those of the layer that it reads: whose states
        of this step are then written once more."""
        of, step = self._reads.get(layer, layer), self._step
        assert step.plan is not None, "as `planned` says"

        def make(layout: BatchLayout, scratch: Scratch) -> Part | None:
            written = (group.states(of, *states[1:]) for group in step.here[layer].groups)
            suffixes = [(keys, values) for keys, values in written]
            room = step.room(layer, states[0].shape[1])
            return attention_part(states, step.prefixes(of), suffixes, layout, rules, out, scratch, room)

        return step.plan.part(layer, (*states, out), make)
