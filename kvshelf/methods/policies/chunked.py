"""Policies that judge again while a document is read: at each chunk, over all entries that are left and the chunk.

    kvzip, epicache                       by the largest weights that a probe behind the chunk gives
    snapkv, tova, arkv, keydiff           as over a document; the chunk's last rows observe
    gates                                 by an output of each token, which stays with its entry
    d2o                                   by sums of attention, which stay with the entry, and a threshold of the layer

While a layer runs it has no more than its budget and a chunk; where layers share the budget, all of them do together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kvshelf.artifact.identity import Identity
from kvshelf.artifact.packed import offsets_of
from kvshelf.artifact.records import Kept
from kvshelf.errors import PolicyUnsupported
from kvshelf.methods.method import parameter
from kvshelf.methods.policies.base import Policy, ProbedPolicy, TailPolicy, prefill_parameter
from kvshelf.methods.policies.budgets import Budget, require_room
from kvshelf.methods.policies.view import DocumentView, LayerView


@dataclass(frozen=True, eq=False)
class LayerPast:
    """A layer of a document of `num_tokens`, of which `read` have been read.

    record: the entries, with the importance that they got last. columns: the policy's numbers of each entry,
    `[entries]` fp32, by name. note: the policy's, of the layer.
    """

    record: Kept
    num_tokens: int
    read: int = 0
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    note: Any = None

    @classmethod
    def nothing(cls, chunk: LayerView, num_tokens: int) -> LayerPast:
        """A layer like this one before its first chunk."""
        record = Kept(
            keys=chunk.keys[0, :0],
            values=chunk.values[0, :0],
            entries_at=torch.empty(0, dtype=torch.int32, device=chunk.keys.device),
            offsets=(0,) * (chunk.kv_heads + 1),
            importance=torch.empty(0, device=chunk.keys.device),
        )
        return cls(record, num_tokens)

    @property
    def ended(self) -> bool:
        """Whether the whole document has been read."""
        return self.read == self.num_tokens

    @property
    def importance(self) -> list[Tensor]:
        """Of the entries of each head."""
        assert self.record.importance is not None, "judged"
        return list(torch.split(self.record.importance, self.record.lengths))

    def joined(self, chunk: LayerView, columns: Mapping[str, Tensor] | None = None) -> LayerPast:
        """The past with a chunk's tokens behind those of each head, not judged yet. columns: `[kv_heads, T]`."""
        record, tokens = self.record, chunk.num_tokens
        keys, values = (rows for rows in record.rows if isinstance(rows, Tensor))
        at = torch.arange(self.read, self.read + tokens, dtype=torch.int32, device=keys.device)
        joined = Kept(
            keys=self._append(keys, chunk.keys),
            values=self._append(values, chunk.values),
            entries_at=self._append(record.entry_positions, at.expand(chunk.kv_heads, -1)),
            offsets=offsets_of([length + tokens for length in record.lengths]),
        )
        longer = {
            name: self._append(self.columns.get(name, numbers[0, :0]), numbers)
            for name, numbers in (columns or {}).items()
        }
        return replace(self, record=joined, read=self.read + tokens, columns=longer)

    def _append(self, entries: Tensor, tokens: Tensor) -> Tensor:
        """`[entries, ...]` with `tokens` `[kv_heads, T, ...]` behind those of each head."""
        heads = zip(torch.split(entries, self.record.lengths), tokens, strict=True)
        return torch.cat([part for head in heads for part in head])

    def judged(self, importance: Tensor, note: Any = None) -> LayerPast:
        """The past with this importance of each entry, `[entries]` fp32, infinite where one must stay."""
        return replace(self, record=replace(self.record, importance=importance), note=note)

    def layer(self, chunk: LayerView) -> LayerView:
        """The entries as a layer, whose last tokens have the queries of the chunk. All heads must have equally many."""
        keys, values = (
            rows.view(chunk.kv_heads, self.record.lengths[0], -1)
            for rows in self.record.rows
            if isinstance(rows, Tensor)
        )
        document = DocumentView(range(keys.shape[1]), chunk.protected_prefix)
        return replace(chunk, keys=keys, values=values, document=document)

    def best(self, counts: Sequence[int]) -> LayerPast:
        """The past with the `counts[h]` most important entries of head h; of equal ones the first stay."""
        assert self.record.importance is not None, "judged"
        best = best_rows(self.record, self.record.importance, counts)
        if best is None:
            return self
        columns = {name: numbers[best[0]] for name, numbers in self.columns.items()}
        return replace(self, record=only_rows(self.record, *best), columns=columns)


