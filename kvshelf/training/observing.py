"""Looks at each layer of a forward pass without keeping it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvshelf.artifact.records import Kept
from kvshelf.engine.attention.function import Attended, ForwardContext
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
    needs: ClassVar[Needs] = Needs.QUERIES | Needs.ROPE
    visit: Visit = field(default=lambda _: None)

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Kept:
        self.visit(layer)
        return keep(layer, (layer.positions < budget.per_head[0]).expand(layer.kv_heads, -1))


def observe(engine: Engine, job: Job, visit: Visit, passes: Sequence[ProbePass]) -> None:
    """One forward pass over the job's document and passes behind it; `visit` sees the layers that policies reduce."""
    budget = Budget(1, 1 - 1 / job.num_tokens)
    engine.run(replace(job, policy=_Observer(visit), passes=tuple(passes), budget=budget))


class _Measurement(ForwardContext):
    def __init__(self, measure: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._measure = measure
        self.of_layers: dict[int, Tensor] = {}

    def after_attention(self, layer: Attended) -> None:
        self.of_layers[layer.layer_idx] = self._measure(layer.queries[0], layer.keys[0])


def measured_layers(
    engine: Engine,
    ids: Sequence[int],
    measure: Callable[[Tensor, Tensor], Tensor],
    positions: Sequence[int] | None = None,
) -> list[Tensor]:
    """The results of `measure` for the queries `[q_heads, N, D]` and keys `[kv_heads, N, D]` of each layer, in one
    forward pass over these tokens at these positions, by default from 0."""
    measurement = _Measurement(measure)
    tokens = torch.tensor([list(ids)])
    inputs = {
        "input_ids": tokens,
        "position_ids": torch.tensor([list(positions or range(len(ids)))]),
        "attention_mask": torch.ones_like(tokens),  # or a gap in the positions would separate two sequences
    }
    device = engine.passes.devices.inputs
    engine.passes.causal({name: tensor.to(device) for name, tensor in inputs.items()}, measurement)
    return [measurement.of_layers[layer] for layer in sorted(measurement.of_layers)]
