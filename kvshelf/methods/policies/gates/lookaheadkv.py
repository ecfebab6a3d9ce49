"""LookaheadKV: learned tokens behind the document look where an answer would (Ahn et al., 2026, arXiv 2603.10899)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from torch import Tensor

from kvshelf.kernels.window_scores import pooled
from kvshelf.methods.method import Needs
from kvshelf.methods.policies.base import ScoringPolicy, pooling_kernel
from kvshelf.methods.policies.gate_file import Family, Geometry, Shapes, Target
from kvshelf.methods.policies.gates.base import GatePolicy, gates_of
from kvshelf.methods.policies.view import DocumentView, LayerView, ProbePass

TOKENS: Final = 32
"""Learned tokens."""


@dataclass(frozen=True)
class LookaheadKV(GatePolicy, ScoringPolicy):
    """Keep what learned tokens behind the document attend to, which were trained to look where answers look.

    32 embeddings stand in place of tokens. For their rows alone each linear layer of the model has a low-rank addition
    (LoRA, alpha 32); the document's keys and values are those without it. The score of a token is the mean weight of
    these rows, over the GQA group, pooled over neighbours (average). The training loss is the KL from the mean
    attention of the rows that write an answer to that of the learned rows, both over the document, in each query head.
    The model writes these answers itself, greedily, to the questions of the training documents; the row that writes the
    token which ends an answer counts as the others do.

    Departures: an answer of the training has 128 tokens at most. The document's last tokens may go. The gates of
    kvshelf-tiny, and so the measured figures, are of a training on the answers that its documents give.
    """

    name: ClassVar[str] = "lookaheadkv"
    source: ClassVar[str] = "LookaheadKV, arXiv 2603.10899"
    advice: ClassVar[str] = "for a model whose gates were trained on questions like those to come."
    family: ClassVar[Family] = "probe"
    target: ClassVar[Target] = "answers"
    needs: ClassVar[Needs] = Needs.QUERIES | Needs.GATES

    kernel: int = pooling_kernel(5)

    def probe_passes(self, document: DocumentView) -> Sequence[ProbePass]:
        return [ProbePass((0,) * TOKENS, document.end, gates_of(document))]

    @classmethod
    def shapes(cls, width: int, geometry: Geometry) -> Shapes:
        shapes: dict[str, tuple[int, ...]] = {"soft": (TOKENS, geometry.hidden)}
        for layer in range(geometry.layers):
            last = layer == geometry.layers - 1
            for module, (into, out) in adapted(geometry, last=last).items():
                shapes[f"{layer}.{module}.a"] = (width, into)
                shapes[f"{layer}.{module}.b"] = (out, width)
        return shapes

    def score(self, layer: LayerView) -> Tensor:
        return pooled(layer.window(TOKENS).mean(), self.kernel)


def adapted(geometry: Geometry, *, last: bool) -> dict[str, tuple[int, int]]:
    """The linear layers of a decoder layer that have an addition, with their numbers of inputs and outputs. In the last
    layer only the attention's weights need one."""
    hidden, queries = geometry.hidden, geometry.q_heads * geometry.head
    keys = geometry.kv_heads * geometry.head
    for_weights = {"self_attn.q_proj": (hidden, queries), "self_attn.k_proj": (hidden, keys)}
    if last:
        return for_weights
    return for_weights | {
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, geometry.intermediate),
        "mlp.up_proj": (hidden, geometry.intermediate),
        "mlp.down_proj": (geometry.intermediate, hidden),
    }
