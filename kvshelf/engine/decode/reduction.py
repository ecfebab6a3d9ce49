"""A suffix policy at work on one answer: what it noted of each layer, and which entries are left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvshelf.artifact.records import Merged
from kvshelf.engine.attention.attachment import Attached, Wait, block, entries_read
from kvshelf.engine.attention.function import Attended
from kvshelf.engine.decode.hooks import Copied, RowHook, Shown, Wants
from kvshelf.engine.decode.selection import EntryReader, Selection, StoredEntries, behind_zeros
from kvshelf.engine.decode.suffixes import EntriesBeside, NotedEntries, SuffixRow
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.kernels.prefix_attention import LogitRules, MergedPrefix, Prefix
from kvshelf.methods.method import Needs
from kvshelf.methods.policies.gate_file import OpenGates
from kvshelf.methods.policies.gates.base import token_inputs
from kvshelf.methods.policies.sharing import floored
from kvshelf.methods.suffixes.base import DEFAULT_BUDGET, Columns, Reduction, SlotTable, Suffix, SuffixPolicy
from kvshelf.model.rope import Rope

_COPY: Final = EntryReader(
    "suffix.scope",
    "an answer has copies of whole ones",
    "an answer has copies of single entries",
    "ask with scope suffix",
)


class _Share(NamedTuple):
    """What has a share of the budget: a head, all heads of a layer, or all there are. Of each of its KV heads, the
    entries that the answer reads in place, at most, and those that are taken from the document to be its own."""

    in_place: int
    taken: int


class DocumentTail(Selection):
    """The document of one answer that has a copy of its last entries: what the answer reads in place are those before.

    shares: of what. copied: entries of a KV head in the copy, on average. sharing: tokens that share the entries of a
    KV head, at most. table_bytes: what says which entries are read in place.
    """

    def __init__(self, document: Attached, policy: SuffixPolicy, layers: Sequence[int], prefix: int) -> None:
        """layers: those that attend. prefix: first tokens, which the chat template wrote; these, and what a document
        protects, and all before them, are in no copy. Waits for layers that are arriving. Raises `PolicyUnsupported`
        for entries that cannot be copied one by one, and as `SuffixPolicy.tail`."""
        super().__init__(document)
        self.document = document
        self.tokens = document.num_tokens
        self._reader = _COPY._replace(centers=policy.slotted)
        self._carried = policy.carried
        # What is read of all layers is not kept: a question may wait for long before it runs.
        of_layers = [self._entries(layer).positions for layer in layers]
        positions = [of_head for of_layer in of_layers for of_head in of_layer]
        identity = document.identity
        protected = max([prefix, *(end for _, end in identity.protect)])
        heads = zip(policy.tail(positions, identity, prefix), positions, strict=True)
        sizes = iter([(len(entries), min(most, int((entries >= protected).sum()))) for most, entries in heads])
        of_heads = [list(islice(sizes, len(of_layer))) for of_layer in of_layers]
        self.shares, self._taken = _shared(of_heads, layers, policy.differ)
        taken = sum(map(sum, self._taken.values()))
        self.copied = -(-taken // len(positions))
        self.table_bytes = torch.int32.itemsize * (sum(map(len, positions)) - taken)
        if not taken:
            raise PolicyUnsupported(
                f"suffix policy {policy.name!r} lets no entry of this cache leave; leave suffix.scope out, or give "
                "other suffix.params",
                param="suffix.scope",
            )
        merged = [[record for record in document.entries(layer) if isinstance(record, Merged)] for layer in layers]
        heads_beside = (head for records in merged for head in zip(*(record.beside for record in records), strict=True))
        self.sharing = max((sum(int(beside.sum()) for beside in head) for head in heads_beside), default=0)
        if not all(record.centered for records in merged for record in records):
            raise PolicyUnsupported(
                "the cache has merged tokens in classes whose key is that of none of them, and suffix policy "
                f"{policy.name!r} goes on with centers; leave suffix.scope out, or compress the document here",
                param="suffix.scope",
            )
        columns = (column for layer in layers for heads in self._columns(layer).values() for column in heads)
        if not all(column.isfinite().all() for column in columns):
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

    def counted(self, layer: int) -> tuple[Prefix, ...]:
        return self._rest.get(layer, ())

    @property
    def read_tokens(self) -> int:
        """Tokens that share entries are none."""
        return entries_read(self._rest.values())

    def _entries(self, layer: int) -> StoredEntries:
        return StoredEntries.of(self.document, layer, self._reader)

    def _columns(self, layer: int) -> dict[str, list[Tensor]]:
        """Of each carried column the numbers `[K]` of each head's tail at a layer; NaN where a record has none."""
        if not self._carried:
            return {}
        records, order = self.document.entries(layer), self._entries(layer).order
        tails: dict[str, list[Tensor]] = {}
        for name in self._carried:
            parts = zip(*(record.of_entries(name) for record in records), strict=True)
            heads = zip(parts, order, self._taken[layer], strict=True)
            tails[name] = [torch.cat(own)[rows[len(rows) - count :].to(own[0].device)] for own, rows, count in heads]
        return tails

    def copy(self, layer: int) -> tuple[tuple[Tensor, Tensor], Tensor, Columns, Tensor]:
        """Keys `[kv_heads, K, D]` and values, positions `[kv_heads, K]`, carried columns of the tail of a layer, which
        is no longer read in place, and which of these are entries: the last ones of each head."""
        stored, taken = self._entries(layer), self._taken[layer]
        begins = [len(order) - count for order, count in zip(stored.order, taken, strict=True)]
        if any(begins):
            kept = [torch.arange(begin, device=rows.device) for rows, begin in zip(stored.order, begins, strict=True)]
            self._rest[layer] = stored.selected(kept)
        keys, values = stored.dense(taken)
        tail = [positions[begin:] for positions, begin in zip(stored.positions, begins, strict=True)]
        columns = {name: behind_zeros(heads).to(keys.device) for name, heads in self._columns(layer).items()}
        there = behind_zeros([torch.ones_like(positions, dtype=torch.bool) for positions in tail])
        return (keys, values), behind_zeros(tail).to(keys.device) - self.tokens, columns, there.to(keys.device)

    def slots(self, layer: int) -> SlotTable | None:
        """The tokens that share entries of the tail of a layer, with their carried columns, once it is copied. Those
        that share entries before it are read in place, as these are."""
        # Of each head's rows their places in the tail, below 0 before it.
        heads_taken = zip(self._entries(layer).order, self._taken[layer], strict=True)
        places = [order.argsort() - (len(order) - count) for order, count in heads_taken]
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


