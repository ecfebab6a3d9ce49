"""The slots of a step: the same operations on the same addresses, step after step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Final, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from kvshelf.engine.attention.function import Attended
from kvshelf.engine.decode.generation import Generation
from kvshelf.engine.decode.hooks import Wants
from kvshelf.engine.decode.slots.choices import RuleKind, TokenRules, choose
from kvshelf.engine.decode.slots.composition import Composition, Reading, TabledDocuments
from kvshelf.engine.decode.suffixes import Slab
from kvshelf.kernels.prefix_attention import BatchLayout, SuffixRows
from kvshelf.kernels.transfer import host_memory

CLASSES: Final = (1, 2, 3, 4, 6, 8, 12, 16)
"""Slots of a document, and all multiples of 8 beyond. At most a third of them is vacant."""

MOST_SLOTS_A_ROW: Final = 1.5

SEATED: Final = Wants.WEIGHTS | Wants.STATES
"""What the hooks of rows in slots may want."""


class PassOutcome(NamedTuple):
    """What a pass over slots gave. logits: `[slots, vocabulary]`, before grammars. tokens: as of `choose`. weights: of
    each layer, for each slab, `[rows, q_heads, capacity]`; states: of each layer, of all slots; both where rows want
    them."""

    logits: Tensor
    tokens: Tensor
    weights: dict[int, list[Tensor]]
    states: list[Attended]


class SeatingKind(NamedTuple):
    """What a pass does beside its layers. wants: of the hooks of its rows."""

    rules: RuleKind
    wants: Wants
    vocabulary: int


Replay = Callable[[], PassOutcome]
"""Runs a recorded pass again. What it gives is overwritten by the next run."""


def slots_for(rows: int) -> int:
    """Slots of a document that so many rows read."""
    return next((size for size in CLASSES if size >= rows), -(-rows // 8) * 8)


class Seating:
    """The slots of the documents of a step. Between steps it changes in numbers alone: in those of `_numbers`, which
    one copy fills, and in the tables by which kernels read documents. So rows may come, leave and grow; other documents
    that are read without tables, another class, new or grown slabs, or the first row that draws make another seating.

    documents: what the slots see. passes: how many have run that were not replayed. replay: once it is recorded.
    """

    def __init__(
        self,
        composition: Composition,
        slabs: Sequence[Slab],
        device: torch.device,
        kind: SeatingKind,
        ends: Sequence[object],
    ) -> None:
        """composition: whose slots these are, or, once its tables are known, the first of its class. ends: kept for as
        long as this is: they call when what it reads ends."""
        self._tabled = None if composition.tables is None else TabledDocuments(composition.tables)
        self._untabled = composition if self._tabled is None else None
        self._composition = ref(composition)
        self.documents = composition.documents if self._tabled is None else [self._tabled]
        self.passes = 0
        self.replay: Replay | None = None
        self._ends = ends
        self._slabs = [ref(slab) for slab in slabs]
        self._kind = kind
        weighed = Wants.WEIGHTS in kind.wants
        self._suffixes = tuple(
            SuffixRows((slab.capacity,) * slab.slots, (-1,) * slab.slots, observed=(weighed,) * slab.slots)
            for slab in slabs
        )
        self._slots = slots = composition.layout.num_tokens
        self._shares = composition.layout.shares if self._tabled is None else (slots,)
        self._of_tokens, self._begins = composition.layout.tables[0].clone(), composition.begins.clone()
        self._sizes = [slots] * 4 + [size for slab in slabs for size in (2 * slab.slots, slots, slots, slots)]
        self._of_rules = len(self._sizes)
        self._sizes += kind.rules.sizes(slots, kind.vocabulary)
        self._numbers = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        self.seats: list[tuple[int, int]] = []
        """Of each row of this step, its slot and the number of its slab."""

    @property
    def size(self) -> tuple[SeatingKind, int]:
        """What its pass does, and over how many slots."""
        return self._kind, self._slots

    @property
    def nbytes(self) -> int:
        """Of all that kernels read its documents by."""
        return sum(part.nbytes for part in (self._tabled, self._untabled) if part is not None)

    def enter(
        self, composition: Composition, counts: Sequence[int], rows: Sequence[Generation], slabs: Sequence[Slab]
    ) -> None:
        """Seat rows for a step. counts: how many read each document; its other slots are vacant: token 0 at position 0,
        without a suffix, whose results nobody reads."""
        if self._tabled is not None and self._composition() is not composition:
            assert composition.tables is not None, "its class has"
            self._tabled.take(composition.tables)
            self._of_tokens.copy_(composition.layout.tables[0])
            self._begins.copy_(composition.begins)
            self._composition = ref(composition)
        slots = self._slots
        ids, positions, places, gathered = ([0] * slots for _ in range(4))
        tables = [[-1, 1] * slab.slots for slab in slabs]
        writes: list[list[tuple[int, int, int]]] = [[] for _ in slabs]
        firsts = list(accumulate((slab.slots for slab in slabs), initial=0))
        begins = accumulate(composition.layout.shares, initial=0)
        occupied = (begin + i for begin, count in zip(begins, counts, strict=False) for i in range(count))
        self.seats = []
        for slot, row in zip(occupied, rows, strict=True):
            suffix = row.row
            number = next(number for number, slab in enumerate(slabs) if slab is suffix.slab)
            self.seats.append((slot, number))
            ids[slot], positions[slot] = row.pending[0], row.next_position
            places[slot], gathered[slot] = suffix.stored, firsts[number] + suffix.slot
            tables[number][2 * suffix.slot : 2 * suffix.slot + 2] = slot, suffix.stored + 1
            writes[number].append((slot, suffix.slot, suffix.stored))
        numbers = [*ids, *positions, *places, *gathered]
        for table, places_written in zip(tables, writes, strict=True):
            # As many as there are slots: the others write the first one once more.
            padded = places_written + places_written[:1] * (slots - len(places_written))
            numbers += [*table, *(number for column in zip(*padded, strict=True) for number in column)]
        fresh = host_memory(self._numbers.shape, torch.int32, self._numbers.device)
        fresh[: len(numbers)] = torch.tensor(numbers, dtype=torch.int32)
        self._rules_in(fresh).write((slot, row) for (slot, _), row in zip(self.seats, rows, strict=True))
        self._numbers.copy_(fresh, non_blocking=True)

    def ran(self) -> Reading | None:
        """How a pass that was made anew has read the documents, if by tables."""
        if self._untabled is None:
            return None
        self._untabled.ran()
        return self._untabled.reading

    def _rules_in(self, numbers: Tensor) -> TokenRules:
        return self._kind.rules.rules(torch.split(numbers, self._sizes)[self._of_rules :], self._slots)

    def begin(self) -> SlotPass:
        """What one pass reads and writes. What it makes of the numbers is made in the pass."""
        ids, positions, places, gathered, *of_slabs = torch.split(self._numbers, self._sizes)
        groups = []
        for number, slab in enumerate(self._slabs):
            table, *writes = of_slabs[4 * number : 4 * number + 4]
            groups.append(SlotGroup(slab, table.view(-1, 2), *writes))
        layout = SlotLayout(
            self._shares,
            self._suffixes,
            self._numbers.device,
            of_tokens=self._of_tokens,
            of_rows=[group.table for group in groups],
            places=places,
            gathered=gathered,
            begins=self._begins,
        )
        rules = self._rules_in(self._numbers)
        return SlotPass(ids.long()[None], positions.long()[None], groups, layout, rules, self._kind.wants)


@dataclass(frozen=True, eq=False)
class SlotPass:
    """One pass over slots. ids, positions: `[1, slots]` int64. rules: of its next tokens. wants: of the hooks."""

    ids: Tensor
    positions: Tensor
    groups: list[SlotGroup]
    layout: SlotLayout
    rules: TokenRules
    wants: Wants
    weights: dict[int, list[Tensor]] = field(default_factory=dict)
    states: list[Attended] = field(default_factory=list)

    def room(self, layer: int, q_heads: int) -> Sequence[Tensor]:
        """Where the attention of a layer tells what the tokens gave to their suffixes; none where no row asks."""
        if Wants.WEIGHTS not in self.wants:
            return ()
        shapes = [(len(rows.first), q_heads, rows.lengths[0]) for rows in self.layout.suffixes]
        self.weights[layer] = [torch.empty(shape, device=self.ids.device) for shape in shapes]
        return self.weights[layer]

    def observe(self, attended: Attended) -> None:
        """Keep the states of a layer, if rows want them."""
        if Wants.STATES in self.wants:
            self.states.append(attended)

    def end(self, logits: Tensor) -> PassOutcome:
        """What the pass gave, with the tokens that follow."""
        return PassOutcome(logits, choose(logits, self.rules), self.weights, self.states)


class SlotGroup:
    """The rows of one slab in a pass over slots. table: `[rows, 2]` int32, the slot and the length of each row of the
    slab, -1 and 1 where it takes no part. The other columns: of each token to be written its slot, the row of the slab
    and the place there; one that stands there twice is written twice."""

    def __init__(self, slab: ref[Slab], table: Tensor, slots: Tensor, rows: Tensor, places: Tensor) -> None:
        self.table = table
        self._slab = slab
        self._slots = slots
        self._rows = rows
        self._places = places
        self._into: dict[int, Tensor] = {}

    def write(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Append this step's keys and values of a layer, `[1, kv_heads, slots, D]`, or its latents. Returns those of
        the slab, `[rows, kv_heads, capacity, D]`."""
        slab = self._slab()
        assert slab is not None, "its rows hold it"
        states = slab.states(layer, *new)
        for entries, (step,) in zip(states, new, strict=True):
            by_token = step.transpose(0, 1).index_select(0, self._slots)  # [slots, kv_heads, D]
            flat = entries.view(-1, entries.shape[3])
            flat.index_copy_(0, self._rows_in(entries), by_token.reshape(-1, entries.shape[3]))
        return states

    def _rows_in(self, entries: Tensor) -> Tensor:
        """Where each token and head stands among the rows of `[rows * kv_heads * capacity, D]`; the same for keys and
        values, and in every layer with as many heads."""
        _, heads, capacity, _ = entries.shape
        if heads not in self._into:
            of_heads = self._rows.long()[:, None] * heads + torch.arange(heads, device=entries.device)
            self._into[heads] = (of_heads * capacity + self._places[:, None]).flatten()
        return self._into[heads]


