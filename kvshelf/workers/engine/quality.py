"""Quality of a compression on its own document, measured when it is made: `Probe`, `Reference`.

The real questions are not known yet, so they are made from the document. The first words of a passage with rare tokens
are the question; the passage's next words stand in place of the answer. Both caches predict the same tokens of these
answers, each token after the right ones before it. Two numbers say how far the compressed cache is from the full one.
The reference is the full cache and not the truth: an answer that the model cannot find is no fault of the compression.

With p the probabilities under the full cache, q under the compressed one, n under none (the chat template's tokens
alone), and a = argmax p at each predicted token:

    w = max(0, p(a) - n(a)) where p(a) >= 0.9, else 0
    agreement = sum of w where argmax q = a / sum of w          kl = sum of w KL(p || q) / sum of w, in nats

So a token counts by how much the document contributes to it. Without the weights most tokens would follow from the few
before them, whatever the cache holds, and every compression would look good. Where the full cache is unsure, the last
bits of a codec change its choice, but no answer. If all w are 0 (a model that reads nothing), every token counts alike.

The full cache answers during the prefill: the questions are a probe pass behind the document, and each layer is freed
as usual. There is never a second cache in memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from kvshelf.workers.engine.attention.attached import CACHE_ARGUMENT, AttachedCache
from kvshelf.workers.policies.view import CUE, CUE_ANSWER, DocumentView, ProbePass

VERSION: Final = 1
"""Raised whenever the numbers of an unchanged cache can change."""

QUESTIONS: Final = 8
"""Questions made by default. Six times as many cost six times as much and rank no better (docs/quality.md)."""

_SURE: Final = 0.9
_TIE: Final = 1e-4
"""Log-probabilities closer than this are equal, as in every comparison of answers: rounding decides their order."""


@dataclass(frozen=True)
class Probe:
    """Questions made from a document, and their answers, in one pass behind it.

    One pass for all questions takes a tenth of the calls of one pass for each, and ranks caches the same. predicting:
    the tokens of the pass that predict the answers' tokens. prefix: the chat template's tokens before the document.
    """

    asked: ProbePass
    predicting: tuple[int, ...]
    prefix: tuple[int, ...]

    @classmethod
    def of(cls, document: DocumentView, questions: int = QUESTIONS) -> Probe | None:
        """At most `questions` questions; None for a document that is too short for one."""
        ids: list[int] = []
        predicting: list[int] = []
        for start in rare_passages(document.token_ids, document.protected_prefix, questions):
            ids += document.cue(start).token_ids
            predicting += range(len(ids) - 1 - CUE_ANSWER, len(ids) - 1)
        if not ids:
            return None
        asked = ProbePass(tuple(ids), document.num_tokens)
        return cls(asked, tuple(predicting), tuple(document.token_ids[: document.protected_prefix]))

    @property
    def num_tokens(self) -> int:
        """Tokens of the pass."""
        return len(self.asked.token_ids)

    def places(self, first: int, device: torch.device) -> Tensor:
        """`predicting` in a sequence in which the pass begins at token `first`."""
        return torch.tensor(self.predicting, device=device) + first


@dataclass(frozen=True, eq=False)
class Reference:
    """The full cache's predictions for a probe, and the weight of each token.

    log_probs: `[predicted, vocabulary]` fp32. best: `[predicted]`, the full cache's most likely tokens. weights: the
    same shape, with a sum of 1. document: the digest of the document's ids, as in an `Identity`. probe_s: seconds that
    the answers without a document took.
    """

    document: str
    probe: Probe
    log_probs: Tensor
    best: Tensor
    weights: Tensor
    probe_s: float

    @classmethod
    def of(cls, document: str, probe: Probe, full: Tensor, without: Tensor, probe_s: float) -> Reference:
        """From logits `[predicted, vocabulary]` of the full cache, and of the model without the document."""
        log_probs = full.float().log_softmax(dim=-1)
        highest, best = log_probs.max(dim=-1)
        alone = without.float().log_softmax(dim=-1).gather(-1, best[:, None])[:, 0]
        sure = highest.exp()
        weights = torch.where(sure >= _SURE, (sure - alone.exp()).clamp(min=0), 0)
        total = weights.sum()
        weights = torch.where(total > 0, weights / total, 1 / len(weights))
        return cls(document, probe, log_probs, best, weights, probe_s)

    def compare(self, logits: Tensor) -> tuple[float, float]:
        """Agreement and KL of logits `[predicted, vocabulary]` under a compressed cache."""
        log_probs = logits.float().log_softmax(dim=-1)
        chosen = log_probs.gather(-1, self.best[:, None])[:, 0]
        agreed = log_probs.amax(dim=-1) - chosen <= _TIE
        divergence = (self.log_probs.exp() * (self.log_probs - log_probs)).sum(dim=-1)
        agreement, kl = (float((self.weights * values).sum()) for values in (agreed, divergence))
        # Rounding in the sums must not push agreement above 1 or KL below 0.
        return min(round(agreement, 6), 1.0), kl if math.isnan(kl) else max(kl, 0.0)


def rare_passages(token_ids: Sequence[int], first: int, count: int) -> list[int]:
    """Where up to `count` passages of `CUE` + `CUE_ANSWER` tokens begin, in ascending order. They do not overlap.

    The document after its first `first` tokens is cut into strips of equal length. Each strip gives the passage whose
    answer has the rarest tokens: names and numbers, which people ask for, and the places where repeated text differs.
    Among equals the last passage wins: sentences say what is new at their end. Strips, because the rarest passages of
    all can stand in one paragraph. Rare means few in this document: the model's own surprise would need logits of all
    of it.
    """
    whole = CUE + CUE_ANSWER
    room = len(token_ids) - first - whole + 1
    if room < 1:
        return []
    frequency = Counter(token_ids)
    rarity = [-math.log(frequency[token]) for token in token_ids]
    strips = max(1, min(count, room // whole))
    starts: list[int] = []
    for strip in range(strips):
        begin, end = (first + room * part // strips for part in (strip, strip + 1))
        begin = max(begin, starts[-1] + whole) if starts else begin
        starts.append(max(range(begin, end), key=lambda at: (sum(rarity[at + CUE : at + whole]), at)))
    return starts


def ask(model: nn.Module, probe: Probe, past: AttachedCache) -> Tensor:
    """Logits `[predicted, vocabulary]` behind an attached cache."""
    device: Any = model.device
    ids = torch.tensor([probe.asked.token_ids], device=device)
    logits: Tensor = model(ids, logits_to_keep=probe.places(0, device), **{CACHE_ARGUMENT: past}).logits
    return logits[0]


def ask_without(model: nn.Module, probe: Probe) -> Tensor:
    """Logits `[predicted, vocabulary]` of a model that never saw the document."""
    device: Any = model.device
    ids = torch.tensor([(*probe.prefix, *probe.asked.token_ids)], device=device)
    places = probe.places(len(probe.prefix), device)
    logits: Tensor = model(ids, use_cache=False, logits_to_keep=places).logits
    return logits[0]
