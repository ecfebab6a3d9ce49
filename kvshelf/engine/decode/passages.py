"""Where an answer comes from: which tokens of its documents it read, and the part of each document in it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvshelf.api import Usage
from kvshelf.api.answers import Answer
from kvshelf.api.queries import Route
from kvshelf.artifact.records import PackedRecord, Recent
from kvshelf.engine.attention.attachment import Attached
from kvshelf.engine.decode.hooks import RowHook, Shown, Wants
from kvshelf.engine.decode.selection import Selection
from kvshelf.engine.decode.suffixes import SuffixRow
from kvshelf.errors import CacheUnusable
from kvshelf.kernels.prefix_attention import SelectedPrefix

_MOST_READ = 2
"""Documents that answer: a comparison is about two."""
_NARROWS_BY = 8
"""Narrowing by 2 found the documents of as many of 48 questions among 32 (kvshelf-tiny and `tests/models/second`)."""
_ALONE = 2 / 3
_LEAST_NATS = -1e4
"""For tokens that a model never writes: a likelihood of 0 would be the same behind each document."""


class SourceShares(RowHook):
    """The share of each document in the attention that a question's last token gave to documents, in their order: means
    over layers and heads. They add up to 1. Tokens before this one attend to all documents much alike."""

    def __init__(self, documents: int) -> None:
        self._total = torch.full((documents,), torch.finfo(torch.float64).tiny, dtype=torch.float64)  # never 0 / 0

    def wants(self, row: SuffixRow, *, answering: bool) -> Wants:  # noqa: ARG002
        return Wants.NOTHING if answering else Wants.MASSES

    def after(self, row: SuffixRow, shown: Shown, *, answering: bool) -> None:  # noqa: ARG002
        for masses in shown.masses:
            self._total += masses.cpu()

    def close(self, answer: Answer) -> Answer:
        return replace(answer, sources=tuple((self._total / self._total.sum()).tolist()))


class QuestionLikelihood(RowHook):
    """What the model gives a question behind its documents: the sum of the logarithms of its tokens' probabilities, but
    for the first token, of which nothing is known."""

    def __init__(self) -> None:
        self._nats = 0.0

    def wants(self, row: SuffixRow, *, answering: bool) -> Wants:  # noqa: ARG002
        return Wants.NOTHING if answering else Wants.LIKELIHOOD

    def after(self, row: SuffixRow, shown: Shown, *, answering: bool) -> None:  # noqa: ARG002
        if shown.log_probs is not None:
            self._nats += shown.log_probs.clamp(min=_LEAST_NATS).sum().item()

    def close(self, answer: Answer) -> Answer:
        if math.isnan(self._nats):
            raise CacheUnusable(
                "the model's logits after this cache are not numbers, so a question has no likelihood there; make the "
                "cache again, or ask the others without it"
            )
        return replace(answer, likelihood=self._nats)


class Narrowing:
    """Chooses the one or two of several documents that a question is about, by how the model reads the question.

    route: "likelihood" reads the question over each document alone. A document's share is its probability, where each
    is as likely as another before the question is known (the query likelihood model, Ponte and Croft, SIGIR 1998).
    "attention" reads it over all at once; shares are those of its last token's attention. It is read again over the
    eighth with the most, and so on down to two: among fewer tokens attention is sharper.

    Two documents answer, or one alone that has more than two thirds of both shares. `readings` are the answers of one
    token to make next, each by the places of its documents, for `take`; without readings, `places` are settled.
    """

    def __init__(self, route: Route, documents: int) -> None:
        self.by_likelihood = route == "likelihood"
        self.places = list(range(documents))
        self._settled = False
        self._spent: list[Usage] = []

    @property
    def readings(self) -> list[list[int]]:
        if self._settled:
            return []
        return [[place] for place in self.places] if self.by_likelihood else [self.places]

    def take(self, answers: Sequence[Answer]) -> None:
        shares: Sequence[float] = answers[0].sources
        if self.by_likelihood:
            nats = torch.tensor([answer.likelihood for answer in answers], dtype=torch.float64)
            shares = nats.softmax(dim=0).tolist()
        best = sorted(range(len(shares)), key=lambda at: -shares[at])
        count = _MOST_READ if self.by_likelihood else max(_MOST_READ, len(best) // _NARROWS_BY)
        self._settled = self.by_likelihood or len(best) <= _MOST_READ
        if self._settled and shares[best[0]] > _ALONE * sum(shares[at] for at in best[:_MOST_READ]):
            count = 1
        self.places = sorted(self.places[at] for at in best[:count])
        self._spent += [answer.usage for answer in answers]

    def counted(self, usage: Usage) -> Usage:
        """What the answer over `places` took, with the readings before it: they cost, and save nothing."""
        tokens = usage.prefill_tokens + sum(reading.prefill_tokens for reading in self._spent)
        cost, saved = usage.prefill_token_equivalents, usage.prefill_token_equivalents_saved
        costs = [reading.prefill_token_equivalents for reading in self._spent]
        more = None if None in costs else sum(filter(None, costs))
        update = {
            "prefill_tokens": tokens,
            "prefill_token_equivalents": None if cost is None or more is None else cost + more,
            "prefill_token_equivalents_saved": None if saved is None or more is None else saved - more,
        }
        return usage.model_copy(update=update)


class Passages(RowHook):
    """Counts how often one answer read each token of its documents.

    A read is one token of the answer at one KV head of a layer that chooses, counted behind each step.
    """

    def __init__(self, document: Attached, selection: Selection | None) -> None:
        """selection: what the answer's tokens see of the document; None: all."""
        self._document = document
        self._selection = selection
        self._reads = [torch.zeros(part.num_tokens, dtype=torch.int64) for part in document.parts]
        self._most = 0
        """Reads of a token that every head read every time."""

    def after(self, row: SuffixRow, shown: Shown, *, answering: bool) -> None:  # noqa: ARG002
        selected = answering or (self._selection is not None and self._selection.reads_question)
        if shown.complete and selected:
            self._count(self._document if self._selection is None else self._selection.seen)

    def close(self, answer: Answer) -> Answer:
        """Adds one byte for each token of each document: round(255 * share of the reads that it could have had).

        Where no token of the answer chose, everything stored was read: the share is that of the heads that hold the
        token, in the layers that hold the whole document.
        """
        if not self._most:
            for layer in range(self._document.num_layers):
                for number, (reads, record) in enumerate(self._records(layer)):
                    if not isinstance(record, Recent):
                        _add(reads, record, torch.arange(record.entries))
                        self._most += record.kv_heads if number == 0 else 0
        shares = (reads.double() / max(1, self._most) for reads in self._reads)
        return replace(
            answer, passages=tuple((255 * share).round().to(torch.uint8).numpy().tobytes() for share in shares)
        )

    def _count(self, seen: Attached | Selection) -> None:
        """Add what one token of the answer read, unless it reads all, without a choice. Waits for the device."""
        for layer in range(self._document.num_layers):
            prefixes = seen.counted(layer) if isinstance(seen, Selection) else seen.prefixes(layer)
            if not any(isinstance(prefix, SelectedPrefix) for prefix in prefixes):
                continue
            self._most += len(prefixes[0].lengths)
            for (reads, record), prefix in zip(self._records(layer), prefixes, strict=True):
                if not isinstance(prefix, SelectedPrefix):
                    continue  # it is empty
                rows, counts = prefix.chosen.rows, prefix.chosen.counts
                chosen_rows = torch.arange(rows.shape[1], device=rows.device) < counts.unsqueeze(1)
                first = torch.tensor(record.offsets[:-1], device=rows.device).unsqueeze(1)
                _add(reads, record, (first + rows)[chosen_rows])

    def _records(self, layer: int) -> Iterator[tuple[Tensor, PackedRecord]]:
        """The record of each prefix of a layer, with the reads of its document."""
        for part, reads in zip(self._document.parts, self._reads, strict=True):
            for record in part.entries(layer):
                yield reads, record


def _add(reads: Tensor, record: PackedRecord, entries: Tensor) -> None:
    """Count these entries, which are rows of the record over all its heads."""
    positions = record.entry_positions
    tokens = positions[entries.to(positions.device)].cpu()
    reads.index_add_(0, tokens, torch.ones_like(tokens, dtype=reads.dtype))
