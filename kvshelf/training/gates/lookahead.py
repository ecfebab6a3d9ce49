"""Learned tokens and their additions to the model, as `lookaheadkv` runs them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvshelf.artifact.identity import canonical_json, digest
from kvshelf.engine.soft import Soft, soft_tokens
from kvshelf.methods.policies.view import LayerView, ProbePass
from kvshelf.training.gates.behind import ReadBehind, softmax
from kvshelf.training.gates.lessons import Lesson, Observed, self_answered
from kvshelf.training.gates.trainer import Objective, rank_correlation


@dataclass(eq=False)
class Lookahead(Objective):
    """The loss is the KL from the attention of the model's own answers to that of the learned rows, the mean over
    layers and heads. A step goes back through these rows alone, as the document's keys and values do not depend on
    them."""

    lesson_kind: ClassVar[Mapping[str, str]] = {"answers": "own"}

    def begin(self, lesson: Lesson) -> None:  # noqa: ARG002
        spread = float(self.engine.model.get_input_embeddings().weight.detach().float().std())
        for name, shape in self.policy.shapes(self.width, self.engine.preparer.geometry).items():
            scale = spread if name == "soft" else 0.0 if name.endswith(".b") else 1 / math.sqrt(shape[1])
            self.state[name] = (scale * torch.randn(shape)).requires_grad_()

    def learn(self, lesson: Lesson) -> tuple[float, str]:
        observed = self_answered(self.engine, lesson)
        labels = self.labels(observed)
        with torch.enable_grad():
            found = self._attention(observed)
            losses = [divergence(labels[layer], found[layer]) for layer in found]
            loss = torch.stack(losses).mean()
            loss.backward(inputs=list(self.state.values()))  # type: ignore[no-untyped-call]
        written = canonical_json([probe.token_ids for probe in observed.passes])
        return loss.item(), digest("kvshelf.gates.lesson", observed.job.identity.document, written)

    def agreement(self, lesson: Lesson) -> float:
        observed = self_answered(self.engine, lesson)
        labels = self.labels(observed)
        with torch.no_grad():
            found = self._attention(observed)
        return rank_correlation(torch.stack(list(found.values())), torch.stack([labels[layer] for layer in found]))

    def labels(self, observed: Observed) -> dict[int, Tensor]:
        """What answers attend to: the mean weight of all rows that write one, `[q_heads, N]`, by layer."""
        found: dict[int, Tensor] = {}

        def take(layer: LayerView) -> None:
            of_heads = [observed.weights(layer, head).mean(dim=1) for head in range(layer.kv_heads)]
            found[layer.layer_idx] = torch.cat(of_heads).cpu()

        observed.observe(self.engine, take)
        return found

    def _attention(self, observed: Observed) -> dict[int, Tensor]:
        """What the learned rows attend to: their mean weight, `[q_heads, N]`, by layer."""
        document = observed.job.document
        found: dict[int, Tensor] = {}

        def attend(layer: int, logits: Tensor) -> Tensor:
            weights = softmax(layer, logits)
            found[layer] = weights[..., : document.num_tokens].mean(dim=1).cpu()
            return weights

        read, learned = ReadBehind.of(self.engine, document.token_ids), len(self.state["soft"])
        with soft_tokens(self.engine.model, Soft(self.state, slice(0, learned))):
            read.logits(ProbePass((0,) * learned, document.end), 1, attend)
        return found


def divergence(label: Tensor, found: Tensor) -> Tensor:
    """KL(label || found) of weights `[q_heads, N]`, each made to add up to 1 over the document; the mean of the
    heads."""
    least = torch.finfo(found.dtype).tiny
    wanted, made = (each / each.sum(dim=1, keepdim=True).clamp_min(least) for each in (label, found))
    return (wanted * (wanted.clamp_min(least).log() - made.clamp_min(least).log())).sum(dim=1).mean()
