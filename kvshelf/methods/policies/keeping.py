"""Base of policies whose papers go on choosing while the model answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from torch import Tensor

from kvshelf.artifact.records import Kept
from kvshelf.errors import PolicyUnsupported
from kvshelf.methods.method import parameter
from kvshelf.methods.policies.base import Policy
from kvshelf.methods.policies.budgets import Budget
from kvshelf.methods.policies.view import DocumentView


@dataclass(frozen=True)
class KeepsScores(Policy):
    """A policy with numbers of each entry, by which the suffix policy of the same paper goes on under scope "cache".
    With `keep_scores` the cache has them as columns of its records, 4 bytes a number under every codec."""

    settled: ClassVar[Mapping[str, str]] = {"keep_scores": "what it chooses at a question is not stored"}
    column_names: ClassVar[tuple[str, ...]]
    required: ClassVar[Mapping[str, Any]] = {}
    """The values of parameters without which no answer could go on."""

    keep_scores: bool = parameter(False, "store what suffix.scope cache goes on with, 4 bytes a number", added=True)

    @property
    def stored_beside(self) -> dict[str, Any]:
        beside = super().stored_beside
        return beside | {"columns": len(self.column_names)} if self.keep_scores else beside

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        for name, value in self.required.items() if self.keep_scores else ():
            if getattr(self, name) != value:
                raise PolicyUnsupported(
                    "with keep_scores an answer goes on with sums of all rows, and with entries that it can copy; give "
                    f"{name} {json.dumps(value)}, or leave keep_scores out",
                    param=f"policy_params.{name}",
                )
        return super().fitted(document, budget, given)

    def has_work(self, budget: Budget, num_tokens: int) -> bool:
        return self.keep_scores or super().has_work(budget, num_tokens)

    def keeping(self, record: Kept, **columns: Tensor) -> Kept:
        """The record, with `keep_scores` with these columns, `[entries]` fp32 each."""
        return replace(record, columns=columns) if self.keep_scores else record
