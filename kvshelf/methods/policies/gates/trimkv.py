"""TRIM-KV: a gate says how fast a token may be forgotten (Bui et al., 2025, arXiv 2512.03324)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from kvshelf.artifact.records import Entries, Kept
from kvshelf.methods.method import parameter
from kvshelf.methods.policies.budgets import Budget
from kvshelf.methods.policies.chunked import LayerPast
from kvshelf.methods.policies.gate_file import Family, Target
from kvshelf.methods.policies.gates.base import TokenGate
from kvshelf.methods.policies.keeping import KeepsScores
from kvshelf.methods.policies.view import LayerView


@dataclass(frozen=True)
class TrimKV(KeepsScores, TokenGate):
    """Keep what a gate lets fade least: each token has a rate beta, and at time T beta^(T - p) of it is left.

    log beta = logsigmoid(W2 silu(W1 x) + b), where x is the token's query, key and value of all heads before RoPE. The
    score of the token at position p is (T - p) log beta, with T the document's end plus `horizon`. Where all rates are
    equal, the most recent stay. In training, rows of questions and answers behind a document see its token with the
    logit (t - p) log beta added; the loss is the KL of their predictions from those with the full cache, and what the
    tokens of a head leave at the document's end, beyond a quarter of their number. b begins at 10: nothing fades.

    With `prefill` "chunked" the excess over the budget goes behind each chunk, T being the tokens read so far plus
    `horizon`: a chunk is the authors' buffer. While the model answers, suffix policy `trimkv` goes on with each entry's
    log beta, which the cache has with `keep_scores`, and so do chunks that are appended.

    Departures: the authors' gate reads the hidden state. In their training every row sees decayed tokens; here the
    document is read whole, as it is when it is compressed, and the gate reads what it will read then. log beta is one
    logsigmoid in fp32: of a b of 18, the logarithm of a rounded sigmoid would be 0.
    """

    name: ClassVar[str] = "trimkv"
    source: ClassVar[str] = "TRIM-KV, arXiv 2512.03324"
    advice: ClassVar[str] = "where gates learn from predictions and heads keep equally many; kvzip_gate keeps more."
    family: ClassVar[Family] = "decay"
    target: ClassVar[Target] = "distill"
    column_names: ClassVar[tuple[str, ...]] = ("rate",)

    horizon: int = parameter(0, "tokens behind the document's end at which it is judged", minimum=0)

    @classmethod
    def outputs(cls, gate: Mapping[str, Tensor], layer: LayerView) -> Tensor:
        """log beta of its tokens."""
        return torch.nn.functional.logsigmoid(super().outputs(gate, layer))

    def judged(self, outputs: Tensor, positions: Tensor, read: int) -> Tensor:
        return (read + self.horizon - positions) * outputs

    def noted(self, layer: LayerView) -> int:
        return layer.num_tokens

    def finished(
        self,
        records: Mapping[int, Entries],
        notes: Mapping[int, int | None],  # None of a layer that was read in chunks, which `recorded` has rated
        budget: Budget,  # noqa: ARG002
    ) -> Mapping[int, Entries]:
        rated = dict(records)
        for layer, read in notes.items():
            if read is not None:
                record = cast("Kept", records[layer])
                assert record.importance is not None
                ages = read + self.horizon - record.entry_positions
                rated[layer] = self._rated(record, record.importance / ages)  # undoes `judged`
        return rated

    def recorded(self, past: LayerPast) -> Kept:
        return self._rated(past.record, past.columns["outputs"])

    def _rated(self, record: Kept, rates: Tensor) -> Kept:
        """The record with its rates: 0 where an entry is protected, which never fades."""
        assert record.importance is not None
        return self.keeping(record, rate=rates.masked_fill(record.importance.isposinf(), 0.0))

    @property
    def goes_on(self) -> bool:
        return self.keep_scores

    def resumed(self, record: Kept, read: int, num_tokens: int) -> LayerPast:
        """Protected entries have rate 0, so they stay."""
        return LayerPast(record, num_tokens, read, {"outputs": record.columns["rate"]})