class OwnPrefixes(Selection):
    """What an answer sees before its suffix, and what it has of its own beside the slab: entries of an uneven number,
    and tokens that share entries of the suffix. Made anew whenever these change: to a batch it is another document."""

    def __init__(
        self, document: Attached, seen: Attached | Selection, row: SuffixRow, layers: Mapping[int, NotedEntries]
    ) -> None:
        """seen: what it sees of the document. layers: what the row has of each."""
        super().__init__(document)
        self.visible = seen
        self._row = row
        self._layers = layers
        self._sharing: dict[int, tuple[int, MergedPrefix]] = {}
        """Of each layer with slots, for the address where the suffix's keys were."""

    def prefixes(self, layer: int, wait: Wait = block) -> tuple[Prefix, ...]:
        noted, prefixes = self._layers.get(layer), list(self.visible.prefixes(layer, wait))
        if noted is not None and noted.beside is not None and max(noted.beside.prefix.lengths):
            prefixes.append(noted.beside.prefix)
        if noted is not None and noted.slots is not None:
            prefixes.append(self._sharing_entries(layer, noted.slots))
        return tuple(prefixes)

    def _sharing_entries(self, layer: int, slots: SlotTable) -> MergedPrefix:
        assert self._row.slab is not None
        keys, values = self._row.slab.of_row(layer, self._row)
        address = keys.data_ptr()
        if layer not in self._sharing or self._sharing[layer][0] != address:
            self._sharing[layer] = address, slots.prefix(keys, values)
        return self._sharing[layer][1]

    @property
    def read_tokens(self) -> int:
        return self.visible.read_tokens


