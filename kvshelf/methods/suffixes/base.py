"""Base classes of suffix policies: which entries of a question and its answer stay behind the shared document.

A policy decides about a document once, before any question; a suffix policy bounds the entries that one answer adds. It
never touches the stored document. Under scope "suffix" it judges question and answer alone; under scope "cache" the
answer has a copy of the document's last entries, its tail, among which the policy chooses, too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvshelf.artifact.identity import Identity, ModelIdentity
from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.prefix_attention import LogitRules, MergedPrefix
from kvshelf.kernels.prefix_attention.attend import capped
from kvshelf.kernels.select import select
from kvshelf.methods.method import SUFFIX_POLICY, Kind, Method, Needs, parameter
from kvshelf.methods.policies.gate_file import Gates, Geometry

DEFAULT_BUDGET = 512
"""Entries that an answer keeps by default, beside the protected ones."""

Columns = dict[str, Tensor]
"""Numbers that a policy keeps of each stored entry, `[kv_heads, S]` fp32 each, by name."""


@dataclass(frozen=True, eq=False)
class SlotTable:
    """Tokens of one row at one layer that share the entries of other tokens, as in a `Merged` record: attention sees
    token i, beside the entry's own token, with the key `scales[i] * keys[owners[i]]` and the value of that entry.

    owners: `[kv_heads, M]` int64, stored entries; -1 where a head has fewer than M. scales: likewise, fp32. columns:
    the policy's numbers of each, likewise, and 0 beyond the head's tokens.
    """

    owners: Tensor
    scales: Tensor
    columns: Columns

    @classmethod
    def none(cls, columns: Columns) -> SlotTable:
        """A table with M = 0. columns: of the entries."""
        empty = {name: column[:, :0] for name, column in columns.items()}
        scales = next(iter(empty.values()))
        return cls(scales.long(), scales, empty)

    @classmethod
    def of(cls, heads: Tensor, kv_heads: int, owners: Tensor, scales: Tensor, columns: Columns) -> SlotTable:
        """The table of these tokens, in any order. heads: `[tokens]` int64, the head of each; the others likewise."""
        order = heads.sort(stable=True).indices
        lengths = heads.bincount(minlength=kv_heads).tolist()

        def padded(numbers: Tensor, padding: float) -> Tensor:
            of_heads = torch.split(numbers[order], lengths)
            return pad_sequence(list(of_heads), batch_first=True, padding_value=padding)

        padded_columns = {name: padded(column, 0.0) for name, column in columns.items()}
        return cls(padded(owners, -1), padded(scales, 1.0), padded_columns)

    @property
    def there(self) -> Tensor:
        """Which of the M are tokens, bool `[kv_heads, M]`."""
        return self.owners >= 0

    def of_owners(self, numbers: Tensor) -> Tensor:
        """The numbers `[kv_heads, ..., M]` of each token's entry, of numbers `[kv_heads, ..., S]` of entries."""
        heads, *between, _ = numbers.shape
        owners = self.owners.clamp_min(0).view(heads, *[1] * len(between), self.owners.shape[1])
        return numbers.gather(-1, owners.expand(heads, *between, -1))

    def best(self, scores: Tensor, most: int) -> SlotTable | None:
        """The `most` tokens of each head with the best scores `[kv_heads, M]`; None without any token."""
        count = min(most, int(self.there.sum(1).max())) if self.owners.numel() else 0
        if not count:
            return None
        order = scores.masked_fill(~self.there, -torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :count]
        owners, scales = self.owners.gather(1, order), self.scales.gather(1, order)
        columns = {name: column.gather(1, order).masked_fill(owners < 0, 0.0) for name, column in self.columns.items()}
        return SlotTable(owners, scales, columns)

    def weights(self, of_entries: Tensor, queries: Tensor, keys: Tensor, rules: LogitRules) -> Tensor:
        """The weights `[kv_heads, group, M]` fp32 that a newer token gave to these, of its weights of the entries
        `[kv_heads, group, S]`: their logits are `scales` times those of the entries. queries: `[kv_heads, group, D]` of
        the newer token, keys: `[kv_heads, S, D]`."""
        logits = self.of_owners(queries.float() @ keys.float().mT * rules.scale)
        more = capped(logits * self.scales.unsqueeze(1), rules) - capped(logits, rules)
        return (self.of_owners(of_entries).log() + more).exp().masked_fill(~self.there.unsqueeze(1), 0.0)

    def prefix(self, keys: Tensor, values: Tensor) -> MergedPrefix:
        """The prefix that attention reads. keys `[kv_heads, C, D]` and values `[kv_heads, C, Dv]`: of the entries,
        contiguous, not copied."""
        return MergedPrefix(
            keys.flatten(0, 1),
            values.flatten(0, 1),
            (keys.shape[1],) * len(keys),
            self.scales[self.there],
            self.owners[self.there].int(),
            tuple(self.there.sum(1).tolist()),
        )


