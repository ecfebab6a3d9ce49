"""Gates that learn from predictions: with the gated cache the model should predict as with the full one. Those of
`trimkv`, `make_each_token_count` and `attention_gate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import torch
from torch import Tensor

from kvshelf.methods.policies.gate_file import own_tensors
from kvshelf.methods.policies.gates.base import TokenGate, gate_inputs
from kvshelf.methods.policies.view import LayerView
from kvshelf.training.gates.importance import fit_inputs, fresh
from kvshelf.training.gates.lessons import Lesson, Observed, answered, logarithm
from kvshelf.training.gates.read_document import Attend, ReadDocument
from kvshelf.training.gates.trainer import Objective, rank_correlation

SHARE: Final = 0.25
"""The part of a document's tokens that gates may keep."""
_BEGIN: Final = {"decay": 10.0, "global": 18.0, "flag": 2.0}
"""The bias with which gates begin: all is kept (TRIM-KV, DBTrimKV)."""
_CAPACITY: Final = 1.0
_QUESTIONS: Final = 3
"""Questions of a lesson: each takes two passes, one of them with gradients."""


@dataclass(frozen=True, eq=False)
class _Taught:
    """A lesson for gates. rows: their inputs `[N, inputs]`, and importance: what answers attend to, `[kv_heads, N]`, in
    each layer that policies reduce, by its number in the model."""

    observed: Observed
    rows: Mapping[int, Tensor]
    importance: Mapping[int, Tensor]


@dataclass(eq=False)
class Distilled(Objective):
    """The loss is the KL of predictions of answers, and what the gates leave beyond `SHARE`."""

    policy: type[TokenGate]
    rate: ClassVar[float] = 5e-3

    def begin(self, lesson: Lesson) -> None:
        self.state = fresh(self.policy, self.engine, self.width)
        for name, tensor in self.state.items():
            if name.endswith("bias"):
                tensor.data.fill_(_BEGIN[self.policy.family])
        answered(self.engine, lesson).observe(self.engine, lambda layer: fit_inputs(self.state, layer))

    def learn(self, lesson: Lesson) -> tuple[float, str]:
        taught = self._taught(lesson)
        document = ReadDocument.of(self.engine, taught.observed.job.document.token_ids)
        with torch.enable_grad():
            outputs = self._outputs(taught)
            loss = _CAPACITY * excess(self.policy.family, list(outputs.values()))
            attend = gating(self.policy.family, outputs, taught.observed.job.document.protected_prefix)
            passes = list(zip(taught.observed.passes, taught.observed.answering, strict=True))
            for probe, rows in passes:
                with torch.no_grad():
                    full = document.logits(probe, rows).log_softmax(dim=-1)
                gated = document.logits(probe, rows, attend).log_softmax(dim=-1)
                loss = loss + (full.exp() * (full - gated)).sum(dim=-1).mean() / len(passes)
            # Of the gates alone: gradients of the model's weights would be as large as these.
            loss.backward(inputs=[t for t in self.state.values() if t.requires_grad])  # type: ignore[no-untyped-call]
        return loss.item(), taught.observed.job.identity.document

    def agreement(self, lesson: Lesson) -> float:
        """With what answers attend to."""
        taught = self._taught(lesson)
        scores = [kept(self.policy.family, outputs.detach())[:, -1] for outputs in self._outputs(taught).values()]
        labels = [logarithm(weights) for weights in taught.importance.values()]
        return rank_correlation(torch.stack(scores), torch.stack(labels))

    def _taught(self, lesson: Lesson) -> _Taught:
        observed = answered(self.engine, replace(lesson, questions=lesson.questions[:_QUESTIONS]))
        rows, importance = {}, {}

        def take(layer: LayerView) -> None:
            rows[layer.layer_idx] = torch.cat(list(gate_inputs(layer)))
            importance[layer.layer_idx] = observed.importance(layer).cpu()

        observed.observe(self.engine, take)
        return _Taught(observed, rows, importance)

    def _outputs(self, taught: _Taught) -> dict[int, Tensor]:
        """The outputs of each layer's gate for the document: `[kv_heads, N]`, by the layer's number in the model."""
        return {
            layer: self.policy.gated(own_tensors(self.state, place), rows.cpu()).T
            for place, (layer, rows) in enumerate(taught.rows.items())
        }


def kept(family: str, outputs: Tensor, rows: int = 1) -> Tensor:
    """The logarithm of the part of each token that each row behind a document sees: `[kv_heads, rows, N]` of outputs
    `[kv_heads, N]`. With decay it is (t - p) log beta, with flags the logarithm of the probability."""
    logarithms = torch.nn.functional.logsigmoid(outputs).unsqueeze(1)
    if family == "flag":
        return logarithms.expand(-1, rows, -1)
    tokens = outputs.shape[1]
    ages = torch.arange(tokens, tokens + rows).unsqueeze(1) - torch.arange(tokens)  # [rows, N]
    return logarithms * ages


def excess(family: str, outputs: list[Tensor]) -> Tensor:
    """What gates keep beyond `SHARE`, as a part of all tokens: with decay the mean excess of the heads, with global the
    excess of the whole cache, both at least 0; with flags the distance of the mean probability."""
    shares = torch.stack([kept(family, of_layer).exp().mean(dim=(1, 2)) for of_layer in outputs])  # [layers, kv_heads]
    if family == "flag":
        return (shares.mean() - SHARE).abs()
    if family == "global":
        return (shares.mean() - SHARE).clamp_min(0)
    return (shares - SHARE).clamp_min(0).mean()


def gating(family: str, outputs: Mapping[int, Tensor], protected: int) -> Attend:
    """Attention under gates: the outputs of a layer, `[kv_heads, N]`, change the weights of the document's tokens but
    for the first `protected` ones."""

    def attend(layer: int, logits: Tensor) -> Tensor:
        if layer not in outputs:
            return logits.softmax(dim=-1)
        heads, rows, _ = logits.shape
        factors = kept(family, outputs[layer], rows)  # [kv_heads, rows, N]
        if family == "flag":
            soft = factors.exp()
            # One or nothing, with the gradient of the probability.
            factors = (soft >= 0.5).float() + soft - soft.detach()
        free = torch.arange(factors.shape[2]) >= protected
        factors = torch.where(free, factors, 1.0 if family == "flag" else 0.0)
        factors = factors.repeat_interleave(heads // len(factors), dim=0).to(logits.device)
        columns = logits.shape[2] - factors.shape[2]
        if family != "flag":
            return (logits + torch.nn.functional.pad(factors, (0, columns))).softmax(dim=-1)
        weights = logits.softmax(dim=-1) * torch.nn.functional.pad(factors, (0, columns), value=1.0)
        return weights / weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)

    return attend
