"""TRIM-KV while decoding: what a gate lets fade least stays (Bui et al., 2025, arXiv 2512.03324)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvshelf.artifact.identity import Identity, ModelIdentity
from kvshelf.errors import PolicyUnsupported
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.gate_file import Gates, Geometry
from kvshelf.methods.policies.gates.make_each_token_count import MakeEachTokenCount
from kvshelf.methods.policies.gates.trimkv import TrimKV as TrimKVPolicy
from kvshelf.methods.policies.sharing import flat_counts
from kvshelf.methods.suffixes.base import Columns, PeriodicPolicy, Reduction, Suffix, behind_sinks, best

_TRAINED: dict[str, type[TrimKVPolicy]] = {policy.name: policy for policy in (TrimKVPolicy, MakeEachTokenCount)}


@dataclass(frozen=True)
class TrimKV(PeriodicPolicy):
    """Keep the entries that a gate lets fade least. Each has a rate beta, and at time T beta^(T - p) of it is left.

    Gates and rates are those of policy `trimkv`: a gate reads a token's query, key and value as the token is made, the
    question's, too, and nothing later. Whenever there are more entries than the budget, those of the least beta^(T - p)
    go. Under scope "cache" those of the document compete, behind its sinks, by the rates that policy `trimkv` gave
    them (`keep_scores`). With `gates` "make_each_token_count" the rates are of that policy's gates, and under scope
    "cache" the entries of all heads and layers compete with each other for one budget.

    Departures: as for policy `trimkv`; a reduction after every 32nd token, not after each, unless `every` is 1; under
    scope "suffix" each head keeps its own best, whatever the gates; a cache's `floor` is of the document alone.
    """

    name: ClassVar[str] = "trimkv"
    source: ClassVar[str] = "TRIM-KV, arXiv 2512.03324"
    advice: ClassVar[str] = "for a model whose gates were trained, where answers are long chains of thought."
    needs: ClassVar[Needs] = Needs.GATES
    columns: ClassVar[dict[str, float]] = {"rate": 0.0}
    carried: ClassVar[frozenset[str]] = frozenset({"rate"})

    gates: str = parameter("trimkv", "the policy whose gates are read", choices=(*_TRAINED,))

    @property
    def differ(self) -> Literal["none", "heads"]:
        return "heads" if self.gates == MakeEachTokenCount.name else "none"

    @property
    def document_policy(self) -> str:
        return self.gates

    def gate_file(self, model: ModelIdentity, folder: str, geometry: Geometry) -> Gates:
        return _TRAINED[self.gates]().gate_file(model, folder, geometry)

    def tail(self, positions: Sequence[Tensor], made: Identity, prefix: int) -> Sequence[int]:  # noqa: ARG002
        if made.policy in _TRAINED and made.policy != self.gates:
            raise PolicyUnsupported(
                f"the rates of this cache are of policy {made.policy}, whose gates suffix.params.gates has to name",
                param="suffix.params.gates",
            )
        return behind_sinks(positions, made)

    def gated(self, gate: Mapping[str, Tensor], rows: Tensor) -> Columns:
        return {"rate": torch.nn.functional.logsigmoid(_TRAINED[self.gates].gated(gate, rows)).T}

    def counts(self, layers: Iterable[Suffix], total: int) -> Sequence[Sequence[int]]:
        of_layers = [self._importance(suffix) for suffix in layers]
        heads = [head for layer in of_layers for head in layer]
        counts = iter(flat_counts(heads, total, [0] * len(heads)))
        return [list(islice(counts, len(layer))) for layer in of_layers]

    def _importance(self, suffix: Suffix) -> Sequence[Tensor]:
        """The scores of the entries of each head, infinite where one stays."""
        scores = self._scores(suffix).cpu()  # layers may be on several devices
        scores[:, : suffix.protected] = torch.inf
        if suffix.there is None:
            return list(scores)
        return [head[entries] for head, entries in zip(scores, suffix.there.cpu(), strict=True)]

    def reduce(self, suffix: Suffix) -> Reduction:
        return Reduction.of(best(suffix, self._scores(suffix), 0), suffix.protected)

    def _scores(self, suffix: Suffix) -> Tensor:
        return (suffix.tokens - suffix.positions) * suffix.columns["rate"]
