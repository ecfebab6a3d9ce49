"""The question and the last tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvshelf.methods.suffixes.base import PeriodicPolicy, Reduction, Suffix, ends


@dataclass(frozen=True)
class Window(PeriodicPolicy):
    """Keep the question and the most recent tokens of the answer; as many as the budget has room for.

    So SAGE-KV decodes (section 3: each new token enters the recent window, and the oldest leaves), and StreamingLLM
    behind its sinks. Here the document's entries stand before the window, and the question's are kept. It costs
    nothing but the moving of entries, and forgets what the answer said before the window.
    """

    name: ClassVar[str] = "window"
    source: ClassVar[str] = "SAGE-KV, arXiv 2503.08879; StreamingLLM, arXiv 2309.17453"
    advice: ClassVar[str] = "where the answer needs the document and its own last sentences; it is the fastest."

    def reduce(self, suffix: Suffix) -> Reduction:
        return Reduction(ends(suffix).expand(suffix.keys.shape[0], -1))
