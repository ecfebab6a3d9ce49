"""Attention-Gate: a small attention says which tokens to keep (Zeng et al., 2024, arXiv 2410.12876)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from kvshelf.kernels.window_scores import window_attention
from kvshelf.methods.policies.gate_file import Family, Geometry, Shapes, Target
from kvshelf.methods.policies.gates.base import TokenGate, gate_inputs, gates_of, projected
from kvshelf.methods.policies.view import DocumentView, LayerView

_ROWS: Final = 256
"""Whose weights on all tokens read are in memory together."""


@dataclass(frozen=True)
class AttentionGate(TokenGate):
    """In part, as a budget takes the place of a threshold: keep the tokens to which a small attention over the document
    gives the highest probability of being kept.

    Before each layer one head of few channels attends causally over what the tokens have there, x, each channel in its
    own scale: with q = Wq x, k = Wk x and v = Wv x, the logit of keeping is W2 (v + softmax(q k / sqrt(d)) v) + b. In
    training a token counts where its probability is at least one half, by a straight-through estimate; the loss is the
    KL of predictions from those with the full cache, and the distance of the mean probability from a quarter.

    With `prefill` "chunked" the flags act while the document is read: what goes behind a chunk, no later token sees. A
    chunk's own tokens still do. The small attention is over all tokens read, dropped ones too, of which it keeps 2 *
    width numbers a layer.

    Departures: the authors' gate reads hidden states, and this one the token's query, key and value. The authors drop
    below a threshold, and a budget asks for the best of each head. Their flags act from a token's own layer on, and by
    default here the document is read whole. They train on text with the language model's own loss.
    """

    name: ClassVar[str] = "attention_gate"
    source: ClassVar[str] = "Attention-Gate, arXiv 2410.12876"
    advice: ClassVar[str] = "to compare with; its gates take the square of a document's length to read."
    family: ClassVar[Family] = "flag"
    target: ClassVar[Target] = "distill"

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
        """The notes of all layers, and rows of weights before and behind their softmax."""
        assert document.num_layers is not None, "of a model"
        numbers = 2 * gates_of(document).header.width * document.num_layers + 2 * min(_ROWS, self.chunk)
        return 4 * numbers * document.num_tokens

    def continued(self, gate: Mapping[str, Tensor], chunk: LayerView, note: Any) -> tuple[Tensor, Any]:
        """The note: what the small attention has of every token read, `[read, 2, width]`."""
        rows = torch.cat(list(gate_inputs(chunk)))
        queries, *own = (projected(gate, name, rows) for name in ("query", "key", "value"))
        seen = torch.stack(own, dim=1)
        seen = seen if note is None else torch.cat([note, seen])
        near, first = [], len(seen) - len(rows)
        for some in torch.split(queries, _ROWS):
            first += len(some)
            weights = window_attention(some[None], seen[:first, 0], queries.shape[1] ** -0.5)
            near.append(weights[0] @ seen[:first, 1])
        return (own[1] + torch.cat(near)) @ gate["down"].T + gate["bias"], seen