@dataclass(frozen=True, eq=False)
class Suffix:
    """The S stored entries of one row at one layer, the protected ones and then the others, oldest first. The last one
    is the newest token.

    keys: `[kv_heads, S, D]`, values: `[kv_heads, S, Dv]`. positions: `[kv_heads, S]` int64, the place of each entry
    among all tokens behind the document; below 0 it is one of the document's, whose last token is -1. columns: the
    policy's numbers of each entry. protected: the number of first entries that stay. tokens: behind the document,
    stored or not. budget: entries of a KV head that may stay, protected ones included; on average where there are
    `counts`. copied: entries of the document before the first reduction. there: `[kv_heads, S]` bool, which of S are
    entries, where heads have different numbers: the protected ones, and the last; None: all. counts: entries of each
    head that stay, where the policy has shared them out. slots: the tokens that share entries, if any.
    """

    layer: int
    keys: Tensor
    values: Tensor
    positions: Tensor
    columns: Columns
    protected: int
    tokens: int
    budget: int
    copied: int = 0
    there: Tensor | None = None
    counts: Sequence[int] | None = None
    slots: SlotTable | None = None

    @property
    def stored(self) -> int:
        """S."""
        return self.keys.shape[1]


@dataclass(frozen=True, eq=False)
class Reduction:
    """The entries that stay: `kept` `[kv_heads, m]` int64, ascending. keys, values, columns: new ones of these,
    `[kv_heads, m, ...]`; None: as before. there: `[kv_heads, m]` bool, which of `kept` stay, where heads keep different
    numbers: the protected ones, and the last; None: all. slots: the tokens that share them, owners among these m."""

    kept: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None
    columns: Columns | None = None
    there: Tensor | None = None
    slots: SlotTable | None = None

    @classmethod
    def of(cls, stays: Tensor, protected: int) -> Reduction:
        """The reduction to the entries of a mask `[kv_heads, S]`, in which the first `protected` are set."""
        rank = stays.int() + 1
        rank[:, :protected] = 0
        others = rank.argsort(dim=1, stable=True)[:, protected:]  # leaving entries, then staying ones
        most = int(stays.sum(dim=1).max()) - protected
        first = torch.arange(protected, device=stays.device).expand(len(stays), -1)
        kept = torch.cat([first, others[:, others.shape[1] - most :]], dim=1)
        return cls(kept, there=stays.gather(1, kept))


@dataclass(frozen=True)
class SuffixPolicy(Method):
    """Bounds one answer's suffix to `budget` entries of a KV head, and `interval` more between two reductions.

    It observes tokens of the answer alone, and reduces the suffix after these alone: how a question is cut into steps
    depends on the other rows of a batch, and an answer must not.

    A policy that needs ATTENTION observes the weights that the answer's tokens give to the suffix. One that needs GATES
    reads each token's states in a layer as it runs, the question's, too. columns: its numbers of each entry, with the
    value of a new one.
    """

    kind: ClassVar[Kind] = SUFFIX_POLICY
    columns: ClassVar[Mapping[str, float]] = {}
    of_tail: ClassVar[frozenset[str]] = frozenset()
    """The parameters that mean nothing outside scope "cache"."""
    carried: ClassVar[frozenset[str]] = frozenset()
    """The columns that entries of a document begin with, which its cache must have (`keep_scores` of a policy)."""
    slotted: ClassVar[bool] = False
    """Whether tokens may share entries. It then observes the weights of these tokens, too, as if they were entries."""

    protect_question: bool = parameter(True, "keep all entries of the question")

    @property
    def differ(self) -> Literal["none", "layers", "heads"]:
        """Whether layers or heads may have different numbers of entries under scope "cache". If heads may, `counts`
        shares them out, and `observe` sees the entries in two parts, of which the second begins behind a reduction."""
        return "none"

    @property
    def document_policy(self) -> str:
        """The policy whose numbers it goes on with (`carried`)."""
        return self.name

    @property
    @abstractmethod
    def interval(self) -> int:
        """Tokens of the answer between two reductions."""

    @property
    def least(self) -> int:
        """The smallest budget beside protected entries."""
        return 1

    def least_with(self, copied: int) -> int:  # noqa: ARG002
        """As `least`, with `copied` entries of the document."""
        return self.least

    def most_slots(self, budget: int) -> int:  # noqa: ARG002
        """The most tokens of a KV head that may share `budget` entries."""
        return 0

    @property
    def bounded(self) -> bool:
        """Whether a budget decides how much stays, and not its parameters."""
        return True

    def tail(self, positions: Sequence[Tensor], made: Identity, prefix: int) -> Sequence[int]:  # noqa: ARG002
        """The numbers of last entries of each KV head that an answer copies under scope "cache", to choose among them.
        Entries before the last token that no policy may lose are never copied, and heads or layers that may not
        `differ` copy as many as the one with the fewest. positions: of the document's entries, ascending, of each head
        of each layer. made: the cache's identity. prefix: first tokens, of the chat template. Raises
        `PolicyUnsupported` where the policy cannot choose among these, and always where its paper does not."""
        raise PolicyUnsupported(
            f"suffix policy {self.name!r} chooses among question and answer alone; leave suffix.scope out, or take "
            "window, lagkv, h2o, lazy_eviction, trimkv, ems, d2o or arkv",
            param="suffix.scope",
        )

    def gate_file(self, model: ModelIdentity, folder: str, geometry: Geometry) -> Gates:
        """The gates of a policy that needs GATES. Raises `PolicyUnsupported` where the model has none."""
        raise NotImplementedError

    def gated(self, gate: Mapping[str, Tensor], rows: Tensor) -> Columns:
        """The numbers of new tokens by the gate of a layer, `[kv_heads, T]` fp32. rows: of `token_inputs`."""
        raise NotImplementedError

    def observes_at(self, answered: int) -> bool:  # noqa: ARG002
        """Whether it observes the attention of this token of the answer, counted from 1."""
        return Needs.ATTENTION in self.needs

    def observe(self, columns: Columns, weights: Tensor, positions: Tensor, answered: int) -> None:
        """Note the weights that the newest token gave to each entry, itself included, in place in `columns`. weights:
        `[kv_heads, group, S]` fp32, shares of its attention to document and suffix together. positions: as of a
        `Suffix`. answered: the token's number in the answer, counted from 1."""

    def counts(self, layers: Iterable[Suffix], total: int) -> Sequence[Sequence[int]]:
        """How many entries each head of each layer keeps, `total` together, of a policy whose heads `differ`."""
        raise NotImplementedError

    @abstractmethod
    def reduce(self, suffix: Suffix) -> Reduction:
        """Reduce a suffix with more entries than the budget to at most the budget. Same suffix, same result."""


