"""Policies that decide again while a document is read: at each chunk, over what is left of it and the chunk.

    kvzip, epicache                       by the largest weights that a probe behind the chunk gives
    snapkv, tova, arkv, keydiff           as over a document; the chunk's last rows observe
    gates                                 by an output of each token, which stays with its entry
    d2o                                   by sums of attention, which stay with the entry, and a threshold of the layer

Between two layers, one has no more than the budget and a chunk; where layers share the budget, all of them together.
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
from kvshelf.methods.policies.base import Policy, ProbedPolicy, TailPolicy
from kvshelf.methods.policies.budgets import Budget
from kvshelf.methods.policies.parameters import require_held
from kvshelf.methods.policies.view import DocumentView, LayerView


@dataclass(frozen=True, eq=False)
class LayerPast:
    """What a layer has of a document of `num_tokens`, of which `read` have been read.

    record: the entries, with the importance that was given to them last. columns: what the policy carries of each
    entry, `[entries]` fp32, by name. note: what it carries of the layer.
    """

    record: Kept
    num_tokens: int
    read: int = 0
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    note: Any = None

    @classmethod
    def nothing(cls, chunk: LayerView, num_tokens: int) -> LayerPast:
        """Before the first chunk, of a layer like this one."""
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
        """With the tokens of a chunk behind those of each head, not judged yet. columns: of the chunk, `[kv_heads, T]`
        each."""
        record, tokens = self.record, chunk.num_tokens
        keys, values = (rows for rows in record.rows if isinstance(rows, Tensor))
        at = torch.arange(self.read, self.read + tokens, dtype=torch.int32, device=keys.device)
        joined = Kept(
            keys=self._behind(keys, chunk.keys),
            values=self._behind(values, chunk.values),
            entries_at=self._behind(record.entry_positions, at.expand(chunk.kv_heads, -1)),
            offsets=offsets_of([length + tokens for length in record.lengths]),
        )
        carried = {
            name: self._behind(self.columns.get(name, numbers[0, :0]), numbers)
            for name, numbers in (columns or {}).items()
        }
        return replace(self, record=joined, read=self.read + tokens, columns=carried)

    def _behind(self, entries: Tensor, tokens: Tensor) -> Tensor:
        """`[entries, ...]`, with `tokens` `[kv_heads, T, ...]` behind those of each head."""
        heads = zip(torch.split(entries, self.record.lengths), tokens, strict=True)
        return torch.cat([part for head in heads for part in head])

    def judged(self, importance: Tensor, note: Any = None) -> LayerPast:
        """With the importance of each entry, `[entries]` fp32, infinite where one must stay."""
        return replace(self, record=replace(self.record, importance=importance), note=note)

    def layer(self, chunk: LayerView) -> LayerView:
        """The entries as a layer of as many tokens, of which the last have the queries of the chunk. Every head has
        equally many."""
        keys, values = (
            rows.view(chunk.kv_heads, self.record.lengths[0], -1)
            for rows in self.record.rows
            if isinstance(rows, Tensor)
        )
        document = DocumentView(range(keys.shape[1]), chunk.protected_prefix)
        return replace(chunk, keys=keys, values=values, document=document)

    def best(self, counts: Sequence[int]) -> LayerPast:
        """The most important entries, `counts[h]` of head h; equal ones by the smaller position."""
        assert self.record.importance is not None, "judged"
        best = best_rows(self.record, self.record.importance, counts)
        if best is None:
            return self
        columns = {name: numbers[best[0]] for name, numbers in self.columns.items()}
        return replace(self, record=only_rows(self.record, *best), columns=columns)


def best_rows(record: Kept, precedence: Tensor, counts: Sequence[int]) -> tuple[Tensor, tuple[int, ...]] | None:
    """The rows of the `counts[h]` first entries of each head, ascending, and where its heads then begin and end; equal
    ones by the smaller position. None: all."""
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
    """These rows of a record."""
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
    """One that can decide again at each chunk. With `prefill` "chunked" a chunk sees what was kept of those before it;
    then all that is left and the chunk are judged, and what goes beyond the budget is dropped for good."""

    settled: ClassVar[Mapping[str, str]] = dict.fromkeys(("prefill", "chunk"), "a stored document has been read")

    in_chunks: ClassVar[frozenset[str]] = frozenset({"chunk"})
    """Its parameters that mean nothing where the document is read in one pass."""

    prefill: str = parameter(
        "whole",
        "whole: one pass, then reduce; chunked: chunk tokens a pass, each behind what was kept of those before it",
        choices=("whole", "chunked"),
        added=True,
    )
    chunk: int = parameter(2048, "tokens of a pass where prefill is chunked", minimum=64, added=True)

    @property
    def chunked(self) -> bool:
        """Whether it reads the document in chunks."""
        return self.prefill == "chunked"

    @property
    def mode(self) -> str:
        """As of an `Absorber`."""
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
        """Where its chunks end."""
        return [*range(self.chunk, document.num_tokens, self.chunk), document.num_tokens]

    def taken(self, past: LayerPast, chunk: LayerView) -> LayerPast:
        """The past with the chunk's tokens, judged. chunk: a layer of these tokens alone, at their places in the
        document; its probes stood behind it."""
        assert self.scorer is not None, "one that does not score says what it does here"
        joined = past.joined(chunk)
        layer = joined.layer(chunk)
        return joined.judged(self.scorer.importance(layer).flatten(), self.noted(layer))

    @property
    def hides(self) -> bool:
        """Whether it takes a chunk before its tokens attend, as `hidden` says which of them no later one sees."""
        return False

    def hidden(self, past: LayerPast, count: int) -> Tensor:
        """Which of the last `count` tokens of a past, those of its chunk, no later token sees: `[kv_heads, count]`
        bool. Of a policy that hides."""
        raise NotImplementedError

    def layer_budget(self, layer_idx: int, document: DocumentView, budget: Budget) -> Budget:  # noqa: ARG002
        """The part of the budget that one layer has, as a mean of its heads."""
        return budget

    def shares(self, pasts: Sequence[LayerPast], budget: Budget) -> Sequence[Sequence[int]]:
        """How many entries each head keeps, of one layer, or of all of them where `phase` is not "during"."""
        return [[min(budget.tokens, length) for length in past.record.lengths] for past in pasts]

    def own_bytes(self, document: DocumentView) -> int:  # noqa: ARG002
        """That it holds of a document in chunks beside keys, values and their scores, where they grow with it."""
        return 0

    def recorded(self, past: LayerPast) -> Kept:
        """What is stored of a layer, once the document has been read."""
        return past.record

    def cut(self, past: LayerPast, counts: Sequence[int]) -> LayerPast:
        """What stays of a layer whose head h keeps `counts[h]` entries."""
        return past.best(counts)

    @property
    def goes_on(self) -> bool:
        """Whether its caches have all that it decides by, so that more chunks may follow."""
        return False

    def resumes(self, made: Identity) -> bool:
        """Of a cache that it read itself, though in one pass where nothing had to go, with the same parameters but for
        `chunk`, and of which nothing is protected."""
        own, other = ({**params, "chunk": None} for params in (self.parameters(), made.policy_params))
        same = (self.name, self.revision, own) == (made.policy, made.policy_version, other)
        return self.chunked and self.goes_on and same and made.prefill != "appended" and not made.protect

    def resumed(self, record: Kept, read: int, num_tokens: int) -> LayerPast:
        """What `record`, a layer of such a cache, was made of by `recorded`. read: its tokens. num_tokens: with those
        that follow."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class ChunkAbsorber:
    """An `Absorber` of a policy that decides again at each chunk."""

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
    """In chunks, the last rows of each are the end of the prompt: no question and no text stand behind a chunk."""

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
    """The window is of each chunk, which has room for it twice."""

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        policy = super().fitted(document, budget, given)
        if not self.chunked:
            return policy
        if "window" in given:
            require_held("window", policy.window, self.chunk // 2, self.chunk)
        return replace(policy, window=min(policy.window, self.chunk // 2))

    def ends(self, document: DocumentView) -> list[int]:
        """The chunk before the last ends where the last still has the rows of a window."""
        *ends, last = super().ends(document)
        return [*(min(end, last - self.window) for end in ends), last]
