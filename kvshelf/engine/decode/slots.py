"""Steps of one token a row in slots: the same operations on the same addresses, step after step, so that CUDA records
them once and runs them again as one graph (https://docs.nvidia.com/cuda/cuda-c-programming-guide, "CUDA Graphs").

A document has as many slots as rows that read it, rounded up to a class. Which rows sit in them, where the suffix of
each lies in its slab and how long it is stands in one tensor, which every step fills by one copy. So rows may come,
leave and grow; only other documents, another class, or slabs that are new or have grown need another recording.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, Final, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from kvshelf.engine.attention.attachment import Attached, Wait, block
from kvshelf.engine.decode.generation import Generation
from kvshelf.engine.decode.selection import Selection
from kvshelf.engine.decode.suffixes import Slab
from kvshelf.engine.forward.passes import Passes
from kvshelf.engine.progress import Checkpoint, nothing
from kvshelf.kernels.prefix_attention import BatchLayout, Prefix, SuffixRows
from kvshelf.model.devices import hooked

_LOG = logging.getLogger(__name__)

CLASSES: Final = (1, 2, 3, 4, 6, 8, 12, 16)
"""Slots of a document, and all multiples of 8 beyond. At most a third of them is vacant."""

_MOST_SEATINGS: Final = 8
"""A recording keeps the logits of its slots, 10 MB for 32 slots of 150,000 tokens in bf16. All share the rest."""

Forward = Callable[[Checkpoint], Tensor]
"""A pass over the slots, which gives logits `[slots, vocabulary]`."""

Replay = Callable[[], Tensor]
"""Runs a recorded pass again. What it gives is overwritten by the next run."""

Recorder = Callable[[Callable[[], Tensor]], Replay]
"""Records a pass, which need not run meanwhile."""


class Slots:
    """The seatings of a batch's last steps. Not thread-safe: one thread owns the model."""

    def __init__(self, device: torch.device, recorder: Recorder | None = None) -> None:
        """recorder: None: each pass runs anew, which is what a recording is compared with."""
        self._device = device
        self._recorder = recorder
        self._seatings: dict[object, Seating] = {}

    @classmethod
    def of(cls, passes: Passes) -> Slots | None:
        """None where nothing would be gained, or no recording can be made: on a CPU, and for a model on several
        devices or in several processes."""
        devices = passes.devices.each
        alone = len(devices) == 1 and passes.ranks is None and not hooked(passes.model)
        return cls(devices[0], GraphRecorder(devices[0])) if alone and devices[0].type == "cuda" else None

    def seating(self, rows: Sequence[Generation]) -> Seating:
        """The slots of rows with one pending token each, those of one document side by side, once they sit there."""
        shares = [(document, len(list(same))) for document, same in groupby(rows, key=lambda row: row.seen)]
        slabs = sorted({id(slab): slab for row in rows if (slab := row.row.slab)}.values(), key=lambda s: s.capacity)
        owners = [*(document for document, _ in shares), *slabs]
        sizes = [*(slots_for(count) for _, count in shares), *(slab.slots for slab in slabs)]
        key = tuple((ref(owner), size) for owner, size in zip(owners, sizes, strict=True))
        seating = self._seatings.pop(key, None)
        if seating is None:
            # What a recording reads must not stay in memory for its sake, and nothing else may be read in its place.
            ends = [ref(owner, lambda _: self._seatings.pop(key, None)) for owner in owners]
            seating = Seating(shares, slabs, self._device, ends)
        self._seatings[key] = seating
        for oldest in list(self._seatings)[:-_MOST_SEATINGS]:
            self._seatings.pop(oldest, None)
        seating.enter([count for _, count in shares], rows, slabs)
        return seating

    def run(self, seating: Seating, forward: Forward, checkpoint: Checkpoint) -> Tensor:
        """Logits `[slots, vocabulary]`, until the next run. The pass of a seating is recorded behind the second one,
        because many a seating has no third; and one just before has compiled all kernels and made all memory that a
        recording must find."""
        if seating.replay is not None:
            checkpoint()
            return seating.replay()
        logits = forward(checkpoint)
        if self._recorder is not None and seating.passes:
            try:
                seating.replay = self._recorder(lambda: forward(nothing))
            except Exception as exc:  # whatever a model's code does that waits for the device
                self._recorder = None
                _LOG.warning("decode steps run without CUDA graphs, which is slower: %s", exc)
        seating.passes += 1
        return logits


class GraphRecorder:
    """Records passes as CUDA graphs, whose memory they share: one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, forward: Callable[[], Tensor]) -> Replay:
        """Raises what the pass raises, and `RuntimeError` where it does what a graph cannot hold."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        # Not `torch.cuda.graph`, which waits for the device and gives all unused memory back. Other threads go on
        # meanwhile: layers of documents arrive by copies of their own.
        with torch.cuda.stream(stream):
            graph.capture_begin(self._pool, "thread_local")
            try:
                logits = forward()
            finally:
                graph.capture_end()
        current.wait_stream(stream)

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


