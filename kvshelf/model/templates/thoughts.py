"""The marks around thoughts in a model's chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self


@dataclass(frozen=True)
class Thoughts:
    """The marks of one template. headers: marks that may stand before an answer's text and are no part of it."""

    opening: str
    closing: str
    headers: tuple[str, ...] = ()

    @classmethod
    def of(cls, template: str) -> Self | None:
        """The marks of a chat template; None for one without thoughts."""
        for opening, closing, *headers in _KNOWN:
            # Some templates have only the end of the last one, to find thoughts in answers that are sent back.
            if closing in template and (opening in template or closing == "</think>"):
                return cls(opening, closing, tuple(headers))
        return None

    @property
    def texts(self) -> str:
        """All marks."""
        return "".join((self.opening, self.closing, *self.headers))


_KNOWN: Final = (
    (
        "<|channel|>analysis<|message|>",
        "<|end|>",
        "<|start|>assistant<|channel|>final<|message|>",
        "<|channel|>final<|message|>",
        "<|start|>assistant<|channel|>commentary<|message|>",
        "<|channel|>commentary<|message|>",
    ),  # gpt-oss, which may tell what it is about to do in its channel of calls
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>"),  # Command A
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),
    ("<think>", "</think>"),  # Qwen, DeepSeek, GLM, Nemotron, SmolLM3
)