@dataclass(frozen=True, eq=False, kw_only=True)
class SlotLayout(BatchLayout):
    """A layout whose lengths only the device knows: `suffixes` say that each row is as long as its slab has room, and
    what depends on the lengths is made on the device, in the pass.

    of_tokens, of_rows: `tables`. places: `[slots]` int32, where each token stands in its suffix. gathered: `scatter`.
    begins: `[slots]` int32, `starts` of each token.
    """

    of_tokens: Tensor
    of_rows: list[Tensor]
    places: Tensor
    gathered: Tensor
    begins: Tensor

    def since(self, window: int | None, chunk: int | None) -> Tensor:
        """As of a `BatchLayout`, once a pass."""
        if (window, chunk) not in self.sights:
            if window is not None:
                self.sights[window, chunk] = self.places - (window - 1)
            else:
                at = self.places + self.begins
                assert chunk is not None
                self.sights[window, chunk] = at - at % chunk - self.begins
        return self.sights[window, chunk]

    @cached_property
    def tables(self) -> tuple[Tensor, list[Tensor]]:
        return self.of_tokens, self.of_rows

    @cached_property
    def gathers(self) -> list[Tensor | None]:
        return [table[:, 0].clamp_min(0) for table in self.of_rows]

    @cached_property
    def scatter(self) -> Tensor | None:
        return self.gathered

    @cached_property
    def length_masks(self) -> list[Tensor | None]:
        masks: list[Tensor | None] = []
        for rows, table in zip(self.suffixes, self.of_rows, strict=True):
            beyond = torch.arange(rows.lengths[0], device=self.device) >= table[:, 1:]
            masks.append(torch.zeros(beyond.shape, device=self.device).masked_fill_(beyond, -torch.inf)[:, None, None])
        return masks
