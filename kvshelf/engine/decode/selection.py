"""What the answer to one question reads of its documents, where a selector chooses: the state of one row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import ClassVar, Final, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvshelf.artifact.records import Merged
from kvshelf.engine.attention.attachment import Attached, Wait, block, entries_read, next_number
from kvshelf.engine.attention.function import Attended, joined
from kvshelf.engine.decode.hooks import RowHook, Shown, Wants
from kvshelf.engine.decode.suffixes import SuffixRow
from kvshelf.engine.prefill.reducing import LayerReducer
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.kernels.choose import Choice, Chosen, choose
from kvshelf.kernels.prefix_attention import MergedPrefix, PackedPrefix, Prefix, SelectedPrefix, channels_of
from kvshelf.methods.method import Needs
from kvshelf.methods.policies.base import Policy
from kvshelf.methods.policies.budgets import Budget
from kvshelf.methods.policies.view import DocumentView, LayerView, Probed
from kvshelf.methods.selectors.base import UnitSelector
from kvshelf.model.layers import LayerKind
from kvshelf.model.rope import Rope
from kvshelf.model.text import SENTENCE_ENDS, TextFormat


class SeenDocument(Protocol):
    """What a token sees of one document."""

    def prefixes(self, layer: int, wait: Wait = block) -> tuple[Prefix, ...]: ...


class Selection(RowHook, ABC):
    """The part of its documents that an answer sees. To a batch it is another document, which only this row has.

    One row of a batch uses it; what it chooses never depends on others. reads_question: whether the question sees it.
    """

    reads_question: ClassVar[bool] = False

    def __init__(self, document: Attached) -> None:
        self.number = next_number()
        self.next_position = document.next_position
        self._document = document

    @property
    def arrived(self) -> bool:
        """Whether no row is missing that it may choose."""
        return self._document.arrived

    @property
    def parts(self) -> Sequence[SeenDocument]:
        """What the question's tokens see of each document: all."""
        return self._document.parts

    @property
    def seen(self) -> Attached | Selection:
        """What the next token of the answer sees before the question: this, or all of the document."""
        return self

    @abstractmethod
    def prefixes(self, layer: int, wait: Wait = block) -> tuple[Prefix, ...]:
        """What a token of the answer sees of this layer."""

    def counted(self, layer: int) -> tuple[Prefix, ...]:
        """The stored entries of this layer that a token of the answer saw, also those that were merged for it."""
        return self.prefixes(layer)

    @property
    def read_tokens(self) -> int:
        """Entries of a KV head that the last token of the answer read; see `entries_read`."""
        return entries_read(map(self.prefixes, range(self._document.num_layers)))


class UnitSelection(Selection):
    """Each token of the answer, or every n-th, chooses units by its own query, within the attention."""

    _within_attention: ClassVar[bool] = True

    def __init__(self, selector: UnitSelector, document: Attached, budget: int, kinds: Sequence[LayerKind]) -> None:
        """budget: entries of a KV head, over all documents. Waits for the layers of a cache that is arriving. Raises
        `InvalidRequest` for a budget below what is always read, `PolicyUnsupported` as `require_packed`."""
        super().__init__(document)
        choosing = [layer for layer, kind in enumerate(kinds) if kind.reducible and selector.chooses(layer, len(kinds))]
        self._first = {layer: choosing[at - at % selector.layers_together] for at, layer in enumerate(choosing)}
        """Of each layer that reads a choice: the layer that makes it."""
        choices = {layer: _choice(selector, document, layer, budget) for layer in sorted({*self._first.values()})}
        self._choices = {layer: choice for layer, choice in choices.items() if choice is not None}
        for layer, first in self._first.items():
            if layer != first and first in self._choices:
                _require_same_tokens(document, first, layer)
        self._layers = [self._read(layer) for layer in range(len(kinds))]
        self._every = selector.interval
        self._again = LastChoice(document, self, len(kinds))
        self._due = True

    @property
    def seen(self) -> Attached | Selection:
        return self if self._due else self._again

    def took(self, answer: Sequence[int]) -> None:
        self._due = (len(answer) - 1) % self._every == 0

    def prefixes(self, layer: int, wait: Wait = block) -> tuple[Prefix, ...]:  # noqa: ARG002
        return self._layers[layer]

    def _read(self, layer: int) -> tuple[Prefix, ...]:
        """What is read of a layer; all of it where there is no choice."""
        first = self._first.get(layer, layer)
        choice = self._choices.get(first)
        if choice is None:
            return self._document.prefixes(layer)
        chosen, chooser = iter(choice.chosen), choice if self._within_attention and layer == first else None
        return tuple(
            SelectedPrefix(prefix, next(chosen), chooser) if max(prefix.lengths) else prefix
            for prefix in require_packed(self._document.prefixes(layer))
        )

    @property
    def dense(self) -> bool:
        """Whether it reads all there is."""
        return not self._choices


