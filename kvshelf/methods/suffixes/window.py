"""The question and the last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvshelf.artifact.identity import Identity
from kvshelf.methods.method import parameter
from kvshelf.methods.suffixes.base import PeriodicPolicy, Reduction, Suffix, ends


@dataclass(frozen=True)
class Window(PeriodicPolicy):
    """Keep the question and the most recent tokens of the answer; as many as the budget has room for.

    So SAGE-KV decodes (step 4: each new token enters the recent window, and the oldest leaves), and StreamingLLM behind
    its sinks. Under scope "cache" the document's last `leaving` entries are the first that leave; sinks and what the
    document's policy chose between them stay. Under scope "suffix" all of the document stands before the window. It
    costs nothing but the moving of entries, and forgets what the answer said before the window.

    Departures: the question stays unless `protect_question` is false, and takes its places in the window; a reduction
    after every 32nd token, not after each, unless `every` is 1.
    """

    name: ClassVar[str] = "window"
    source: ClassVar[str] = "SAGE-KV, arXiv 2503.08879; StreamingLLM, arXiv 2309.17453"
    advice: ClassVar[str] = "where the answer needs the document and its own last sentences; it is the fastest."

    of_tail: ClassVar[frozenset[str]] = frozenset({"leaving", "sink"})

    leaving: int | None = parameter(
        None, "entries of the document that may leave; null: the run of last tokens that every head kept", minimum=1
    )
    sink: int = parameter(4, "first tokens of the document, which never leave", minimum=0)

    def tail(self, positions: Sequence[Tensor], made: Identity, prefix: int) -> Sequence[int]:  # noqa: ARG002
        return list(map(self._leaving, positions))

    def _leaving(self, positions: Tensor) -> int:
        leaves = positions >= self.sink
        if self.leaving is not None:
            return min(int(leaves.sum()), self.leaving)
        # Within the run of last tokens, a position and its place differ by the same number.
        beyond = positions - torch.arange(len(positions), device=positions.device)
        return int((leaves & (beyond == beyond[-1:])).sum())

    def reduce(self, suffix: Suffix) -> Reduction:
        return Reduction(ends(suffix).expand(suffix.keys.shape[0], -1))
