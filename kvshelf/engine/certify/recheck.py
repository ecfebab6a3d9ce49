"""Asking the full cache what a compressed one has answered: `Recheck`.

The document is prefilled once more under policy `full`. The tokens of the question and of the answer are then read
behind both caches, so that each predicts every token of the answer after the same ones. With p the probabilities
under the full cache and q those under the compressed one:

    the answer differs if, at a token where max p >= 0.5, argmax q is another token than argmax p
    kl = mean of KL(p || q) over the tokens of the answer, in nats

Where the full cache is itself unsure, two answers are as good as one. If the answer differs, the quality of the
compressed cache is measured anew, by all cues of its document: one answer is a suspicion, and 150 cues are a figure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvshelf.api import Quality
from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.engine import Engine
from kvshelf.engine.inputs.job import Job, Level
from kvshelf.engine.progress import Checkpoint
from kvshelf.model.devices import input_device

MOST_TOKENS: Final = 64
"""Tokens of an answer that are compared: their logits, of 150,000 tokens each, take 38 MB in fp32."""

_SURE: Final = 0.5
_TIE: Final = 1e-4
"""As in `kvshelf.engine.quality`: log-probabilities closer than this are equal."""


@dataclass(frozen=True)
class Rechecked:
    """How an answer compares with the full cache's. tokens: that were compared. quality: of the compressed cache,
    measured now; None if the answer does not differ, or if its document can have no cues."""

    tokens: int
    differs: bool
    kl: float
    quality: Quality | None = None


@dataclass(frozen=True)
class Recheck:
    """One answer to ask again. job: of the cache's whole document under policy `full`. query, answer: token ids as
    they were read and said behind the cache, at least one each."""

    job: Job
    cache: CompressedCache
    query: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.job.num_tokens

    def run(self, engine: Engine, *, checkpoint: Checkpoint | None = None) -> Rechecked:
        """Raises as `Engine.run_levels` does, and `PolicyUnsupported` where logits are not numbers."""
        compressor = engine.compressor
        full = compressor.prefill([Level(self.job)], checkpoint=checkpoint).compressions[0].cache
        right, own = (self._predicted(engine, cache) for cache in (full, self.cache))
        differs, kl = compared(right, own)
        quality = None
        if differs and (reference := compressor.reference(self.job, full)) is not None:
            quality = compressor.measure(self.cache, reference)
        return Rechecked(len(right), differs, kl, quality)

    def _predicted(self, engine: Engine, cache: CompressedCache) -> Tensor:
        """Log-probabilities of the tokens in the places of the answer's, behind a cache: `[tokens, vocabulary]`."""
        answer = self.answer[:MOST_TOKENS]
        ids = torch.tensor([[*self.query, *answer[:-1]]], device=input_device(engine.model))
        with torch.no_grad(), engine.attachments.passing(engine.attach(cache)) as past:
            rows = [
                engine.model(piece, logits_to_keep=len(answer), **{CACHE_ARGUMENT: past}).logits[0]
                for piece in past.pieces(ids)
            ]
        return torch.cat(rows)[-len(answer) :].float().log_softmax(dim=-1)


def compared(full: Tensor, other: Tensor) -> tuple[bool, float]:
    """Whether an answer differs, and its divergence, from log-probabilities `[tokens, vocabulary]` fp32 under the full
    cache and another one. Logits that are not numbers differ, by an infinite divergence."""
    kl = (full.exp() * (full - other)).sum(dim=-1).mean().item()
    if not math.isfinite(kl):
        return True, math.inf
    highest, tokens = full.max(dim=-1)
    lost = other.amax(dim=-1) - other.gather(-1, tokens[:, None])[:, 0] > _TIE
    return bool((lost & (highest >= math.log(_SURE))).any()), max(kl, 0.0)