class LastChoice(Selection):
    """The last choice of another selection, read again. To a batch it is a document of its own."""

    def __init__(self, document: Attached, chosen: Selection, num_layers: int) -> None:
        super().__init__(document)
        self._layers = [
            tuple(
                replace(prefix, choice=None) if isinstance(prefix, SelectedPrefix) else prefix
                for prefix in chosen.prefixes(layer)
            )
            for layer in range(num_layers)
        ]

    def prefixes(self, layer: int, wait: Wait = block) -> tuple[Prefix, ...]:  # noqa: ARG002
        return self._layers[layer]


class BlockSelection(UnitSelection):
    """The query of the question's last token chooses blocks by the stored index; all heads read the same."""

    reads_question: ClassVar[bool] = True
    _within_attention: ClassVar[bool] = False  # `before` does

    def __init__(
        self, selector: UnitSelector, document: Attached, budget: int, kinds: Sequence[LayerKind], rope: Rope | None
    ) -> None:
        """rope: takes the rotation off the query, where the selector compares without it. Raises as `UnitSelection`."""
        super().__init__(selector, document, budget, kinds)
        self._selector = selector
        self._rope = rope

    @property
    def parts(self) -> Sequence[SeenDocument]:
        return [_PrefixesOfPart(self, number) for number in range(len(self._document.parts))]

    def runs(self, layer: int) -> list[tuple[int, int]]:
        """Where the prefixes of each document begin and end among those of all."""
        return list(pairwise(accumulate((len(part.outlines(layer)) for part in self._document.parts), initial=0)))

    def wants(self, row: SuffixRow, *, answering: bool) -> Wants:  # noqa: ARG002
        return Wants.QUERIES if not answering or self._selector.each_token else Wants.NOTHING

    def before(self, layer: int, queries: Tensor, position: int, wait: Wait) -> None:
        choice = self._choices.get(layer)
        if choice is None:
            return
        last = queries[-1].unsqueeze(1)  # [q_heads, 1, D]
        if self._rope is not None:
            last = self._rope.unrotate(last, torch.tensor([position + len(queries) - 1], device=queries.device))
        query = last.view(len(self._layers[layer][0].lengths), -1, last.shape[2])
        scored = (replace(units, low=self._selector.scores(query, units.low).unsqueeze(1)) for units in choice.units)
        choose(query.new_ones(1, 1), replace(choice, units=tuple(scored)))
        for chosen, prefix in zip(choice.chosen, self._layers[layer], strict=True):
            assert isinstance(prefix, SelectedPrefix)
            prefix.chosen.rows.copy_(chosen.rows)
            prefix.chosen.counts.copy_(chosen.counts)
        rows = [chosen.rows[0, : int(chosen.counts)] for chosen in choice.chosen]
        for part, (first, end) in zip(self._document.parts, self.runs(layer), strict=True):
            part.bring(layer, rows[first:end], wait)

    def _read(self, layer: int) -> tuple[Prefix, ...]:
        if layer not in self._choices:
            return self._document.prefixes(layer)
        prefixes = require_packed(self._document.outlines(layer))
        rooms = (chosen.rows.shape[1] for chosen in self._choices[layer].chosen)
        return tuple(
            SelectedPrefix(prefix, Chosen.room(prefix.lengths, room, prefix.keys.device))
            for prefix, room in zip(prefixes, rooms, strict=True)
        )


