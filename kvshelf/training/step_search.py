"""Finds the step of a model for the codec `klt`: the coarsest at which the predictions on some `ProbedText`s are still
those of the full cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvshelf.artifact.codecs import Codec
from kvshelf.artifact.coder import Coder
from kvshelf.training.probed_text import ProbedText

if TYPE_CHECKING:
    from kvshelf.engine.engine import Engine

LOSSLESS: Final = 0.0035
"""Nats of KL that count as no loss: at 0.0029 SmolLM2 lost 2 of 28 right answers on real documents. Half of it costs an
eighth more bytes, and the number of lost answers no longer follows it (docs/internals/policies.md)."""

QUARTERS: Final = 19
"""The most quarters of an octave by which the step may be finer than the codec's own."""

TRIES: Final = QUARTERS.bit_length()


def coarsest(engine: Engine, coder: Coder, texts: Sequence[ProbedText], report: Callable[[int], None]) -> int:
    """The quarters of an octave by which the codec's own step must be finer, from 0 to `QUARTERS`. report: called with
    the number of steps tried, `TRIES` in the end."""
    exact = [text.predictions(engine, text.cache) for text in texts]

    def loss(finer: int) -> float:
        codec = f"klt:step={Codec.step * 2 ** (-finer / 4):.4f}"
        total = 0.0
        for text, before in zip(texts, exact, strict=True):
            coded = text.cache.encoded(codec, coder).decoded(coder).to(engine.passes.devices.layers)
            changed = replace(text.cache, layers=coded.layers)  # under no codec: the engine knows no such transforms
            total += text.divergence(before, text.predictions(engine, changed))
        return total / len(texts)

    low, high, tried = 0, QUARTERS, 0
    while low < high:
        middle = (low + high) // 2
        if loss(middle) <= LOSSLESS:
            high = middle
        else:
            low = middle + 1
        tried += 1
        report(tried)
    report(TRIES)
    return low
