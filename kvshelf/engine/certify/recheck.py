"""Asking the full cache what compressed ones have answered, and measuring quality anew: `Recheck`, `Remeasure`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvshelf.api import Quality
from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.engine import Engine
from kvshelf.engine.inputs.job import Job, Level
from kvshelf.engine.progress import Checkpoint, nothing
from kvshelf.errors import DocumentTooLong, PolicyUnsupported
from kvshelf.model.devices import input_device
from kvshelf.model.text import EncodedDocument

MOST_TOKENS: Final = 64
"""Tokens of an answer that are compared: their logits, of 150,000 tokens each, take 38 MB in fp32."""

_SURE: Final = 0.5
_TIE: Final = 1e-4
"""As in `kvshelf.engine.quality`: log-probabilities closer than this are equal."""
_MOST_NATS: Final = 100.0
"""A divergence is stored as JSON and summed in a metric, which have no infinite numbers."""


@dataclass(frozen=True)
class Rechecked:
    """How an answer compares with the full cache's. tokens: that were compared. quality: of the compressed cache,
    measured now; None for an answer that does not differ or is of several, and for want of cues or numbers."""

    tokens: int
    differs: bool
    kl: float
    quality: Quality | None = None


@dataclass(frozen=True)
class Recheck:
    """One answer to ask again. Its tokens and those of the question are read behind the compressed caches and behind
    the full one, for which the document is prefilled once more: each predicts every token of the answer; see
    `compared`. If the answer of one cache differs, its quality is measured: one answer is only a suspicion.

    job: of the whole document of the caches (`joint_job` of several) under policy `full`. query, answer: their token
    ids, at least one each. floor: of one cache, measuring ends where it is out of reach; None: none is measured.
    """

    job: Job
    caches: tuple[CompressedCache, ...]
    query: tuple[int, ...]
    answer: tuple[int, ...]
    floor: float | None = None

    @property
    def num_tokens(self) -> int:
        return self.job.num_tokens

    def run(self, engine: Engine, *, checkpoint: Checkpoint = nothing) -> Rechecked:
        """`checkpoint` is called between layers of the prefill, and behind each pass of those that follow. Raises as
        `Engine.run_levels` does, and `PolicyUnsupported` where the full cache's logits are not numbers."""
        compressor = engine.compressor
        full = compressor.prefill([Level(self.job)], checkpoint=checkpoint).compressions[0].cache
        right, other = (self._predicted(engine, caches, checkpoint) for caches in ((full,), self.caches))
        if right.isnan().any():
            raise PolicyUnsupported(
                f"behind this document the logits of {engine.name!r} are not numbers, and no answer compares with that",
                param="model",
            )
        differs, kl = compared(right, other)
        quality = None
        if differs and self.floor is not None and not other.isnan().any():
            (cache,) = self.caches
            reference = compressor.reference(self.job, full, checkpoint)
            if reference is not None:
                quality = compressor.measure(cache, reference, self.floor, checkpoint)
        return Rechecked(len(right), differs, kl, quality)

    def _predicted(self, engine: Engine, caches: Sequence[CompressedCache], checkpoint: Checkpoint) -> Tensor:
        """Log-probabilities of the tokens in the places of the answer's, behind caches: `[tokens, vocabulary]`."""
        answer = self.answer[:MOST_TOKENS]
        ids = torch.tensor([[*self.query, *answer[:-1]]], device=input_device(engine.model))
        document = engine.joined([engine.attach(cache) for cache in caches])
        with torch.no_grad(), engine.attachments.passing(document) as past:
            rows = [
                engine.model(piece, logits_to_keep=len(answer), **{CACHE_ARGUMENT: past}).logits[0]
                for piece in past.pieces(ids)
            ]
        checkpoint()
        return torch.cat(rows)[-len(answer) :].float().log_softmax(dim=-1)


def require_joint(engine: Engine, num_tokens: int, behind: int) -> None:
    """Raises `DocumentTooLong` where documents of so many tokens together, and those that are read behind them, are
    more than the model's longest sequence: that each fits alone, as the answer's did, says nothing of their sum."""
    if num_tokens + behind > (longest := engine.facts.longest(num_tokens)):
        raise DocumentTooLong(
            f"the documents have {num_tokens} tokens together, and {behind} are read behind them: more than the "
            f"{longest} that {engine.name!r} takes in one prefill; ask fewer caches, or shorter ones",
            param="cache_ids",
        )


def joint_job(engine: Engine, jobs: Sequence[Job], behind: int) -> Job:
    """One prefill of several documents behind each other: what the template writes before the later ones is left out.
    jobs: under policy `full`. behind: tokens after them. Raises `PolicyUnsupported` for images, `DocumentTooLong`."""
    if any(job.images for job in jobs):
        raise PolicyUnsupported("documents with images are not prefilled behind each other", param="cache_ids")
    first, *later = (job.document for job in jobs)
    ids = list(first.token_ids)
    for document in later:
        ids += document.token_ids[document.protected_prefix :]
    identity = jobs[0].identity
    require_joint(engine, len(ids), behind)
    whole = EncodedDocument(ids, first.protected_prefix, identity.layout, identity.boundary)
    return engine.prepare(engine.encode_document(whole), policy="full")


@dataclass(frozen=True)
class Remeasure:
    """The quality of a cache under another codec than the one it was measured under. job: as of `Recheck`."""

    job: Job
    cache: CompressedCache

    @property
    def num_tokens(self) -> int:
        return self.job.num_tokens

    def run(self, engine: Engine, *, checkpoint: Checkpoint = nothing) -> Quality | None:
        """None where the document can have no cues. `checkpoint` and errors as of `Recheck.run`."""
        compressor = engine.compressor
        full = compressor.prefill([Level(self.job)], checkpoint=checkpoint).compressions[0].cache
        reference = compressor.reference(self.job, full, checkpoint)
        return None if reference is None else compressor.measure(self.cache, reference, None, checkpoint)


def compared(full: Tensor, other: Tensor) -> tuple[bool, float]:
    """Whether an answer differs, and its divergence in nats, at most `_MOST_NATS`, from log-probabilities `[tokens,
    vocabulary]` fp32 under the full cache and another one. With p its probabilities and q the others,

        the answer differs if, at a token where max p >= 0.5, argmax q is another token than argmax p
        kl = mean of KL(p || q) over the tokens of the answer

    Where the full cache is itself unsure, two answers are as good as one. Logits of the other that are NaN differ.
    """
    nats = torch.where(full > -math.inf, full.exp() * (full - other), 0.0).sum(dim=-1).mean().item()
    if math.isnan(nats):
        return True, _MOST_NATS
    highest, tokens = full.max(dim=-1)
    lost = other.amax(dim=-1) - other.gather(-1, tokens[:, None])[:, 0] > _TIE
    return bool((lost & (highest >= math.log(_SURE))).any()), min(max(nats, 0.0), _MOST_NATS)