@dataclass(frozen=True)
class _PrefixesOfPart:
    """One document of a selection, by its number among the documents."""

    selection: BlockSelection
    number: int

    def prefixes(self, layer: int, wait: Wait = block) -> tuple[Prefix, ...]:  # noqa: ARG002
        first, end = self.selection.runs(layer)[self.number]
        return self.selection.prefixes(layer)[first:end]


class EarlySelection(UnitSelection):
    """Tokens of the answer choose entries of a layer by the queries that it would make of the input of the layer
    before."""

    _within_attention: ClassVar[bool] = False  # `before` chooses

    def wants(self, row: SuffixRow, *, answering: bool) -> Wants:  # noqa: ARG002
        return Wants.EARLY if answering else Wants.NOTHING

    def before(self, layer: int, queries: Tensor, position: int, wait: Wait) -> None:  # noqa: ARG002
        choice = self._choices.get(layer)
        if choice is not None:
            choose(queries[-1], choice)


class SentenceSelection(UnitSelection):
    """The mean of the queries since the last end of a sentence chooses for the rest of the answer's sentence."""

    _within_attention: ClassVar[bool] = False  # `took` chooses

    def __init__(
        self, selector: UnitSelector, document: Attached, budget: int, kinds: Sequence[LayerKind], text: TextFormat
    ) -> None:
        """text: tells which tokens of the answer end a sentence. Raises as `UnitSelection`."""
        super().__init__(selector, document, budget, kinds)
        self._text = text
        self._every_token = selector.each_token
        self._reads_all = True
        self._sums: dict[int, Tensor] = {}
        """Of the queries that choose, `[q_heads, D]` fp32 of each layer that chooses."""
        self._tokens = 0
        """How many tokens have these queries."""

    @property
    def seen(self) -> Attached | Selection:
        return self._document if self._reads_all else self

    def wants(self, row: SuffixRow, *, answering: bool) -> Wants:  # noqa: ARG002
        return Wants.STATES if self._reads_all or self._every_token or not answering else Wants.NOTHING

    def after(self, row: SuffixRow, shown: Shown, *, answering: bool) -> None:  # noqa: ARG002
        for layer, attended in shown.states.items():
            query = attended.queries[0, :, -1].to(torch.float32, copy=True)  # of a question, its last token's
            if layer in self._choices:
                self._sums[layer] = query if self._reads_all else self._sums[layer] + query

    def took(self, answer: Sequence[int]) -> None:
        # The token behind the sentence is known here, so the point in 3.14 ends none.
        if len(answer) > 1 and self._text.segment_ends(answer[-4:], SENTENCE_ENDS)[-2]:
            self._reads_all = True
        elif self._reads_all or self._every_token:
            self._tokens = 1 if self._reads_all else self._tokens + 1
            self._reads_all = False
            for layer, choice in self._choices.items():
                choose(self._sums[layer] / self._tokens, choice)


