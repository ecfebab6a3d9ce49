"""Looks at each layer of a prefill without keeping it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvshelf.artifact.records import Kept
from kvshelf.methods.method import Needs
from kvshelf.methods.policies.base import Policy, keep
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.view import LayerView, ProbePass

if TYPE_CHECKING:
    from kvshelf.engine.engine import Engine
    from kvshelf.engine.inputs.job import Job

Visit = Callable[[LayerView], None]


@dataclass(frozen=True)
class _Observer(Policy):
    """Visits each layer and keeps next to nothing. Not a policy to choose."""

    name = "observer"
    source = "none"
    visit: Visit = field(default=lambda _: None)

    @property
    def needs(self) -> Needs:
        return Needs.QUERIES | Needs.ROPE

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Kept:
        self.visit(layer)
        return keep(layer, (layer.positions < budget.per_head[0]).expand(layer.kv_heads, -1))


def observe(engine: Engine, job: Job, visit: Visit, passes: Sequence[ProbePass]) -> None:
    """One forward pass over the job's document and these passes behind it; `visit` sees each layer that policies
    reduce."""
    budget = Budget(1, 1 - 1 / job.num_tokens)
    engine.run(replace(job, policy=_Observer(visit), passes=tuple(passes), budget=budget))
