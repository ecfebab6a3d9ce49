"""Attention-Gate: a small attention says which tokens to keep (Zeng et al., 2024, arXiv 2410.12876)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from kvshelf.kernels.window_scores import window_attention
from kvshelf.methods.method import parameter
from kvshelf.methods.policies.budgets import Budget, LayerBudget
from kvshelf.methods.policies.chunked import LayerPast
from kvshelf.methods.policies.gate_file import Family, Geometry, Shapes, Target
from kvshelf.methods.policies.gates.base import TokenGate, gate_inputs, gates_of, projected
from kvshelf.methods.policies.view import DocumentView, LayerView

_ROWS: Final = 256
"""Rows whose weights on all tokens read are in memory together."""

_MASK_BYTES: Final = 3 << 24
"""Of a block of rows of the mask of hidden tokens, in fp32 and in the dtype of the states, and of its parts."""


@dataclass(frozen=True)
class AttentionGate(TokenGate):
    """In part, as its gates learn by distillation: keep the tokens to which a small attention over the document gives
    the highest probability of being kept, or with `threshold` all those to which it gives as much.

    Before each layer one head of few channels attends causally over the inputs x of the tokens there, each channel in
    its own scale: with q = Wq x, k = Wk x and v = Wv x, the logit of keeping is W2 (v + softmax(q k / sqrt(d)) v) + b.
    In training a token counts where its probability is at least one half, by a straight-through estimate; the loss is
    the KL of predictions from those with the full cache, and the distance of the mean probability from a quarter.

    The paper's form is `threshold` 0.5 with `prefill` "chunked": then flags act while the document is read, each in the
    layer of its gate and before the attention there, and no token sees a dropped one before it. The flags decide how
    many entries of each head stay, so a budget is refused. By default a budget keeps the best of each head, and in
    chunks only later chunks do not see a dropped token. The small attention is over all tokens read, dropped ones too,
    and keeps 2 * width numbers of each.

    Departures: the authors' gate reads hidden states, and this one the token's query, key and value, which are made of
    them. A token sees itself, whatever its flag. They train on text with the language model's own loss.
    """

    name: ClassVar[str] = "attention_gate"
    source: ClassVar[str] = "Attention-Gate, arXiv 2410.12876"
    advice: ClassVar[str] = "to compare with; its gates take the square of a document's length to read."
    family: ClassVar[Family] = "flag"
    target: ClassVar[Target] = "distill"

    threshold: float | None = parameter(
        None, "least probability of a token that stays; null: as the budget decides", minimum=0, maximum=1, added=True
    )

    @property
    def sizes_itself(self) -> bool:
        return self.threshold is not None

    @property
    def ragged(self) -> bool:
        return self.threshold is not None

    @property
    def hides(self) -> bool:
        return self.threshold is not None

    def has_work(self, budget: Budget, num_tokens: int) -> bool:
        return self.threshold is not None or super().has_work(budget, num_tokens)

    def counts(self, layer: LayerView, scores: Tensor, protected: Tensor, budget: LayerBudget) -> Sequence[int]:  # noqa: ARG002
        if self.threshold is None:
            return budget.per_head
        return (protected | ~self._below(scores)).sum(dim=1).tolist()

    def shares(self, pasts: Sequence[LayerPast], budget: Budget) -> Sequence[Sequence[int]]:
        if self.threshold is None:
            return super().shares(pasts, budget)
        return [[len(head) - int(self._below(head).sum()) for head in past.importance] for past in pasts]

    def hidden(self, past: LayerPast, count: int) -> Tensor:
        return self._below(torch.stack([head[-count:] for head in past.importance]))

    def _below(self, logits: Tensor) -> Tensor:
        """Which probabilities are below the threshold. NaN is not, so that its entry stays and shows it."""
        assert self.threshold is not None
        return logits.sigmoid() < self.threshold

    @classmethod
    def of_layer(cls, width: int, geometry: Geometry) -> Shapes:
        shapes = dict(super().of_layer(width, geometry))
        up = shapes.pop("up")
        return shapes | {"query": up, "key": up, "value": up}

    @classmethod
    def outputs(cls, gate: Mapping[str, Tensor], layer: LayerView) -> Tensor:
        return cls.gated(gate, torch.cat(list(gate_inputs(layer))))  # each token sees all before it

    @classmethod
    def gated(cls, gate: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        queries, keys, values = (projected(gate, name, rows) for name in ("query", "key", "value"))
        near = torch.nn.functional.scaled_dot_product_attention(
            queries[None, None], keys[None, None], values[None, None], is_causal=True
        )
        return (values + near[0, 0]) @ gate["down"].T + gate["bias"]

    def own_bytes(self, document: DocumentView) -> int:
        """The notes of all layers, rows of weights before and behind their softmax, and the mask of hidden tokens."""
        assert document.num_layers is not None, "of a model"
        numbers = 2 * gates_of(document).header.width * document.num_layers + 2 * min(_ROWS, self.chunk)
        return 4 * numbers * document.num_tokens + (_MASK_BYTES if self.hides else 0)

    def continued(self, gate: Mapping[str, Tensor], chunk: LayerView, note: Any) -> tuple[Tensor, Any]:
        """The note: the small attention's keys and values of every token read, `[read, 2, width]`."""
        rows = torch.cat(list(gate_inputs(chunk)))
        queries, keys, values = (projected(gate, name, rows) for name in ("query", "key", "value"))
        states = torch.stack([keys, values], dim=1)
        states = states if note is None else torch.cat([note, states])
        near, end = [], len(states) - len(rows)
        for block in torch.split(queries, _ROWS):
            end += len(block)
            weights = window_attention(block[None], states[:end, 0], queries.shape[1] ** -0.5)
            near.append(weights[0] @ states[:end, 1])
        return (values + torch.cat(near)) @ gate["down"].T + gate["bias"], states