def _choice(selector: UnitSelector, document: Attached, layer: int, budget: int) -> Choice | None:
    """How a query chooses at a layer; None where all entries are read, as the budget has room for them."""
    entries = sum(max(prefix.lengths) for prefix in require_packed(document.outlines(layer)))
    if entries <= (budget if selector.fills else 0):
        return None
    of_parts = (pair for part in document.parts for pair in part.units(selector, layer))
    stored = [(prefix, units) for prefix, units in of_parts if max(prefix.lengths)]
    # Of several documents none has entries that are always read: they would fill the budget that all share.
    alone = len(document.parts) == 1
    always = max(map(sum, zip(*(units.forced_rows for _, units in stored), strict=True))) if alone else 0
    if budget < always:
        raise InvalidRequest(
            f"select.tokens is {budget}, and selector {selector.name!r} always reads {always} entries here, the first "
            "and the last ones; give more",
            param="select.tokens",
        )
    heads = 1 if Needs.INDEX in selector.needs else len(stored[0][0].lengths)
    columns, basis = selector.columns(layer), selector.basis(layer, heads)
    room = tuple(Chosen.room(prefix.lengths[:heads], budget, prefix.keys.device) for prefix, _ in stored)
    return Choice(
        tuple(units for _, units in stored),
        room,
        budget,
        linear=selector.linear,
        relu=selector.relu,
        group=selector.group,
        columns=None if columns is None else columns.to(room[0].rows.device),
        basis=None if basis is None else basis.to(room[0].rows.device),
        alpha=selector.margin,
        cut=selector.cut,
        force=alone,
    )


def _require_same_tokens(document: Attached, first: int, layer: int) -> None:
    """Rows that one layer chose must be the same tokens in the other."""
    for part in document.parts:
        one, other = ([head for record in part.entries(at) for head in record.positions] for at in (first, layer))
        if len(one) != len(other) or not all(map(torch.equal, one, other)):
            raise PolicyUnsupported(
                f"layers {first} and {layer} hold different tokens, so that they cannot read one choice; take share 1, "
                "or a cache of policy full",
                param="select.params.share",
            )


class PolicySelection(Selection):
    """A policy chooses once, by the last tokens of the question."""

    def __init__(
        self, policy: Policy, document: Attached, budget: int, kinds: tuple[LayerKind, ...], view: DocumentView
    ) -> None:
        """view: all entries of a KV head as if they were a document, see `stored_view`. Raises `PolicyUnsupported` for
        entries that the policy cannot judge, and what `Policy.fitted` raises."""
        super().__init__(document)
        self._stored = {layer: _even_entries(document, layer) for layer, kind in enumerate(kinds) if kind.reducible}
        self._ends: dict[int, list[bool]] = {}
        if Needs.TEXT in policy.needs:
            self._ends = {layer: _sentence_ends(document, layer) for layer in self._stored}
        entries = Budget.resolve(view.num_tokens, compression_ratio=None, budget_tokens=budget)
        self._reducer = LayerReducer(policy, view, entries, kinds, (), None)
        self._observed: dict[int, Attended] = {}
        self._chosen: dict[int, tuple[Prefix, ...]] = {}
        self._members: dict[int, tuple[Prefix, ...]] = {}
        """Of layers whose entries were merged: the stored entries that these stand for."""

    def wants(self, row: SuffixRow, *, answering: bool) -> Wants:  # noqa: ARG002
        return Wants.NOTHING if answering else Wants.STATES

    def after(self, row: SuffixRow, shown: Shown, *, answering: bool) -> None:  # noqa: ARG002
        for layer, attended in shown.states.items():
            before = self._observed.get(layer)
            self._observed[layer] = attended if before is None else joined([before, attended])

    def took(self, answer: Sequence[int]) -> None:
        if len(answer) > 1:
            return
        for place, layer in enumerate(self._stored):
            self._reducer.reduce(self._view(layer, place))
        for layer, kept in self._reducer.reduced().items():
            stored = self._stored[layer]
            if isinstance(kept, Merged):
                self._chosen[layer] = kept.prefixes()
                self._members[layer] = stored.selected(torch.split(kept.slot_positions, kept.slot_lengths))
            else:
                self._chosen[layer] = stored.selected(kept.positions)
        self._observed.clear()
        self._stored.clear()

    def prefixes(self, layer: int, wait: Wait = block) -> tuple[Prefix, ...]:
        return self._chosen.get(layer) or self._document.prefixes(layer, wait)

    def counted(self, layer: int) -> tuple[Prefix, ...]:
        return self._members.get(layer) or self.prefixes(layer)

    def _view(self, layer: int, place: int) -> LayerView:
        keys, values = self._stored[layer].dense()
        seen = self._observed[layer]
        queries = seen.queries[0]
        return LayerView(
            layer_idx=layer,
            keys=keys,
            values=values,
            queries=queries[:, :0],  # a stored cache has none of the document's
            scaling=seen.scaling,
            document=replace(self._reducer.document, known_ends=self._ends.get(layer)),
            num_layers=len(self._stored),
            place=place,
            probes=(Probed(queries, seen.keys[0], seen.values[0]),),
            module=seen.module,
        )


