"""SnapKV: what the end of the prompt attends to (Li et al., 2024, arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvshelf.methods.method import parameter
from kvshelf.methods.policies.base import pooling_kernel
from kvshelf.methods.policies.chunked import ChunkedTail
from kvshelf.methods.policies.view import LayerView


@dataclass(frozen=True)
class SnapKV(ChunkedTail):
    """Keep what the end of the prompt attends to most, pooled over neighbours, and the document's own last tokens.

    Listing 1 of the paper, with two departures that kvpress also makes: the mean over the window's rows instead of the
    sum (the same order), and the mean over a GQA group, taken before pooling, so that KV heads are not repeated. The
    paper's prompt ends with the question; `ProbedPolicy` says what ends it here. With `prefill` "chunked", which is not
    in the paper, the last `window` tokens of each chunk observe all entries, and nothing behind the chunk does.
    """

    name: ClassVar[str] = "snapkv"
    source: ClassVar[str] = "SnapKV, arXiv 2404.14469"
    advice: ClassVar[str] = (
        "when you know the questions (expected_questions); without them it looks where the template's last words look."
    )
    version: ClassVar[int] = 2

    kernel: int = pooling_kernel(5)
    pooling: str = parameter("avg", "how neighbours are pooled", choices=("avg", "max"))

    def score(self, layer: LayerView) -> Tensor:
        window = layer.window(self.window)
        return window.pad(window.mean(self.kernel, self.pooling))
