"""Learned tokens and their additions to the model, as `lookaheadkv` runs them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvshelf.artifact.identity import canonical_json, digest
from kvshelf.engine.soft import Soft, soft_tokens
from kvshelf.methods.policies.view import LayerView, ProbePass
from kvshelf.training.gates.lessons import Lesson, Observed, self_answered
from kvshelf.training.gates.read_document import ReadDocument, softmax
from kvshelf.training.gates.trainer import Objective, rank_correlation


@dataclass(eq=False)
class Lookahead(Objective):
    """The loss is the KL from the attention of the model's own answers to that of the learned rows, the mean over
    layers and heads. A step goes back through these rows alone: the document's states do not depend on them."""

    def begin(self, lesson: Lesson) -> None:  # noqa: ARG002
        spread = float(self.engine.model.get_input_embeddings().weight.detach().float().std())
        for name, shape in self.policy.shapes(self.width, self.engine.preparer.geometry).items():
            scale = spread if name == "soft" else 0.0 if name.endswith(".b") else 1 / math.sqrt(shape[1])
            self.state[name] = (scale * torch.randn(shape)).requires_grad_()

    def learn(self, lesson: Lesson) -> tuple[float, str]:
        observed = self_answered(self.engine, lesson)
        labels = self.labels(observed)
        with torch.enable_grad():
            weights = self._attention(observed)
            loss = torch.stack([divergence(labels[layer], weights[layer]) for layer in weights]).mean()
            loss.backward(inputs=list(self.state.values()))  # type: ignore[no-untyped-call]
        passes = canonical_json([probe.token_ids for probe in observed.passes])
        return loss.item(), digest("kvshelf.gates.lesson", observed.job.identity.document, passes)

    def agreement(self, lesson: Lesson) -> float:
        observed = self_answered(self.engine, lesson)
        labels = self.labels(observed)
        with torch.no_grad():
            weights = self._attention(observed)
        return rank_correlation(torch.stack(list(weights.values())), torch.stack([labels[layer] for layer in weights]))

    def labels(self, observed: Observed) -> dict[int, Tensor]:
        """The mean weights of all rows that write an answer, `[q_heads, N]`, by layer."""
        labels: dict[int, Tensor] = {}

        def take(layer: LayerView) -> None:
            of_heads = [observed.weights(layer, head).mean(dim=1) for head in range(layer.kv_heads)]
            labels[layer.layer_idx] = torch.cat(of_heads).cpu()

        observed.observe(self.engine, take)
        return labels

    def _attention(self, observed: Observed) -> dict[int, Tensor]:
        """The mean weights of the learned rows, `[q_heads, N]`, by layer."""
        document = observed.job.document
        means: dict[int, Tensor] = {}

        def attend(layer: int, logits: Tensor) -> Tensor:
            weights = softmax(layer, logits)
            means[layer] = weights[..., : document.num_tokens].mean(dim=1).cpu()
            return weights

        read, learned = ReadDocument.of(self.engine, document.token_ids), len(self.state["soft"])
        with soft_tokens(self.engine.model, Soft(self.state, slice(0, learned))):
            read.logits(ProbePass((0,) * learned, document.end), 1, attend)
        return means


def divergence(label: Tensor, weights: Tensor) -> Tensor:
    """KL(label || weights) of weights `[q_heads, N]`, each scaled to a total of 1; the mean of the heads."""
    least = torch.finfo(weights.dtype).tiny
    p, q = (numbers / numbers.sum(dim=1, keepdim=True).clamp_min(least) for numbers in (label, weights))
    return (p * (p.clamp_min(least).log() - q.clamp_min(least).log())).sum(dim=1).mean()
