"""DapQ: pseudo queries at the positions where the answer will be written (Tian et al., 2026, arXiv 2603.11564)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import ClassVar

from torch import Tensor

from kvshelf.kernels.window_scores import pooled
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.base import ScoringPolicy, encoded, pooling_kernel
from kvshelf.methods.policies.view import DocumentView, LayerView, ProbePass


@dataclass(frozen=True)
class DapQ(ScoringPolicy):
    """A reconstruction from the paper's abstract and a summary of its sections: keep what pseudo queries attend to,
    queries placed at the positions of later questions and answers.

    The paper's idea: a query's position says more about what it attends to than its content. `pseudo` tokens of any
    text run once behind the document, at the positions that the answer will have, from N + `offset` on. Their queries
    score each document token by the weight that they give it. Ablations find 32 to 64 tokens best, of any text.

    The summary (qwen-long's of 2603.11564v1) does not say how weights are joined: here by their mean over rows and GQA
    group, pooled over neighbours (average). Departures: the document is judged by itself, not with the question. No
    token is kept for standing at its end.

    The text is the first of these that there is: the expected questions, `probe`, the chat template's text before the
    answer. An empty `probe`, or no template, repeats the document's own last tokens. Questions are not repeated; if
    they differ in length, the last rows of each count, as many as the shortest has.
    """

    name: ClassVar[str] = "dapq"
    source: ClassVar[str] = "DapQ, arXiv 2603.11564"
    advice: ClassVar[str] = "as a cheap step up from snapkv when the questions are unknown."
    needs: ClassVar[Needs] = Needs.QUERIES
    takes_questions: ClassVar[bool] = True

    pseudo: int = parameter(32, "pseudo tokens", minimum=1, maximum=4096)
    offset: int = parameter(0, "tokens between the document and the first pseudo token", minimum=0)
    probe: str | None = parameter(None, "text of the pseudo tokens; null: the chat template's suffix")
    kernel: int = pooling_kernel(5)

    def probe_passes(self, document: DocumentView) -> Sequence[ProbePass]:
        start = document.end + self.offset
        if document.questions:
            return [ProbePass(ids, start) for ids in document.questions]
        ids = document.suffix if self.probe is None else encoded(self.probe, document)
        text = ids or document.token_ids[-self.pseudo :]
        return [ProbePass(tuple(islice(cycle(text), self.pseudo)), start)]

    def probe_text(self, document: DocumentView) -> str:
        if document.questions or document.text is None:
            return ""
        return document.text.decode(document.suffix) if self.probe is None else self.probe

    def score(self, layer: LayerView) -> Tensor:
        rows = min(probed.queries.shape[1] for probed in layer.probes)
        return pooled(layer.window(rows).mean(), self.kernel)