def slots_for(rows: int) -> int:
    """Slots of a document that so many rows read."""
    return next((size for size in CLASSES if size >= rows), -(-rows // 8) * 8)


class Seating:
    """The slots of the documents of a step. Between steps it changes in the numbers of `_numbers` alone.

    documents: what the slots see. passes: how many have run that were not replayed. replay: once it is recorded.
    """

    def __init__(
        self,
        shares: Sequence[tuple[Attached | Selection, int]],
        slabs: Sequence[Slab],
        device: torch.device,
        ends: Sequence[object],
    ) -> None:
        """shares: each document with its rows. ends: kept for as long as this is: they call when one of these ends."""
        self.documents = [SeatedDocument(document) for document, _ in shares]
        self.passes = 0
        self.replay: Replay | None = None
        self._ends = ends
        self._slabs = [ref(slab) for slab in slabs]
        self._suffixes = tuple(SuffixRows((slab.capacity,) * slab.slots, (-1,) * slab.slots) for slab in slabs)
        self._starts = tuple(document.next_position for document, _ in shares)
        self._shares = tuple(slots_for(count) for _, count in shares)
        self._of_tokens = BatchLayout(self._shares, (), device).tables[0]
        of_slots = torch.tensor(self._starts).repeat_interleave(torch.tensor(self._shares))
        self._begins = of_slots.to(device, torch.int32)
        slots = sum(self._shares)
        self._sizes = [slots] * 5 + [size for slab in slabs for size in (2 * slab.slots, slots, slots, slots)]
        self._numbers = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        self._rows = 0

    def enter(self, counts: Sequence[int], rows: Sequence[Generation], slabs: Sequence[Slab]) -> None:
        """Seat rows for a step. counts: how many read each document; its other slots are vacant: token 0 at position 0,
        without a suffix, whose results nobody reads."""
        slots, self._rows = sum(self._shares), len(rows)
        ids, positions, places, gathered, live = ([0] * slots for _ in range(5))
        tables = [[-1, 1] * slab.slots for slab in slabs]
        writes: list[list[tuple[int, int, int]]] = [[] for _ in slabs]
        firsts = list(accumulate((slab.slots for slab in slabs), initial=0))
        begins = accumulate(self._shares, initial=0)
        taken = (begin + i for begin, count in zip(begins, counts, strict=False) for i in range(count))
        for nth, (slot, row) in enumerate(zip(taken, rows, strict=True)):
            suffix = row.row
            number = next(number for number, slab in enumerate(slabs) if slab is suffix.slab)
            ids[slot], positions[slot], live[nth] = row.pending[0], row.next_position, slot
            places[slot], gathered[slot] = suffix.stored, firsts[number] + suffix.slot
            tables[number][2 * suffix.slot : 2 * suffix.slot + 2] = slot, suffix.stored + 1
            writes[number].append((slot, suffix.slot, suffix.stored))
        numbers = [*ids, *positions, *places, *gathered, *live]
        for table, own in zip(tables, writes, strict=True):
            # As many as there are slots: the others write the first one once more.
            padded = own + own[:1] * (slots - len(own))
            numbers += [*table, *(number for column in zip(*padded, strict=True) for number in column)]
        fresh = torch.tensor(numbers, dtype=torch.int32)
        if self._numbers.is_cuda:
            fresh = fresh.pin_memory()  # a copy from any other memory waits for what the device is doing
        self._numbers.copy_(fresh, non_blocking=True)

    def begun(self) -> SlotPass:
        """What one pass reads and writes. What it makes of the numbers is made in the pass."""
        ids, positions, places, gathered, _, *of_slabs = torch.split(self._numbers, self._sizes)
        groups = []
        for number, slab in enumerate(self._slabs):
            table, *writes = of_slabs[4 * number : 4 * number + 4]
            groups.append(SlotGroup(slab, table.view(-1, 2), *writes))
        layout = SlotLayout(
            self._shares,
            self._suffixes,
            self._numbers.device,
            self._starts,
            of_tokens=self._of_tokens,
            of_rows=[group.table for group in groups],
            places=places,
            gathered=gathered,
            begins=self._begins,
        )
        return SlotPass(ids.long()[None], positions.long()[None], groups, layout)

    def of_rows(self, logits: Tensor) -> Tensor:
        """The logits `[rows, vocabulary]` of the rows that sit here, in their order, out of those of all slots. A
        copy."""
        live = torch.split(self._numbers, self._sizes)[4]
        return logits.index_select(0, live[: self._rows])


class SlotPass(NamedTuple):
    """One pass over slots. ids, positions: `[1, slots]` int64."""

    ids: Tensor
    positions: Tensor
    groups: list[SlotGroup]
    layout: SlotLayout


class SeatedDocument:
    """A document as its slots see it: by prefixes of their own. What a form of attention remembers of a prefix, such as
    a table of work on the device, is then made for these slots and lives as long as they."""

    def __init__(self, document: Attached | Selection) -> None:
        self._document = ref(document)
        self._prefixes: dict[int, tuple[Prefix, ...]] = {}

    def prefixes(self, layer: int, wait: Wait = block) -> tuple[Prefix, ...]:
        """Those of the document, without a copy of their tensors."""
        if layer not in self._prefixes:
            document = self._document()
            assert document is not None, "its rows hold it"
            self._prefixes[layer] = tuple(replace(prefix) for prefix in document.prefixes(layer, wait))
        return self._prefixes[layer]


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
        for entries, (own,) in zip(states, new, strict=True):
            by_token = own.transpose(0, 1).index_select(0, self._slots)  # [slots, kv_heads, D]
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
