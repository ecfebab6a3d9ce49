"""Finds the step of a model for the codec `klt`: the coarsest at which its predictions are still those of the full
cache, on texts that are asked about as in `asked`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvshelf.artifact.codecs import Codec
from kvshelf.artifact.coder import Coder
from kvshelf.training.asked import Asked

if TYPE_CHECKING:
    from kvshelf.engine.engine import Engine

LOSSLESS: Final = 0.0035
"""Nats of KL that are taken for no loss: at 0.0029 SmolLM2 lost 2 of 28 right answers on real documents. Half of it
costs an eighth more bytes, and how many are lost no longer follows it (docs/internals/policies.md)."""

QUARTERS: Final = 19
"""Quarters of an octave by which the step found may be finer than the codec's own."""

TRIES: Final = QUARTERS.bit_length()


def coarsest(engine: Engine, coder: Coder, texts: Sequence[Asked], report: Callable[[int], None]) -> int:
    """By how many quarters of an octave the codec's own step has to be made finer, from 0 to `QUARTERS`.

    report: called with the number of steps tried, `TRIES` in the end.
    """
    exact = [text.predictions(engine, text.cache) for text in texts]

    def loss(finer: int) -> float:
        codec = f"klt:step={Codec.step * 2 ** (-finer / 4):.4f}"
        total = 0.0
        for text, before in zip(texts, exact, strict=True):
            coded = text.cache.encoded(codec, coder).decoded(coder).to(engine.passes.devices.layers)
            changed = replace(text.cache, layers=coded.layers)  # under no codec: the engine knows no such transforms
            total += text.divergence(before, text.predictions(engine, changed))
        return total / len(texts)

    finest, found, tried = QUARTERS, 0, 0
    while found < finest:
        middle = (found + finest) // 2
        if loss(middle) <= LOSSLESS:
            finest = middle
        else:
            found = middle + 1
        tried += 1
        report(tried)
    report(TRIES)
    return found
