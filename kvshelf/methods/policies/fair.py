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
from kvshelf.methods.policies.around import Around
from kvshelf.methods.policies.base import Policy, ScoringPolicy
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.kvzip import KVzip
from kvshelf.methods.policies.sections import require_form, section_starts
from kvshelf.methods.policies.sharing import Sharing
from kvshelf.methods.policies.view import DocumentView, LayerView


@dataclass(frozen=True)
class Fair(Around, ScoringPolicy):
    """Let another policy score, and give each section of the document a share of every head's budget that is
    proportional to its length.

    A document of several instructions loses some of them whole under a policy that compares all tokens with each other;
    the paper evicts from each instruction alike. Here the base says how many entries a head keeps, and which of a
    section go first. Seats go by the divisors of Sainte-Lague: the next entry of a section of n tokens that keeps r has
    n / (2 r + 1), and the largest stays. So shares are in proportion to about an entry, but for what the base always
    keeps, which counts in its section; before that each section keeps its best entry, longer ones first.

    Sections begin at headings of Markdown and numbered lines (1. or 2) or 3.1), or behind blank lines where there are
    not two of these (`by` "section"); behind blank lines ("blocks"); at each line in which a regular expression finds
    something ("lines:^Rule"); or where spans of tokens begin and end ("tokens:0-64,64-90"). A document without any is
    one section, of which the base keeps what it keeps.

    Codecs that give the best entries more bits (mixed, klt with classes) go by the base's scores.

    Departures: the paper knows of two instructions and gives each its ratio. Give the base's parameters with these.
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

    reduce = ScoringPolicy.reduce

    @classmethod
    def bases(cls, known: Mapping[str, type[Policy]]) -> Mapping[str, type[Policy]]:
        return {
            base.name: base
            for base in known.values()
            if issubclass(base, ScoringPolicy) and base.reduce is ScoringPolicy.reduce and not issubclass(base, Around)
            if not (base.sets_precision or base.budgets_heads)
            if base.build({}, known).exact or not base.shared_by_heads  # or it scores chunks
        }

    @classmethod
    def build(cls, given: Mapping[str, Any], known: Mapping[str, type[Policy]]) -> Self:
        policy = super().build(given, known)
        require_form(policy.by)
        return policy

    @property
    def needs(self) -> Needs:
        return self.inner.needs if self.by.startswith("tokens:") else self.inner.needs | Needs.TEXT

    @property
    def chooser(self) -> Policy:
        return self

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        return replace(super().fitted(document, budget, given), starts=section_starts(self.by, document))

    def score(self, layer: LayerView) -> Tensor:
        return self.inner.score(layer)

    def protected(self, layer: LayerView) -> Tensor:
        return self.inner.protected(layer)

    def counts(self, layer: LayerView, scores: Tensor, protected: Tensor, budget: LayerBudget) -> Counts:
        return self.inner.counts(layer, scores, protected, budget)

    @property
    def sharing(self) -> Sharing | None:
        return self.inner.sharing

    def weight(self, layer: LayerView) -> float:
        return self.inner.weight(layer)

    def precedence(self, layer: LayerView, scores: Tensor) -> Tensor:
        """`-(2 r + 1) / n` of an entry that r of the n in its section go before, and 2 more of the first one."""
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
