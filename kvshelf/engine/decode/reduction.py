"""A suffix policy at work on one answer: what it noted of each layer, and which entries are left. Under scope "cache"
the answer has a copy of the document's last entries, which leave as its own do; those before them it reads in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from kvshelf.artifact.records import Merged
from kvshelf.engine.attention.attachment import Attached, Wait, block, entries_read
from kvshelf.engine.attention.function import Attended
from kvshelf.engine.decode.hooks import Copied, RowHook, Shown, Wants
from kvshelf.engine.decode.selection import EntryReader, Selection, StoredEntries
from kvshelf.engine.decode.suffixes import SuffixRow, capacity_for, insert
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.kernels.prefix_attention import LogitRules, MergedPrefix, Prefix
from kvshelf.methods.policies.gate_file import Gates
from kvshelf.methods.policies.gates.base import token_inputs
from kvshelf.methods.suffixes.base import DEFAULT_BUDGET, Columns, Reduction, SlotTable, Suffix, SuffixPolicy
from kvshelf.model.rope import Rope

_COPY: Final = EntryReader(
    "suffix.scope",
    "an answer has copies of whole ones",
    "an answer has copies of single entries",
    "ask with scope suffix",
)


class DocumentTail(Selection):
    """The document of one answer that has a copy of its last entries: what the answer reads in place are those before.

    entries: of a KV head, at most. copied: of these, in the copy. table_bytes: what says which are read in place.
    """

    def __init__(self, document: Attached, policy: SuffixPolicy, layers: Sequence[int], prefix: int) -> None:
        """layers: those that attend. prefix: first tokens, which the chat template wrote; these, and what a document
        protects, and all before them, are in no copy. Waits for layers that are arriving. Raises `PolicyUnsupported`
        for entries that cannot be copied one by one, and as `SuffixPolicy.tail`."""
        super().__init__(document)
        self.document = document
        self._reader = _COPY._replace(centers=policy.slotted)
        self._carried = policy.carried
        # What is read of all layers is not kept: a question may wait for long before it runs.
        positions = [own for layer in layers for own in self._entries(layer).positions]
        made = document.identity
        last = max([prefix, *(end for _, end in made.protect)])
        self.tokens = document.num_tokens
        self.entries = max(map(len, positions))
        self.copied = min(policy.tail(positions, made, prefix), *(int((own >= last).sum()) for own in positions))
        self.table_bytes = torch.int32.itemsize * sum(len(own) - self.copied for own in positions)
        if not self.copied:
            raise PolicyUnsupported(
                f"suffix policy {policy.name!r} lets no entry of this cache leave; leave suffix.scope out, or give "
                "other suffix.params",
                param="suffix.scope",
            )
        records = (record for layer in layers for record in document.entries(layer))
        if not all(record.centered for record in records if isinstance(record, Merged)):
            raise PolicyUnsupported(
                "the cache has merged tokens in classes whose key is that of none of them, and suffix policy "
                f"{policy.name!r} goes on with centers; leave suffix.scope out, or compress the document here",
                param="suffix.scope",
            )
        if any(numbers.isnan().any() for layer in layers for numbers in self._columns(layer).values()):
            raise PolicyUnsupported(
                f"suffix policy {policy.name!r} goes on with what its paper has noted of each entry by the end of the "
                f"document ({', '.join(sorted(self._carried))}), and entries of this cache have none of it; compress "
                f"the document by policy {policy.document_policy} with keep_scores true, or leave suffix.scope out",
                param="suffix.scope",
            )
        self._rest: dict[int, tuple[Prefix, ...]] = {}
        self._sharing: dict[int, tuple[Prefix, ...]] = {}
        """Of the entries in `_rest`, the tokens that share them."""

    def prefixes(self, layer: int, wait: Wait = block) -> tuple[Prefix, ...]:  # noqa: ARG002
        return self._rest.get(layer, ()) + self._sharing.get(layer, ())

    @property
    def read_tokens(self) -> int:
        """Tokens that share entries are none."""
        return entries_read(self._rest.values())

    def _entries(self, layer: int) -> StoredEntries:
        return StoredEntries.of(self.document, layer, self._reader)

    def _columns(self, layer: int) -> Columns:
        """Of each carried column the numbers `[kv_heads, K]` of the tail of a layer; NaN where a record has none."""
        if not self._carried:
            return {}
        records, order = self.document.entries(layer), self._entries(layer).order
        tails: Columns = {}
        for name in self._carried:
            heads = zip(zip(*(record.of_entries(name) for record in records), strict=True), order, strict=True)
            tails[name] = torch.stack([torch.cat(own)[rows[-self.copied :].to(own[0].device)] for own, rows in heads])
        return tails

    def copy(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Columns]:
        """Keys `[kv_heads, K, D]`, values, positions `[kv_heads, K]` and carried columns of the tail of a layer, which
        is no longer read in place."""
        stored = self._entries(layer)
        if any(len(own) > self.copied for own in stored.order):
            kept = [torch.arange(len(own) - self.copied, device=own.device) for own in stored.order]
            self._rest[layer] = stored.selected(kept)
        positions = torch.stack([own[-self.copied :] for own in stored.positions])
        return *stored.dense(self.copied), positions, self._columns(layer)

    def slots(self, layer: int) -> SlotTable | None:
        """The tokens that share entries of the tail of a layer, with their carried columns, once it is copied. Those
        that share entries before it are read in place, as these are."""
        # Of each head's rows their places in the tail, below 0 before it.
        places = [order.argsort() - (len(order) - self.copied) for order in self._entries(layer).order]
        names, shared = sorted(self._carried), list[list[Tensor]]()
        for prefix, record in zip(self.document.prefixes(layer), self.document.entries(layer), strict=True):
            own = [rows[:length] for rows, length in zip(places, prefix.lengths, strict=True)]
            places = [rows[length:] for rows, length in zip(places, prefix.lengths, strict=True)]
            if not isinstance(prefix, MergedPrefix) or not isinstance(record, Merged):
                continue
            device, lengths = prefix.slot_scales.device, torch.tensor(prefix.slot_lengths)
            heads = torch.arange(len(lengths)).repeat_interleave(lengths).to(device)
            owners = torch.cat([rows[classes] for rows, (*_, classes) in zip(own, prefix.heads, strict=True)])
            beside = torch.cat(record.beside).to(device)
            leaving, staying = beside & (owners >= 0), beside & (owners < 0)
            columns = (record.columns[name].to(device) for name in names)
            shared.append([own[leaving] for own in (heads, owners, prefix.slot_scales, *columns)])
            if bool(staying.any()):
                scales, classes = prefix.slot_scales[staying], prefix.slot_classes[staying]
                counts = tuple(heads[staying].bincount(minlength=len(lengths)).tolist())
                in_place = replace(prefix, slot_scales=scales, slot_classes=classes, slot_lengths=counts)
                self._sharing[layer] = (*self._sharing.get(layer, ()), in_place)
        if not any(len(heads) for heads, *_ in shared):
            return None
        heads, owners, scales, *noted = map(torch.cat, zip(*shared, strict=True))
        return SlotTable.of(heads, len(places), owners, scales, dict(zip(names, noted, strict=True)))


class SlotsBeside(Selection):
    """What an answer sees before its suffix, and the tokens that share entries of this, which is where they lie in
    memory at each step. Made anew whenever these change: to a batch it is another document."""

    def __init__(
        self, document: Attached, seen: Attached | Selection, row: SuffixRow, slots: Mapping[int, SlotTable]
    ) -> None:
        """seen: what it sees beside them. slots: of each layer that has some."""
        super().__init__(document)
        self.beside = seen
        self._row = row
        self._slots = slots
        self._made: dict[int, tuple[int, MergedPrefix]] = {}
        """Of each layer, for the address where its keys were."""

    def prefixes(self, layer: int, wait: Wait = block) -> tuple[Prefix, ...]:
        seen = self.beside.prefixes(layer, wait)
        if layer not in self._slots:
            return seen
        assert self._row.slab is not None
        keys, values = self._row.slab.of_row(layer, self._row)
        address = keys.data_ptr()
        if layer not in self._made or self._made[layer][0] != address:
            self._made[layer] = address, self._slots[layer].prefix(keys, values)
        return (*seen, self._made[layer][1])

    @property
    def read_tokens(self) -> int:
        return self.beside.read_tokens


class SuffixReducer(RowHook):
    """One row of a batch uses it. Layers share no state, and rows none.

    tail: the document, where the policy chooses among its last entries, too; else None.
    """

    def __init__(
        self,
        policy: SuffixPolicy,
        question_tokens: int,
        budget: int | None,
        layers: Sequence[int],
        tail: DocumentTail | None = None,
        gates: tuple[Gates, Rope] | None = None,
    ) -> None:
        """budget: entries of a KV head (default: `DEFAULT_BUDGET` beside those that are protected; with a tail, as many
        as the document has, or what is always kept). layers: those that attend. Raises `InvalidRequest` for a budget
        below what the policy always keeps, and for any where its parameters say how much stays. gates: for a policy
        that needs them, with what takes the rotation off what they read."""
        self._policy = policy
        self._question = question_tokens
        self._protected = question_tokens if policy.protect_question else 0
        self.tail = tail
        self._gates = gates
        in_place = 0 if tail is None else tail.entries - tail.copied
        always = policy.least_with(self.of_document)
        least = self._protected + always
        if not policy.bounded and budget is not None:
            raise InvalidRequest(
                f"the parameters of policy {policy.name!r} say how much stays; leave suffix.budget out",
                param="suffix.budget",
            )
        if budget is None:
            budget = self._protected + max(DEFAULT_BUDGET, always) if tail is None else tail.entries
            budget = max(budget, in_place + least)
        self._budget = budget - in_place if policy.bounded else 0
        if policy.bounded and self._budget < least:
            of_document = f"{in_place} of the document, " if in_place else ""
            of_question = f"{self._protected} of the question, which stay, and " if self._protected else ""
            raise InvalidRequest(
                f"suffix.budget is {budget}, and policy {policy.name!r} always keeps {in_place + least} entries here: "
                f"{of_document}{of_question}{always} by its parameters; give more, or change these",
                param="suffix.budget",
            )
        self._layers = {layer: _Noted(policy, self.most) for layer in layers}
        self._beside: SlotsBeside | None = None

    @property
    def of_document(self) -> int:
        """Entries of a KV head of the document that the row has a copy of."""
        return 0 if self.tail is None else self.tail.copied

    @property
    def table_bytes(self) -> int:
        """Bytes that say which of the document's entries the answer reads in place."""
        return 0 if self.tail is None else self.tail.table_bytes

    def slot_bytes(self, entries: int) -> int:
        """Bytes of the tokens that share so many entries, in a KV head of every layer."""
        token = torch.int64.itemsize + torch.float32.itemsize * (1 + len(self._policy.columns))
        return len(self._layers) * token * self._policy.most_slots(entries)

    @property
    def most(self) -> int | None:
        """The most entries of a KV head that the row ever has; None: without a bound."""
        if not self._policy.bounded:
            return None
        return max(self._budget, self._question + self.of_document) + self._policy.interval

    def expect(self, tokens: int) -> None:
        """Told before the row begins that at most so many tokens come behind the document: where the budget has room
        for all, the document is read as by any other answer."""
        if tokens + self.of_document <= self._budget:
            self.tail = None

    def wants(self, row: SuffixRow, *, answering: bool) -> Wants:
        if self._gates is not None:
            return Wants.STATES
        if not answering or not self._policy.observes_at(row.logical + 1 - self._question):
            return Wants.NOTHING
        return Wants.WEIGHTS | Wants.STATES if self._slots() else Wants.WEIGHTS

    def seen(self, document: Attached, seen: Attached | Selection, row: SuffixRow) -> Attached | Selection:
        """What the row sees before its suffix, which without slots would be `seen`. The same object as long as that and
        the slots are."""
        slots = self._slots()
        if not slots:
            return seen
        if self._beside is None or self._beside.beside is not seen:
            self._beside = SlotsBeside(document, seen, row, slots)
        return self._beside

    def _slots(self) -> dict[int, SlotTable]:
        return {layer: noted.slots for layer, noted in self._layers.items() if noted.slots is not None}

    def after(self, row: SuffixRow, shown: Shown, *, answering: bool) -> None:  # noqa: ARG002
        """Note what the newest token, which the row has by now, gave to each entry, itself included, and what gates
        make of the tokens that ran."""
        if self._gates is not None:
            for place, layer in enumerate(self._layers):
                self._note_gated(row, place, shown.states[layer])
        for layer, weights in shown.weights.items():
            assert row.slab is not None
            keys, answered, noted = row.slab.of_row(layer, row)[0], row.logical - self._question, self._layers[layer]
            positions, columns = noted.of(row, len(keys), weights.device)
            by_group = weights.view(len(keys), -1, row.stored)  # [kv_heads, group, S]
            self._policy.observe(columns, by_group, positions, answered)
            if (slots := noted.slots) is not None:
                states = shown.states[layer]
                queries = states.queries[0, :, -1].view(*by_group.shape[:2], -1)
                rules = LogitRules(states.scaling, states.softcap)
                weights = slots.weights(by_group, queries, keys[:, : row.stored], rules)
                self._policy.observe(slots.columns, weights, slots.of_owners(positions), answered)

    def _note_gated(self, row: SuffixRow, place: int, states: Attended) -> None:
        """place: of the layer, among those that attend."""
        assert self._gates is not None
        (gates, rope), device = self._gates, states.keys.device
        _, heads, count, _ = states.keys.shape
        _, columns = self._layers[states.layer_idx].of(row, heads, device)
        end = row.first + row.logical
        at = torch.arange(end - count, end, device=device)
        rows = token_inputs(states.queries[0], states.keys[0], states.values[0], at, rope)
        for name, noted in self._policy.gated(gates.layer(place, device), rows).items():
            columns[name][:, row.stored - count :] = noted

    def copies(self, row: SuffixRow) -> Copied | None:
        if self.tail is None:
            return None
        return Copied(self._protected, self.tail.copied, self._copied(row, self.tail))

    def _copied(self, row: SuffixRow, tail: DocumentTail) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        for layer, noted in self._layers.items():
            keys, values, positions, columns = tail.copy(layer)
            noted.insert(row, self._protected, (positions - tail.tokens).to(keys.device), columns)
            if self._policy.slotted:
                noted.begin(tail.slots(layer), self._protected)
            yield layer, (keys, values)

    def reduced(self, row: SuffixRow) -> int | None:
        """Move the entries that stay to the front of the row's slot, if it is time. Returns how many entries it has
        before the next reduction. If it raises, some layers may be reduced."""
        answered = row.logical - self._question
        if answered <= 0 or answered % self._policy.interval or row.stored <= self._budget:
            return None
        assert row.slab is not None
        left = row.stored
        for layer, noted in self._layers.items():
            keys, values = row.slab.of_row(layer, row)
            suffix = Suffix(
                layer,
                keys[:, : row.stored],
                values[:, : row.stored],
                *noted.of(row, len(keys), keys.device),
                self._protected,
                row.logical,
                self._budget,
                self.of_document,
                noted.slots,
            )
            reduction = self._policy.reduce(suffix)
            left = reduction.kept.shape[1]
            keys[:, :left], values[:, :left] = _states(suffix, reduction)
            noted.reduced(suffix, reduction)
        row.stored = left
        self._beside = None
        return left + self._policy.interval


