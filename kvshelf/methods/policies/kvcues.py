"""KVcues: what the model reads to repeat the document, and what it reads to answer cues taken from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvshelf.kernels.window_scores import pass_scores
from kvshelf.methods.method import parameter
from kvshelf.methods.policies.kvzip import KVzip
from kvshelf.methods.policies.view import CUE_ANSWER, CUE_ASKED, CUE_EVERY, DocumentView, LayerView, ProbePass


@dataclass(frozen=True)
class KVcues(KVzip):
    """Keep what the model attends to while it repeats the document, or while it answers cues taken from the document.

    While the model repeats, it finds each next token by the tokens just before it. While it answers, it finds a value
    by a name. So the entries that questions read can have low scores under `kvzip`. A cue is six tokens of the
    document, what the chat template writes before an answer, and the next four tokens. A cue starts every `every`
    tokens. Each cue is a pass of its own behind the whole document, and sees no other cue. An entry's score is the
    larger of its `kvzip` score and the largest weight that any row of any cue, of any head of the GQA group, gives it
    in a softmax over the document and the cue.

    Not from a paper. The forward pass has about 2 N tokens more than that of `kvzip`. `quality` has other cues.
    """

    name: ClassVar[str] = "kvcues"
    source: ClassVar[str] = "KVzip, arXiv 2505.23416, and cues (docs/internals/policies.md)"
    advice: ClassVar[str] = (
        "for the smallest caches that still answer: keeps what questions read, for up to ten times the prefill."
    )

    prefill: str = field(default="whole", init=False)  # cues are asked of the whole document
    every: int = parameter(CUE_EVERY, "document tokens from one cue to the next", minimum=1)

    def probe_passes(self, document: DocumentView) -> Sequence[ProbePass]:
        cues = (
            (slice(start, end := start + CUE_ASKED), slice(end, end + CUE_ANSWER)) for start in self._cues(document)
        )
        return [*super().probe_passes(document), *(document.cue(*cue) for cue in cues)]

    def score(self, layer: LayerView) -> Tensor:
        scores, cues = super().score(layer), len(self._cues(layer.document))
        if not cues:
            return scores
        probes = layer.probes[-cues:]
        queries = torch.stack([probed.queries for probed in probes])  # [cues, q_heads, T, D]
        own_keys = torch.stack([probed.keys for probed in probes])  # [cues, kv_heads, T, D]
        return torch.maximum(scores, pass_scores(queries, layer.keys, layer.scaling, own_keys))

    def _cues(self, document: DocumentView) -> range:
        """The starts of the cues."""
        return range(document.protected_prefix, document.num_tokens - CUE_ASKED - CUE_ANSWER + 1, self.every)