def _shared(
    of_layers: Sequence[Sequence[tuple[int, int]]], layers: Sequence[int], differ: str
) -> tuple[list[_Share], dict[int, list[int]]]:
    """The shares of the budget, and how many entries are taken of each head of each layer. of_layers: of each head, how
    many there are, and how many may be taken."""
    heads = [head for layer in of_layers for head in layer]
    groups = {"none": [heads], "layers": of_layers, "heads": [[head] for head in heads]}[differ]
    least = [min(taken for _, taken in group) for group in groups]
    shares = [_Share(max(size for size, _ in group) - taken, taken) for group, taken in zip(groups, least, strict=True)]
    taken = iter([share.taken for share, group in zip(shares, groups, strict=True) for _ in group])
    return shares, {layer: list(islice(taken, len(heads))) for layer, heads in zip(layers, of_layers, strict=True)}


class SuffixReducer(RowHook):
    """One row of a batch uses it. Layers share no state but a budget, and rows none.

    tail: the document, where the policy chooses among its last entries, too; else None.
    """

    def __init__(
        self,
        policy: SuffixPolicy,
        question_tokens: int,
        budget: int | None,
        layers: Sequence[int],
        tail: DocumentTail | None = None,
        gates: tuple[OpenGates, Rope] | None = None,
    ) -> None:
        """budget: entries of a KV head, on average where heads or layers have shares of their own (default:
        `DEFAULT_BUDGET` beside those that are protected; with a tail, as many as the document has, or what is always
        kept). layers: those that attend. Raises `InvalidRequest` for a budget below what the policy always keeps, and
        for any where its parameters say how much stays. gates: for a policy that needs them, with the
        model's RoPE, which takes the rotation off their inputs."""
        self._policy = policy
        self._question = question_tokens
        self._protected = question_tokens if policy.protect_question else 0
        self.tail = tail
        self._gates = gates
        always = policy.least_with(self.of_document)
        least = self._protected + always
        shares = [_Share(0, self._protected + max(DEFAULT_BUDGET, always))] if tail is None else tail.shares
        in_place = sum(share.in_place for share in shares)
        if not policy.bounded and budget is not None:
            raise InvalidRequest(
                f"the parameters of policy {policy.name!r} say how much stays; leave suffix.budget out",
                param="suffix.budget",
            )
        taken = [share.taken for share in shares]
        total = max(sum(taken), least * len(shares)) if budget is None else budget * len(shares) - in_place
        if policy.bounded and total < least * len(shares):
            in_place = -(-in_place // len(shares))
            of_document = f"{in_place} of the document, " if in_place else ""
            of_question = f"{self._protected} of the question, which stay, and " if self._protected else ""
            raise InvalidRequest(
                f"suffix.budget is {budget}, and policy {policy.name!r} always keeps {in_place + least} entries here: "
                f"{of_document}{of_question}{always} by its parameters; give more, or change these",
                param="suffix.budget",
            )
        self._budgets = floored(taken, total, least, total) if policy.bounded else [0]
        """Of each share."""
        self._layers = {layer: NotedEntries(policy) for layer in layers}
        self._prefixes: OwnPrefixes | None = None

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
        first = 0 if self.tail is None else self.tail.sharing
        return len(self._layers) * self._token_bytes * max(first, self._policy.most_slots(entries))

    @property
    def _token_bytes(self) -> int:
        """Of a token that shares an entry: what is noted and what attention reads."""
        noted = torch.int64.itemsize + torch.float32.itemsize * (1 + len(self._policy.columns))
        return noted + torch.int32.itemsize + torch.float32.itemsize

    @property
    def held_bytes(self) -> int:
        """Bytes that the row holds beside its entries by now: `table_bytes`, and of tokens that share entries."""
        tables = (noted.slots for noted in self._layers.values())
        return self.table_bytes + self._token_bytes * sum(table.owners.numel() for table in tables if table is not None)

    @property
    def _uneven(self) -> DocumentTail | None:
        """The tail, where layers or heads have different numbers of entries."""
        return None if self._policy.differ == "none" else self.tail

    @property
    def _compete(self) -> bool:
        """Whether heads share one budget by what their entries are worth."""
        return self._uneven is not None and self._policy.differ == "heads"

    @property
    def beside(self) -> int:
        """The most entries of a KV head, on average, that the row has in no slab."""
        if self._uneven is None:
            return 0
        taken = sum(share.taken for share in self._uneven.shares)
        return -(-max(taken, sum(self._budgets)) // len(self._budgets))

    @property
    def most(self) -> int | None:
        """The most entries of a KV head that the row ever has in a slab; None: without a bound."""
        if not self._policy.bounded:
            return None
        if self._uneven is None:
            return max(*self._budgets, self._question + self.of_document) + self._policy.interval
        room = sum(self._budgets) - sum(share.taken for share in self._uneven.shares)
        return max(self._question, room // len(self._budgets)) + self._policy.interval

    def expect(self, tokens: int) -> None:
        """Told before the row begins that at most so many tokens come behind the document: where the budget has room
        for all, the document is read as by any other answer."""
        if self.tail is not None:
            grown = [share.taken + tokens for share in self.tail.shares]
            if not self._exceeded(grown):
                self.tail, self._budgets = None, [max(self._budgets)]

    def _exceeded(self, entries: Sequence[int]) -> bool:
        """Whether one of the shares has more than its budget; where heads compete, whether all together have."""
        if self._compete:
            return sum(entries) > sum(self._budgets)
        return any(count > budget for count, budget in zip(entries, self._budgets, strict=True))

    def wants(self, row: SuffixRow, *, answering: bool) -> Wants:
        if self._gates is not None:
            return Wants.STATES
        if not answering or not self._policy.observes_at(row.logical + 1 - self._question):
            return Wants.NOTHING
        slotted = any(noted.slots is not None for noted in self._layers.values())
        return Wants.WEIGHTS | Wants.STATES if slotted else Wants.WEIGHTS

    def seen(self, document: Attached, seen: Attached | Selection, row: SuffixRow) -> Attached | Selection:
        """What the row sees before its suffix: `seen`, and its entries beside it. One object until either changes."""
        if all(noted.beside is None and noted.slots is None for noted in self._layers.values()):
            return seen
        if self._prefixes is None or self._prefixes.visible is not seen:
            self._prefixes = OwnPrefixes(document, seen, row, self._layers)
        return self._prefixes

    def after(self, row: SuffixRow, shown: Shown, *, answering: bool) -> None:  # noqa: ARG002
        """Note what the newest token gave to each entry, itself included, and what gates make of new tokens."""
        if self._gates is not None:
            for place, layer in enumerate(self._layers):
                self._note_gated(row, place, shown.states[layer])
        for layer, weights in shown.weights.items():
            assert row.slab is not None
            keys, answered, noted = row.slab.of_row(layer, row)[0], row.logical - self._question, self._layers[layer]
            positions, columns = noted.of(row, len(keys), weights.device)
            by_group = weights.view(len(keys), -1, row.stored)  # [kv_heads, group, S]
            self._policy.observe(columns, by_group, positions, answered)
            if (beside := noted.beside) is not None and beside.weights is not None:
                self._policy.observe(beside.columns, beside.weights, beside.positions, answered)
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
        if self._uneven is None:
            return Copied(self._protected, self.tail.copied, self._copied(row, self.tail))
        for layer, noted in self._layers.items():
            states, positions, carried, there = self.tail.copy(layer)
            first = self._policy.columns.items()
            columns = {name: torch.full_like(there, value, dtype=torch.float32) for name, value in first}
            noted.beside = EntriesBeside.of(states, positions, columns | carried, there, observed=self._observed)
        self._changed(row)
        return None

    def _copied(self, row: SuffixRow, tail: DocumentTail) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        for layer, noted in self._layers.items():
            states, positions, columns, _ = tail.copy(layer)
            noted.insert(row, self._protected, positions, columns)
            if self._policy.slotted:
                noted.begin(tail.slots(layer), self._protected)
            yield layer, states

    def _changed(self, row: SuffixRow) -> None:
        """What it has beside the slab has changed."""
        self._prefixes = None
        row.beside = entries_read([beside.prefix] for beside in self._beside)

    @property
    def _beside(self) -> list[EntriesBeside]:
        """Of each layer, where it has some."""
        return [noted.beside for noted in self._layers.values() if noted.beside is not None]

    @property
    def _observed(self) -> bool:
        return Needs.ATTENTION in self._policy.needs

    def reduced(self, row: SuffixRow) -> int | None:
        """Move the entries that stay to the front of the row's slot, or beside it, if it is time. Returns how many
        entries of a slot it has before the next reduction. If it raises, some layers may be reduced."""
        answered = row.logical - self._question
        if answered <= 0 or answered % self._policy.interval or not self._exceeded(self._stored(row)):
            return None
        counts: Sequence[Sequence[int] | None] = [None] * len(self._layers)
        if self._compete:
            counts = self._policy.counts((self._suffix(row, layer) for layer in self._layers), sum(self._budgets))
        stored = row.stored
        for layer, of_heads in zip(self._layers, counts, strict=True):
            suffix = replace(self._suffix(row, layer), counts=of_heads)
            if of_heads or suffix.stored > suffix.budget:
                reduction = self._policy.reduce(suffix)
            else:  # of uneven layers this one has room for all
                kept = torch.arange(suffix.stored, device=suffix.keys.device).expand(len(suffix.keys), -1)
                reduction = Reduction(kept, there=suffix.there, slots=suffix.slots)
            stored = self._apply(row, suffix, reduction)
        row.stored = stored
        self._changed(row)
        return stored + self._policy.interval

    def _stored(self, row: SuffixRow) -> list[int]:
        """The entries of each share."""
        if self._uneven is None:
            return [row.stored]
        lengths = [beside.prefix.lengths for beside in self._beside]
        of_shares = [length for of_layer in lengths for length in of_layer] if self._compete else map(max, lengths)
        return [row.stored + length for length in of_shares]

    def _suffix(self, row: SuffixRow, layer: int) -> Suffix:
        """All entries of the row at a layer."""
        assert row.slab is not None
        keys, values = (entries[:, : row.stored] for entries in row.slab.of_row(layer, row))
        noted, there, budget = self._layers[layer], None, self._budgets[0]
        positions, columns = noted.of(row, len(keys), keys.device)
        if (beside := noted.beside) is not None:
            number = list(self._layers).index(layer)
            budget = sum(self._budgets) // len(self._budgets) if self._compete else self._budgets[number]
            there = self._with(torch.ones_like(positions, dtype=torch.bool), beside.there)
            keys, values = (self._with(*both) for both in zip((keys, values), beside.states, strict=True))
            positions = self._with(positions, beside.positions)
            columns = {name: self._with(column, beside.columns[name]) for name, column in columns.items()}
        return Suffix(
            layer,
            keys,
            values,
            positions,
            columns,
            protected=self._protected,
            tokens=row.logical,
            budget=budget,
            copied=self.of_document,
            there=there,
            slots=noted.slots,
        )

    def _with(self, own: Tensor, beside: Tensor) -> Tensor:
        """What entries of a slab have, with what those beside it have in their place, `[kv_heads, S, ...]`."""
        return torch.cat([own[:, : self._protected], beside, own[:, self._protected :]], dim=1)

    def _apply(self, row: SuffixRow, suffix: Suffix, reduction: Reduction) -> int:
        """Leave what a reduction does of a layer: all in the slab, or the protected entries there and the others beside
        it. Returns how many are in the slab."""
        assert row.slab is not None
        kept, noted = reduction.kept, self._layers[suffix.layer]
        heads = torch.arange(len(kept), device=kept.device).unsqueeze(1)
        # Copies: what stays moves over where it stood.
        keys = suffix.keys[heads, kept] if reduction.keys is None else reduction.keys
        values = suffix.values[heads, kept] if reduction.values is None else reduction.values
        positions = suffix.positions.gather(1, kept)
        columns = {name: column.gather(1, kept) for name, column in suffix.columns.items()} | (reduction.columns or {})
        stored = kept.shape[1] if self._uneven is None else self._protected
        for entries, staying in zip(row.slab.of_row(suffix.layer, row), (keys, values), strict=True):
            entries[:, :stored] = staying[:, :stored]
        if self._uneven is not None:
            there = torch.ones_like(kept, dtype=torch.bool) if reduction.there is None else reduction.there
            noted.beside = EntriesBeside.of(
                (keys[:, stored:], values[:, stored:]),
                positions[:, stored:],
                {name: column[:, stored:] for name, column in columns.items()},
                there[:, stored:],
                observed=self._observed,
            )
        noted.keep(positions[:, :stored], {name: column[:, :stored] for name, column in columns.items()})
        noted.slots = reduction.slots
        return stored