def _states(suffix: Suffix, reduction: Reduction) -> tuple[Tensor, Tensor]:
    """Keys and values that stay, not where they stood: they move over each other."""
    heads = torch.arange(len(suffix.keys), device=suffix.keys.device).unsqueeze(1)
    keys = suffix.keys[heads, reduction.kept] if reduction.keys is None else reduction.keys
    values = suffix.values[heads, reduction.kept] if reduction.values is None else reduction.values
    return keys, values


class _Noted:
    """Of one layer, the place of each stored entry among all tokens, and the policy's columns. A column has its first
    value where no entry is yet. Their memory grows with the row, by the capacities of slabs: budget and interval are
    the caller's, and may be far beyond what the answer will ever have."""

    def __init__(self, policy: SuffixPolicy, most: int | None) -> None:
        self._first = policy.columns
        self._most = most
        self._positions = torch.empty(0, 0, dtype=torch.int64)
        self._columns: Columns = {}
        self.slots: SlotTable | None = None
        """The tokens that share the row's entries."""
        self._tokens = 0
        """How many of the row's tokens it has a position for, or had."""

    def of(self, row: SuffixRow, heads: int, device: torch.device) -> tuple[Tensor, Columns]:
        """Positions `[kv_heads, S]` int64 and columns of the row's entries, not copies."""
        if row.stored > self._positions.shape[1]:
            self._grow(heads, capacity_for(row.stored, self._most), device)
        if new := row.logical - self._tokens:
            places = torch.arange(self._tokens, row.logical, device=device)
            self._positions[:, row.stored - new : row.stored] = places
            self._tokens = row.logical
        columns = {name: column[:, : row.stored] for name, column in self._columns.items()}
        return self._positions[:, : row.stored], columns

    def insert(self, row: SuffixRow, place: int, positions: Tensor, columns: Columns) -> None:
        """Put entries before the row's entry `place`. positions, and what is noted of them already: `[kv_heads, K]`."""
        heads, count = positions.shape
        self.of(row, heads, positions.device)
        if row.stored + count > self._positions.shape[1]:
            self._grow(heads, capacity_for(row.stored + count, self._most), positions.device)
        insert(self._positions, place, row.stored, positions)
        for name, column in self._columns.items():
            first = column.new_full(positions.shape, self._first[name])
            insert(column, place, row.stored, columns.get(name, first).to(column.device))

    def begin(self, slots: SlotTable | None, place: int) -> None:
        """Take the tokens that share entries which were put before the row's entry `place`, with what is noted of them
        already."""
        if slots is not None:
            first = {name: torch.full_like(slots.scales, value) for name, value in self._first.items()}
            owners = torch.where(slots.there, slots.owners + place, -1)
            self.slots = SlotTable(owners, slots.scales, first | slots.columns)

    def _grow(self, heads: int, capacity: int, device: torch.device) -> None:
        had = self._positions.shape[1]
        positions = torch.empty(heads, capacity, dtype=torch.int64, device=device)
        columns = {name: torch.full((heads, capacity), first, device=device) for name, first in self._first.items()}
        if had:
            positions[:, :had] = self._positions
            for name, column in self._columns.items():
                columns[name][:, :had] = column
        self._positions, self._columns = positions, columns

    def reduced(self, suffix: Suffix, reduction: Reduction) -> None:
        """Keep what was noted of the entries that stay."""
        left = reduction.kept.shape[1]
        self._positions[:, :left] = suffix.positions.gather(1, reduction.kept)
        for name, column in suffix.columns.items():
            given = None if reduction.columns is None else reduction.columns[name]
            column[:, :left] = column.gather(1, reduction.kept) if given is None else given
            column[:, left:] = self._first[name]
        self.slots = reduction.slots
