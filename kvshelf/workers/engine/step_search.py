"""Finds how coarse the codec `klt` may code the keys and the values of each layer: the multipliers of `steps=kl`.

Each tensor alone is coded at a coarse step, and the KL of the next-token predictions is measured. KL grows with the
square of a step, and bits fall with its logarithm. So bytes are spent best where every tensor has the same slope: a
step in inverse proportion to the root of its KL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kvshelf.store.artifact.cache import CompressedCache
from kvshelf.store.artifact.coder import Coder
from kvshelf.store.artifact.transforms import CAP, KINDS, Kind, RowTransform, Transforms
from kvshelf.workers.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.workers.policies.kvcues import ANSWER, ASKED
from kvshelf.workers.policies.view import DocumentView

if TYPE_CHECKING:
    from kvshelf.workers.engine.engine import Engine

_COARSE: Final = "klt:step=4"
MEASURED: Final = 4
"""Texts that are measured on. On kvshelf-tiny, twelve change no multiplier by more than 1.2 %."""
_CUES: Final = 32
_NEXT: Final = 128
"""Cues of each text, and tokens of its end that are predicted. Plain text alone hardly reads what is far away."""


def multiplied(
    engine: Engine,
    transforms: Transforms,
    documents: Sequence[Sequence[int]],
    *,
    report: Callable[[int], None] = lambda _: None,
) -> list[dict[Kind, RowTransform]]:
    """The layers of `transforms` with multipliers, from some documents, given as token ids.

    Their geometric mean, weighted by channels, is 1: a step then takes about the bytes that it takes under
    `steps=even`. report: called with the number of documents measured on, at most `MEASURED`.
    """
    rope = engine.rope_to_undo()
    coder = Coder(transforms, rope.rotate, rope.unrotate)
    slopes = torch.zeros(len(transforms.layers), len(KINDS), dtype=torch.float64)
    for number, ids in enumerate(documents[:MEASURED]):
        asked = _Asked.about(engine, ids)
        if asked is not None:
            slopes += _divergences(engine, coder, asked)
        report(number + 1)
    channels = torch.tensor([[layer[kind].mean.numel() for kind in KINDS] for layer in transforms.layers])
    factors = equal_slopes(slopes / channels, channels).tolist()
    return [
        {kind: replace(layer[kind], multiplier=factor) for kind, factor in zip(KINDS, found, strict=True)}
        for layer, found in zip(transforms.layers, factors, strict=True)
    ]


def equal_slopes(slopes: Tensor, channels: Tensor) -> Tensor:
    """The multiplier of each tensor, from the KL per channel at one step. The largest is at most `CAP` times the
    smallest, and their geometric mean, weighted by `channels`, is 1."""
    largest = slopes.max()
    ratios = (largest / slopes.clamp_min(largest / CAP**2)).sqrt() if largest > 0 else torch.ones_like(slopes)
    return ratios / math.exp(float((channels * ratios.log()).sum() / channels.sum()))


@dataclass(frozen=True, eq=False)
class _Asked:
    """A document, and one pass behind it: the tokens that follow the document, then cues taken from it.

    predicting: the tokens of the pass whose predictions count, in two parts, which count alike.
    """

    cache: CompressedCache
    token_ids: tuple[int, ...]
    predicting: tuple[range, list[int]]

    @classmethod
    def about(cls, engine: Engine, ids: Sequence[int]) -> _Asked | None:
        """None for a text too short to have a cue."""
        ids = ids[: engine.max_tokens // 2]  # leaves room for the pass
        end = len(ids) - min(_NEXT, len(ids) // 4)
        read = list(ids[:end])
        job = engine.prepare(read if engine.text is None else engine.text.decode(read), policy="full")
        starts = _starts(job.document)
        if not starts:
            return None
        asked, answers = list(ids[end:]), list[int]()
        following = range(len(asked) - 1)
        for start in starts:
            answer = start + ASKED
            asked += job.document.cue(slice(start, answer), slice(answer, answer + ANSWER)).token_ids
            answers += range(len(asked) - 1 - ANSWER, len(asked) - 1)
        return cls(engine.run(job).cache, tuple(asked), (following, answers))

    def predictions(self, engine: Engine, cache: CompressedCache) -> tuple[Tensor, ...]:
        """Log-probabilities `[predicted, vocabulary]` fp32 of each part."""
        places = [place for part in self.predicting for place in part]
        with torch.no_grad(), engine.attached(cache) as past:
            ids = torch.tensor([self.token_ids], device=engine.passes.devices.inputs)
            logits: Tensor = engine.model(ids, logits_to_keep=places, **{CACHE_ARGUMENT: past}).logits[0]
        return logits.float().log_softmax(dim=-1).split([len(part) for part in self.predicting])  # type: ignore[no-any-return, no-untyped-call]


def _starts(document: DocumentView) -> range:
    """Where the cues of a document begin."""
    first, last = document.protected_prefix, document.num_tokens - ASKED - ANSWER
    return range(first, last + 1, max(1, (last - first) // _CUES + 1))


def _divergences(engine: Engine, coder: Coder, asked: _Asked) -> Tensor:
    """KL from the exact cache to that with one coded tensor, `[layers, 2]` fp64: the mean of both parts' means."""
    cache = asked.cache
    exact = asked.predictions(engine, cache)
    coarse = cache.encoded(_COARSE, coder).decoded(coder).layers
    found = torch.zeros(len(coarse), len(KINDS), dtype=torch.float64)
    for index, layer in enumerate(coarse):
        for column, kind in enumerate(KINDS):
            layers = list(cache.layers)
            coded = getattr(layer, kind).to(getattr(layers[index], kind).device)  # decoded on the CPU
            layers[index] = replace(layers[index], **{kind: coded})
            changed = asked.predictions(engine, replace(cache, layers=tuple(layers)))
            found[index, column] = sum(map(_kl, exact, changed)) / len(exact)
    return found


def _kl(exact: Tensor, other: Tensor) -> float:
    return max(0.0, float((exact.exp() * (exact - other)).sum(dim=-1).mean()))