class StoredEntries(NamedTuple):
    """The entries of one layer, over all documents. order: of each head, its rows of all prefixes, one prefix after the
    other, by document and position. positions: theirs in their document, int32."""

    prefixes: tuple[PackedPrefix, ...]
    order: list[Tensor]
    positions: list[Tensor]

    @classmethod
    def of(cls, document: Attached, layer: int, reader: EntryReader) -> StoredEntries:
        """Waits until the layer has arrived. Raises as `require_packed`."""
        prefixes = require_packed(document.prefixes(layer), reader)
        orders: list[list[Tensor]] = [[] for _ in prefixes[0].lengths]
        placed: list[list[Tensor]] = [[] for _ in orders]
        first = [0] * len(orders)
        for part in document.parts:
            for head, positions in enumerate(zip(*(record.positions for record in part.entries(layer)), strict=True)):
                ascending = torch.cat(positions).sort()
                orders[head].append(ascending.indices + first[head])
                placed[head].append(ascending.values)
                first[head] += len(ascending.values)
        return cls(prefixes, list(map(torch.cat, orders)), list(map(torch.cat, placed)))

    def dense(self, last: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Keys `[kv_heads, K, D]` and values `[kv_heads, K, Dv]`, dequantized, `behind_zeros`. last: the number of
        last entries of each head; None: all."""
        counts = map(len, self.order) if last is None else last
        orders = [order[len(order) - count :] for order, count in zip(self.order, counts, strict=True)]
        keys, values = ([self._rows(head, kind, order) for head, order in enumerate(orders)] for kind in (0, 1))
        return behind_zeros(keys), behind_zeros(values)

    def _rows(self, head: int, kind: int, order: Tensor) -> Tensor:
        """Keys (kind 0) or values of a head, in this order; no other rows are dequantized."""
        rows, places, begin = [], [], 0
        for prefix in self.prefixes:
            end = begin + prefix.lengths[head]
            of_prefix = ((order >= begin) & (order < end)).nonzero()[:, 0]
            if len(of_prefix):
                rows.append(prefix.heads[head][kind][order[of_prefix] - begin])
                places.append(of_prefix)
            begin = end
        if not rows:
            return self.prefixes[0].heads[head][kind][order]
        return torch.cat(rows)[torch.cat(places).argsort()]

    def selected(self, kept: Sequence[Tensor]) -> tuple[Prefix, ...]:
        """The prefixes with the entries kept of each head, which are numbers in `order`."""
        rows = [order[numbers.long()] for order, numbers in zip(self.order, kept, strict=True)]
        selected: list[Prefix] = []
        begins = [0] * len(rows)
        for prefix in self.prefixes:
            ends = [begin + length for begin, length in zip(begins, prefix.lengths, strict=True)]
            of_prefix = [
                (head[(head >= begin) & (head < end)] - begin).sort().values
                for head, begin, end in zip(rows, begins, ends, strict=True)
            ]
            counts = torch.tensor(list(map(len, of_prefix)), dtype=torch.int32, device=rows[0].device)
            chosen = Chosen(pad_sequence(of_prefix, batch_first=True).int(), counts)
            selected.append(SelectedPrefix(prefix, chosen))
            begins = ends
        return tuple(selected)


def behind_zeros(heads: Sequence[Tensor]) -> Tensor:
    """What each head has, `[K, ...]`, as `[kv_heads, most, ...]`: heads with fewer begin with zeros."""
    most = max(map(len, heads))
    return torch.stack([torch.cat([head.new_zeros(most - len(head), *head.shape[1:]), head]) for head in heads])


def _even_entries(document: Attached, layer: int) -> StoredEntries:
    """The entries of a layer whose heads keep equally many. Raises `PolicyUnsupported` for others."""
    stored = StoredEntries.of(document, layer, SELECTOR)
    lengths = [len(order) for order in stored.order]
    if len(set(lengths)) > 1:
        raise PolicyUnsupported(
            f"the heads of layer {layer} keep {min(lengths)} to {max(lengths)} entries, and a policy chooses at the "
            "question where all keep equally many; take selector quest",
            param="select.method",
        )
    return stored


def _sentence_ends(document: Attached, layer: int) -> list[bool]:
    """Which entries of a KV head are the last of their sentence, in the order of `StoredEntries`. Raises
    `PolicyUnsupported` where heads have entries of different tokens."""
    last: list[bool] = []
    for part in document.parts:
        first, *others = (
            torch.cat(positions).sort().values.cpu()
            for positions in zip(*(record.positions for record in part.entries(layer)), strict=True)
        )
        if not all(torch.equal(first, other) for other in others):
            raise PolicyUnsupported(
                f"the heads of layer {layer} keep different tokens, and a policy that reads sentences chooses at the "
                "question where all keep the same; take selector policy:snapkv",
                param="select.method",
            )
        sentences = torch.searchsorted(torch.tensor(part.sentence_ends), first)
        last += [*(sentences[1:] != sentences[:-1]).tolist(), True][: len(first)]
    return last


def stored_entries(document: Attached, kinds: Sequence[LayerKind]) -> int:
    """Entries of a KV head that a policy chooses from, over all documents; 0 where it may choose in no layer. Raises
    as `PolicySelection`."""
    layer = next((layer for layer, kind in enumerate(kinds) if kind.reducible), None)
    return 0 if layer is None else sum(prefix.lengths[0] for prefix in require_packed(document.prefixes(layer)))


class EntryReader(NamedTuple):
    """Who reads entries of a cache one by one, as refusals say it: the field that asks for it, what it does with keys
    that have lost channels and with others, and what to ask in its place."""

    param: str
    of_channels: str
    of_entries: str
    instead: str
    centers: bool = False
    """Whether it takes classes of merged tokens, by the centers."""


SELECTOR: Final = EntryReader(
    "select.method",
    "selectors compare queries with whole ones",
    "a selector reads entries in place",
    "ask without select",
)


def require_packed(prefixes: Sequence[Prefix], reader: EntryReader = SELECTOR) -> tuple[PackedPrefix, ...]:
    """Refuse entries that cannot be read in part, and pruned keys, whose summaries lack channels of the whole keys'."""
    for prefix in prefixes:
        if channels_of(prefix) is not None:
            raise PolicyUnsupported(
                f"the keys of this cache have lost channels (policy think), and {reader.of_channels}; "
                f"{reader.instead}, or compress by another policy",
                param=reader.param,
            )
        if not isinstance(prefix, PackedPrefix) and not (reader.centers and isinstance(prefix, MergedPrefix)):
            raise PolicyUnsupported(
                "the cache has merged tokens or keys without their rotation, or makes its keys at every step (policy "
                f"kvdirect, made=step), and {reader.of_entries}; {reader.instead}, or compress by a policy that keeps "
                "tokens as they are",
                param=reader.param,
            )
    of_centers = (PackedPrefix(p.keys, p.values, p.lengths) if isinstance(p, MergedPrefix) else p for p in prefixes)
    return tuple(prefix for prefix in of_centers if isinstance(prefix, PackedPrefix))