@dataclass(frozen=True)
class PeriodicPolicy(SuffixPolicy):
    """A policy that can reduce after any token. Papers do after each; after every n-th one, entries move less often."""

    every: int = parameter(32, "tokens of the answer between two reductions", minimum=1)

    @property
    def interval(self) -> int:
        return self.every


@dataclass(frozen=True)
class WholeCachePolicy(SuffixPolicy):
    """Under scope "cache" all of the document's entries compete, equally many of each head and layer."""

    def tail(self, positions: Sequence[Tensor], made: Identity, prefix: int) -> Sequence[int]:  # noqa: ARG002
        lengths = [len(head) for head in positions]
        if len({*lengths}) > 1:
            raise PolicyUnsupported(
                f"the KV heads of this cache keep {min(lengths)} to {max(lengths)} entries, and under scope cache "
                f"suffix policy {self.name!r} leaves all of them equally many; leave suffix.scope out, or compress by "
                "a policy that gives each head and layer the same",
                param="suffix.scope",
            )
        return lengths


def behind_sinks(positions: Sequence[Tensor], made: Identity) -> Sequence[int]:
    """The entries of each KV head that are behind the sinks of the cache's policy."""
    sink = made.policy_params.get("sink")  # a cache from elsewhere may have any value
    first = min(max(sink, 0), made.num_tokens) if isinstance(sink, int) else 0
    return [int((head >= first).sum()) for head in positions]


def best(suffix: Suffix, scores: Tensor, recent: int) -> Tensor:
    """Which entries stay, as many as the budget or `counts` allows: the protected ones, the `recent` last, and the best
    of the others by scores `[kv_heads, S]`. Bool `[kv_heads, S]`."""
    if suffix.there is not None:
        scores = scores.masked_fill(~suffix.there, torch.finfo(scores.dtype).min)
    stays = torch.zeros(suffix.stored, dtype=torch.bool, device=scores.device)
    stays[: suffix.protected] = True
    stays[suffix.stored - recent :] = True
    return select(scores, stays, suffix.counts or [suffix.budget] * len(scores))


def numbers_of(mask: Tensor) -> Tensor:
    """The entries of each head that a mask `[kv_heads, S]` names, equally many: `[kv_heads, m]`, ascending."""
    return mask.nonzero()[:, 1].view(len(mask), -1)


def ends(suffix: Suffix) -> Tensor:
    """The protected entries and the last ones, as many as the budget has room for: `[m]`."""
    leaving = suffix.stored - suffix.budget
    numbers = torch.arange(suffix.budget, device=suffix.keys.device)
    return torch.where(numbers < suffix.protected, numbers, numbers + leaving)
