"""Gates that foretell a score of each token: those of `kvzip_gate` and `locret`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kvshelf.methods.policies.base import ScoringPolicy
from kvshelf.methods.policies.gate_file import own_tensors
from kvshelf.methods.policies.gates.base import TokenGate, gate_inputs
from kvshelf.methods.policies.view import LayerView
from kvshelf.training.gates.lessons import Lesson, Observed, answered, logarithm, repeated
from kvshelf.training.gates.trainer import Objective, rank_correlation

if TYPE_CHECKING:
    from kvshelf.engine.engine import Engine

_SMOOTH: Final = 0.0025
"""Weight of the difference between neighbours (Locret)."""
_SPREAD: Final = 1e-3
"""Least deviation of a channel: one that never changes says nothing."""


def fresh(policy: type[TokenGate], engine: Engine, width: int) -> dict[str, Tensor]:
    """The tensors of gates before training, fp32: random matrices, scales of 1 and biases of 0."""
    state = {}
    for name, shape in policy.shapes(width, engine.preparer.geometry).items():
        if len(shape) > 1:
            state[name] = torch.randn(shape) / math.sqrt(shape[-1])
        else:
            state[name] = torch.ones(shape) if name.endswith("scale") else torch.zeros(shape)
        state[name].requires_grad_(not name.endswith(("mean", "scale")))
    return state


def fit_inputs(state: dict[str, Tensor], layer: LayerView) -> None:
    """Set the scale of one layer's inputs from a document."""
    tensors = own_tensors(state, layer.place)
    rows = torch.cat(list(gate_inputs(layer))).cpu()
    tensors["mean"].copy_(rows.mean(0))
    tensors["scale"].copy_(1 / rows.std(0).clamp_min(_SPREAD))


@dataclass(eq=False)
class Importance(Objective):
    """Regression of the logarithm of a score, on each token of a document (smooth L1, as Locret's)."""

    policy: type[TokenGate]

    def begin(self, lesson: Lesson) -> None:
        self.state = fresh(self.policy, self.engine, self.width)
        observed = self._read(lesson)

        def fit(layer: LayerView) -> None:
            fit_inputs(self.state, layer)
            label = self._label(observed, layer)
            own_tensors(self.state, layer.place)["bias"].data.copy_(label.mean(dim=1))

        observed.observe(self.engine, fit)

    def learn(self, lesson: Lesson) -> tuple[float, str]:
        observed = self._read(lesson)
        losses = []

        def learn(layer: LayerView) -> None:
            label = self._label(observed, layer)
            with torch.enable_grad():  # of one layer at a time: the model has none
                scores = self._scores(layer)
                near = (scores[:, 1:] - scores[:, :-1]).square().mean()
                loss = torch.nn.functional.smooth_l1_loss(scores, label) + _SMOOTH * near
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())

        observed.observe(self.engine, learn)
        return sum(losses) / len(losses), observed.job.identity.document

    def agreement(self, lesson: Lesson) -> float:
        observed = self._read(lesson)
        scores, labels = [], []

        def judge(layer: LayerView) -> None:
            scores.append(self._scores(layer).detach())
            labels.append(self._label(observed, layer))

        observed.observe(self.engine, judge)
        return rank_correlation(torch.stack(scores), torch.stack(labels))

    def _read(self, lesson: Lesson) -> Observed:
        return (repeated if self.policy.target == "kvzip" else answered)(self.engine, lesson)

    def _scores(self, layer: LayerView) -> Tensor:
        """The gate's scores of the tokens behind the chat template's: `[kv_heads, n]` fp32."""
        rows = torch.cat(list(gate_inputs(layer)))[layer.protected_prefix :].cpu()
        return self.policy.gated(own_tensors(self.state, layer.place), rows).T

    def _label(self, observed: Observed, layer: LayerView) -> Tensor:
        """The target of `_scores`."""
        if self.policy.target == "kvzip":
            policy = observed.job.policy
            assert isinstance(policy, ScoringPolicy)
            weights = policy.score(layer)
        else:
            weights = observed.importance(layer)
        return logarithm(weights[:, layer.protected_prefix :]).cpu()