def best_rows(record: Kept, precedence: Tensor, counts: Sequence[int]) -> tuple[Tensor, tuple[int, ...]] | None:
    """The rows of the `counts[h]` entries of head h with the highest precedence, ascending, of equal ones the first,
    and the offsets of the heads among these. None: all rows stay."""
    offsets = tuple(accumulate(counts, initial=0))
    if offsets == tuple(record.offsets):
        return None
    chosen = []
    for (start, end), count in zip(pairwise(record.offsets), counts, strict=True):
        assert count <= end - start, "a share can only shrink"
        best = precedence[start:end].sort(descending=True, stable=True).indices[:count]
        chosen.append(best.sort().values + start)
    return torch.cat(chosen), offsets


def only_rows(record: Kept, rows: Tensor, offsets: tuple[int, ...]) -> Kept:
    assert isinstance(record.keys, Tensor)
    assert isinstance(record.values, Tensor)
    assert record.importance is not None
    return replace(
        record,
        keys=record.keys[rows],
        values=record.values[rows],
        entries_at=record.entry_positions[rows],
        offsets=offsets,
        importance=record.importance[rows],
    )


@dataclass(frozen=True)
class ChunkedPolicy(Policy):
    """A policy that can judge again at each chunk. With `prefill` "chunked" a chunk sees the entries kept of those
    before it; then all of these and the chunk are judged, and the lowest go for good until the budget holds."""

    settled: ClassVar[Mapping[str, str]] = dict.fromkeys(("prefill", "chunk"), "a stored document has been read")

    in_chunks: ClassVar[frozenset[str]] = frozenset({"chunk"})
    """The parameters that mean nothing where the document is read in one pass."""

    prefill: str = prefill_parameter("chunk", added=True)
    chunk: int = parameter(2048, "tokens of a pass where prefill is chunked", minimum=64, added=True)

    @property
    def chunked(self) -> bool:
        return self.prefill == "chunked"

    @property
    def mode(self) -> str:
        """As `Absorber.mode`."""
        return f"chunked:chunk={self.chunk}"

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        for name in sorted(self.in_chunks & given) if not self.chunked else ():
            raise PolicyUnsupported(
                f"{name} is of chunks, and prefill=whole has none; leave it out, or take prefill=chunked",
                param=f"policy_params.{name}",
            )
        return super().fitted(document, budget, given)

    def absorber(self, document: DocumentView, budget: Budget) -> ChunkAbsorber | None:
        everything = budget.tokens >= document.num_tokens and not (self.sizes_itself or document.first_position)
        return ChunkAbsorber(self, document, budget) if self.chunked and not everything else None

    def ends(self, document: DocumentView) -> list[int]:
        """The ends of the chunks."""
        return [*range(self.chunk, document.num_tokens, self.chunk), document.num_tokens]

    def take(self, past: LayerPast, chunk: LayerView) -> LayerPast:
        """The past with the chunk's tokens, judged. chunk: a layer of these tokens alone, at their places in the
        document; its probes stood behind it."""
        assert self.scorer is not None, "a policy that does not score overrides this"
        joined = past.joined(chunk)
        layer = joined.layer(chunk)
        return joined.judged(self.scorer.importance(layer).flatten(), self.noted(layer))

    @property
    def hides(self) -> bool:
        """Whether it takes a chunk before the chunk's tokens attend, because `hidden` hides some from later ones."""
        return False

    def hidden(self, past: LayerPast, count: int) -> Tensor:
        """Which of the chunk's tokens, the last `count` of a past, no later token sees: `[kv_heads, count]` bool."""
        raise NotImplementedError

    def layer_budget(self, layer_idx: int, document: DocumentView, budget: Budget) -> Budget:  # noqa: ARG002
        """The mean budget of a layer's heads."""
        return budget

    def shares(self, pasts: Sequence[LayerPast], budget: Budget) -> Sequence[Sequence[int]]:
        """How many entries each head keeps. pasts: one layer, or all layers where `phase` is not "during"."""
        return [[min(budget.tokens, length) for length in past.record.lengths] for past in pasts]

    def own_bytes(self, document: DocumentView) -> int:  # noqa: ARG002
        """Bytes that it needs for a document in chunks beside keys, values and scores, where they grow with it."""
        return 0

    def recorded(self, past: LayerPast) -> Kept:
        """The stored record of a layer, once the document has been read."""
        return past.record

    def cut(self, past: LayerPast, counts: Sequence[int]) -> LayerPast:
        """The layer once head h has been cut to `counts[h]` entries."""
        return past.best(counts)

    @property
    def goes_on(self) -> bool:
        """Whether its caches have all numbers that it judges by, so that more chunks may follow."""
        return False

    def resumes(self, made: Identity) -> bool:
        """Whether it made the cache, with the same parameters but `chunk`, and no protected or appended tokens."""
        params, others = ({**params, "chunk": None} for params in (self.parameters(), made.policy_params))
        same = (self.name, self.revision, params) == (made.policy, made.policy_version, others)
        return self.chunked and self.goes_on and same and made.prefill != "appended" and not made.protect

    def resumed(self, record: Kept, read: int, num_tokens: int) -> LayerPast:
        """The past of which `recorded` made this record. read: its tokens. num_tokens: with those that follow."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class ChunkAbsorber:
    """The `Absorber` of a policy that judges again at each chunk."""

    policy: ChunkedPolicy
    document: DocumentView
    budget: Budget

    again: ClassVar[bool] = True

    @property
    def mode(self) -> str:
        return self.policy.mode

    @property
    def chunks(self) -> list[int]:
        return [end - start for start, end in pairwise([0, *self.policy.ends(self.document)])]

    def layer_budget(self, layer_idx: int) -> Budget:
        return self.policy.layer_budget(layer_idx, self.document, self.budget)


@dataclass(frozen=True)
class ChunkedProbed(ChunkedPolicy, ProbedPolicy):
    """With `prefill` "chunked" the last rows of each chunk observe: no question and no text stand behind it."""

    settled: ClassVar[Mapping[str, str]] = {**ChunkedPolicy.settled, **ProbedPolicy.settled}

    @property
    def takes_questions(self) -> bool:
        return not self.chunked

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        policy = super().fitted(document, budget, given)
        if self.chunked and self.probe is not None:
            raise PolicyUnsupported(
                "with prefill=chunked the last tokens of each chunk observe, and no text behind it does; leave probe "
                "out, or take prefill=whole",
                param="policy_params.probe",
            )
        return policy


@dataclass(frozen=True)
class ChunkedTail(ChunkedProbed, TailPolicy):
    """With `prefill` "chunked" each chunk has its window, which is at most half of it."""

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        policy = super().fitted(document, budget, given)
        if not self.chunked:
            return policy
        if "window" in given:
            require_room("window", policy.window, self.chunk // 2, self.chunk)
        return replace(policy, window=min(policy.window, self.chunk // 2))

    def ends(self, document: DocumentView) -> list[int]:
        """No chunk ends so late that the last one has fewer rows than the window."""
        *ends, last = super().ends(document)
        return [*(min(end, last - self.window) for end in ends), last]
