"""Fair eviction: each section of a document keeps its share (after Chen et al., 2025, arXiv 2510.00231)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kvshelf.kernels.select import Counts
from kvshelf.kernels.transfer import upload_numbers
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.around import AroundScorer, scorers
from kvshelf.methods.policies.base import Policy, ScoringPolicy
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.kvzip import KVzip
from kvshelf.methods.policies.sections import require_form, section_starts
from kvshelf.methods.policies.sharing import Sharing
from kvshelf.methods.policies.view import DocumentView, LayerView


@dataclass(frozen=True)
class Fair(AroundScorer):
    """Let another policy score, and share every head's budget among the document's sections by their lengths.

    A policy that compares all tokens of a document with each other may drop whole instructions; the paper evicts from
    each instruction alike. Here the base decides how many entries a head keeps, and in which order the entries of a
    section go. Sections get entries as parties get seats by the divisors of Sainte-Lague: a section of n tokens with r
    entries bids n / (2 r + 1) for the next one, and the largest bid wins. So shares are proportional to within about an
    entry. Entries that the base always keeps count in their section. First of all each section keeps its best entry,
    longer sections before shorter ones.

    Sections begin at headings of Markdown and numbered lines (1. or 2) or 3.1), or behind blank lines where there are
    not two of these (`by` "section"); behind blank lines ("blocks"); at each line that a regular expression matches
    ("lines:^Rule"); or where spans of tokens begin and end ("tokens:0-64,64-90"). Any other document is one section.

    Codecs that give the best entries more bits (mixed, klt with classes) go by the base's scores.

    Departures: the paper has two instructions and gives each its ratio.
    """

    name: ClassVar[str] = "fair"
    source: ClassVar[str] = "The Pitfalls of KV Cache Compression, arXiv 2510.00231"
    advice: ClassVar[str] = (
        "around kvzip, for documents of many instructions of which most entries go; around keydiff it loses more."
    )
    takes: ClassVar[str] = "a policy that scores each token by itself and leaves the budgets of heads to their scores"

    by: str = parameter("section", "where sections begin: section, blocks, lines:REGEX or tokens:A-B,C-D")
    base: str = parameter("kvzip", "the policy that scores; its own parameters are given beside these")
    inner: ScoringPolicy = field(default_factory=KVzip)
    starts: tuple[int, ...] = (0,)
    """The first token of each section, once the policy is fitted to a document."""

    @classmethod
    def bases(cls, known: Mapping[str, type[Policy]]) -> Mapping[str, type[Policy]]:
        return {
            name: base
            for name, base in scorers(known).items()
            if not (base.sets_precision or base.budgets_heads)
            if base.build({}, known).exact or not base.shared_by_heads  # the others score chunks
        }

    @classmethod
    def build(cls, params: Mapping[str, Any], known: Mapping[str, type[Policy]]) -> Self:
        policy = super().build(params, known)
        require_form(policy.by)
        return policy

    @property
    def needs(self) -> Needs:
        return self.inner.needs if self.by.startswith("tokens:") else self.inner.needs | Needs.TEXT

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        return replace(super().fitted(document, budget, given), starts=section_starts(self.by, document))

    def counts(self, layer: LayerView, scores: Tensor, protected: Tensor, budget: LayerBudget) -> Counts:
        return self.inner.counts(layer, scores, protected, budget)

    @property
    def sharing(self) -> Sharing | None:
        return self.inner.sharing

    def weight(self, layer: LayerView) -> float:
        return self.inner.weight(layer)

    def precedence(self, layer: LayerView, scores: Tensor) -> Tensor:
        """`-(2 r + 1) / n` of the entry behind r others in its section of n tokens, and 2 more of the first one."""
        places, protected = layer.positions, self.protected(layer)
        starts = upload_numbers(self.starts, places.device)
        sizes = torch.diff(starts, append=places[-1:] + 1)
        section = torch.bucketize(places, starts[1:], right=True)  # [N]
        ranks = places - starts[section]
        seats = 2.0 * (ranks == 0) - (2 * ranks + 1) / sizes[section]  # section after section, best first
        ranked = scores.masked_fill(protected, torch.inf).nan_to_num(torch.inf, torch.inf, torch.inf)
        best = ranked.argsort(dim=1, descending=True, stable=True)
        order = best.gather(1, section[best].argsort(dim=1, stable=True))  # [heads, N]
        seated = torch.empty_like(scores).scatter_(1, order, seats.expand_as(order).to(scores.dtype))
        bad = ~scores.isfinite() & ~protected
        return seated.masked_fill(protected, torch.inf).masked_fill(bad, torch.nan)
