"""Quality of a compression on its own document, measured when it is made: `Probe`, `Reference`.

The real questions are not known yet, so they are made from the document: cues. A cue is ten tokens of the document,
what the chat template writes before an answer, and in place of the answer the document's tokens from the third on
behind the ten: like a question, it does not have the very words before the answer. Both caches predict the same four
tokens of each answer, each token after the right ones before it. The reference is the full cache
and not the truth: an answer that the model cannot find is no fault of the compression.

With p the probabilities under the full cache, q under the compressed one, n under none (the chat template's tokens
alone), and a = argmax p at each predicted token:

    a token counts where p(a) >= 0.99; it is the document's where also p(a) - n(a) >= 0.5
    a cue agrees where argmax q = a at each of its tokens that count
    agreement = share of the cues that agree
    kl = mean of KL(p || q) over all tokens of the cues that have a token that counts, in nats

Cues without such a token agree whatever the cache holds, and are not asked again. Where fewer than a fifth of the cues
have a token that counts and is the document's, every token counts (every fifth cue is asked without the document).
KL takes the 64 likeliest tokens one by one and the others together.

Cues and not tokens are counted, because the tokens of a cue are lost together. `low` and `high` are the exact bounds of
a binomial share (Clopper and Pearson, 1934), each on one side, at 95 %. `low` is None below `CUES` cues: a bound from
so few is no floor.

The full cache answers during the prefill: the cues are probe passes behind the document, and each layer is freed as
usual. There is never a second cache in memory, but for a model with recurrent states (`prefill.stateful`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kvshelf.api import Quality, WorstPart
from kvshelf.workers.engine.attention.attached import CACHE_ARGUMENT, AttachedCache
from kvshelf.workers.model.devices import input_device
from kvshelf.workers.policies import kvcues
from kvshelf.workers.policies.view import DocumentView, ProbePass

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VERSION: Final = 2
"""Raised whenever the numbers of an unchanged cache can change."""

CUES: Final = 150
"""Cues of a probe. If all of them agree, `low` is 0.98."""

ASKED: Final = 10
SKIPPED: Final = 2
"""Tokens of the document between those of a cue and the answer. Without a gap one accepted cache in seven had lost
facts, where with it one in fourteen had (docs/internals/probe.md)."""
ANSWER: Final = 4

_SURE: Final = 0.99
_GIVEN: Final = 0.5
_LEAST_GIVEN: Final = 1 / 5
_EVERY_FIFTH: Final = 5
_TIE: Final = 1e-4
"""Log-probabilities closer than this are equal, as in every comparison of answers: rounding decides their order."""
_LIKELIEST: Final = 64
"""A vocabulary has 150,000 tokens: whole distributions of 600 predictions would take as much memory as a document."""
_CHUNK: Final = 64
"""Predictions whose probabilities are computed at a time, in fp32."""
_PARTS: Final = 8
_LEAST_OF_PART: Final = 10
_CONFIDENCE: Final = 0.95


def exact(num_tokens: int, probe_s: float) -> Quality:
    """The quality of the full cache itself, which is known without cues."""
    worst: WorstPart = {"from": 0, "to": num_tokens, "agreement": 1.0}
    return Quality(agreement=1, low=1, high=1, worst=worst, cues=0, kl=0, probe_s=probe_s, version=VERSION)


@dataclass(frozen=True)
class Probe:
    """Cues made from a document, all of one length.

    places: where the answer of each cue begins in the document, ascending. passes: without the last token of each
    answer, which predicts nothing. prefix: the chat template's tokens before the document.
    """

    places: tuple[int, ...]
    passes: tuple[ProbePass, ...]
    prefix: tuple[int, ...]

    @classmethod
    def of(cls, document: DocumentView, count: int = CUES) -> Probe | None:
        """At most `count` cues; None for a document that is too short for one."""
        places = tuple(cue_places(document, count))
        if not places:
            return None
        passes = tuple(document.cue(_asked(at), slice(at, at + ANSWER - 1)) for at in places)
        return cls(places, passes, tuple(document.token_ids[: document.protected_prefix]))

    def only(self, cues: Sequence[int]) -> Probe:
        """These cues."""
        return replace(self, places=tuple(self.places[at] for at in cues), passes=tuple(self.passes[at] for at in cues))

    @property
    def without(self) -> Probe:
        """The cues that a model without the document is asked."""
        return self.only(range(0, len(self.passes), _EVERY_FIFTH))

    @property
    def length(self) -> int:
        """Tokens of a cue."""
        return len(self.passes[0].token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of all cues together."""
        return self.length * len(self.passes)

    def predicting(self, first: int, device: torch.device) -> Tensor:
        """Where the predictions stand in a sequence in which the first cue begins at token `first`: `[cues * 4]`."""
        ends = torch.arange(1, len(self.passes) + 1, device=device)[:, None] * self.length
        return (ends + torch.arange(-ANSWER, 0, device=device)).flatten() + first

    def ids(self, device: torch.device, before: Sequence[int] = ()) -> Tensor:
        """Token ids of the cues, a row each, behind `before`: `[cues, T]`."""
        return torch.tensor([[*before, *cue.token_ids] for cue in self.passes], device=device)


@dataclass(frozen=True, eq=False)
class Reference:
    """The full cache's predictions for the cues of a probe that tell something; T = 4 for each.

    document: the digest of the document's ids, as in an `Identity`. places: of all cues. telling: which of them have
    tokens that count, and `probe` has only these. likeliest: `[telling * T, 64]` token ids. log_probs: `[telling * T,
    65]` fp32 of these and of all others together. counted: `[telling, T]`, the tokens that count. probe_s: seconds that
    the answers without a document took.
    """

    document: str
    places: tuple[int, ...]
    telling: tuple[int, ...]
    probe: Probe
    likeliest: Tensor
    log_probs: Tensor
    counted: Tensor
    probe_s: float

    @classmethod
    def of(cls, document: str, probe: Probe, full: Tensor, without: Tensor, probe_s: float) -> Reference:
        """From logits `[cues * T, vocabulary]` of the full cache, and of the model without the document for the cues of
        `probe.without`."""
        count = min(_LIKELIEST, full.shape[-1])
        likeliest = full.topk(count, dim=-1).indices.view(-1, ANSWER, count)
        log_probs = _events(full, likeliest.flatten(0, 1))[0].view(-1, ANSWER, count + 1)
        sure = log_probs[..., 0].exp()  # [cues, T]
        counted = sure >= _SURE
        first = likeliest[::_EVERY_FIFTH, :, :1].flatten(0, 1)
        alone = _events(without, first)[0][:, 0].exp().view(-1, ANSWER)
        given = counted[::_EVERY_FIFTH] & (sure[::_EVERY_FIFTH] - alone >= _GIVEN)
        if given.any(dim=1).float().mean() < _LEAST_GIVEN:
            counted = torch.ones_like(counted)
        telling = counted.any(dim=1).nonzero().flatten()
        asked = tuple(telling.tolist())
        likeliest, log_probs = (found[telling].flatten(0, 1) for found in (likeliest, log_probs))
        return cls(document, probe.places, asked, probe.only(asked), likeliest, log_probs, counted[telling], probe_s)

    def compare(self, logits: Tensor, probe_s: float) -> Quality:
        """The quality of a compressed cache, from its logits `[telling * T, vocabulary]`. `kl` is not finite if they
        are not."""
        log_probs, highest = _events(logits, self.likeliest)
        same = (highest - log_probs[:, 0] <= _TIE).view(-1, ANSWER)
        kept: list[bool] = (same | ~self.counted).all(dim=1).tolist()
        lost = {cue for cue, agrees in zip(self.telling, kept, strict=True) if not agrees}
        cues = len(self.places)
        kl = float((self.log_probs.exp() * (self.log_probs - log_probs)).sum(dim=-1).mean())
        low, high = bounds(cues - len(lost), cues)
        return Quality(
            agreement=(cues - len(lost)) / cues,
            low=low if cues >= CUES else None,
            high=high,
            worst=worst_part(self.places, [cue not in lost for cue in range(cues)]),
            cues=cues,
            kl=kl if math.isnan(kl) else max(kl, 0.0),
            probe_s=self.probe_s + probe_s,
            version=VERSION,
        )


def _events(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """From logits `[n, vocabulary]` and token ids `[n, k]`: log-probabilities `[n, k + 1]` fp32 of these tokens and of
    all others together, and the largest of any token `[n]`."""
    found, highest = [], []
    for rows, chosen in zip(torch.split(logits, _CHUNK), torch.split(tokens, _CHUNK), strict=True):
        log_probs = rows.float().log_softmax(dim=-1)
        highest.append(log_probs.amax(dim=-1))
        named = log_probs.gather(-1, chosen)
        others = (1 - named.exp().sum(dim=-1, keepdim=True)).clamp(min=1e-6).log()
        found.append(torch.cat([named, others], dim=-1))
    return torch.cat(found), torch.cat(highest)


def bounds(agreed: int, cues: int) -> tuple[float, float]:
    """The lowest and the highest share under which at least, or at most, `agreed` of `cues` come about in 5 % of all
    cases."""
    return 1 - _highest_rate(cues - agreed, cues), _highest_rate(agreed, cues)


def _highest_rate(count: int, of: int) -> float:
    """The rate at which at most `count` of `of` happen in 5 % of all cases."""
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        tail = sum(math.comb(of, k) * rate**k * (1 - rate) ** (of - k) for k in range(count + 1))
        low, high = (rate, high) if tail > 1 - _CONFIDENCE else (low, rate)
    return round(high, 6) if count < of else 1.0


def worst_part(places: Sequence[int], agreed: Sequence[bool]) -> WorstPart:
    """Where the smallest share of the cues agrees, among parts of the document with equally many cues."""
    parts = max(1, min(_PARTS, len(places) // _LEAST_OF_PART))
    groups = list(_groups(range(len(places)), parts))
    worst = min(groups, key=lambda group: sum(agreed[at] for at in group) / len(group))
    share = sum(agreed[at] for at in worst) / len(worst)
    return {"from": _asked(places[worst[0]]).start, "to": places[worst[-1]] + ANSWER, "agreement": share}


def _asked(at: int) -> slice:
    """The tokens of the cue whose answer begins at token `at`."""
    return slice(at - SKIPPED - ASKED, at - SKIPPED)


def cue_places(document: DocumentView, count: int) -> list[int]:
    """Where the answers of up to `count` cues begin, in ascending order. Answers do not overlap.

    Answers that begin with a number come first, then those that begin with a name, then all others: people ask for
    numbers and names, and a model that only copies what follows is no witness of what it can find. Of each kind the
    places are taken evenly from the whole document, the rarest of each part; rare means few in this document, because
    the model's own surprise would need logits of all of it. No answer begins where one of policy `kvcues` does,
    which keeps what its own cues read.
    """
    ids = document.token_ids
    prefix, last = document.protected_prefix, document.num_tokens - ANSWER
    first = prefix + ASKED + SKIPPED
    allowed = [at for at in range(first, last + 1) if (at - prefix - kvcues.ASKED) % kvcues.EVERY]
    frequency = Counter(ids)
    rarity = [-math.log(frequency[token]) for token in ids]
    taken = bytearray(document.num_tokens)
    chosen: list[int] = []
    for begins in (document.number_starts, document.name_starts, None):
        of_kind = [at for at in allowed if begins is None or begins[at]]
        while (room := count - len(chosen)) and (free := [at for at in of_kind if _free(taken, at)]):
            for part in _groups(free, room):
                # Among equals the last one: sentences say what is new at their end.
                apart = [(sum(rarity[at : at + ANSWER]), at) for at in part if _free(taken, at)]
                if apart:
                    _, best = max(apart)
                    taken[best : best + ANSWER] = b"\1" * ANSWER
                    chosen.append(best)
    return sorted(chosen)


def _free(taken: bytearray, at: int) -> bool:
    """Whether an answer that begins here overlaps no other."""
    return not any(taken[at : at + ANSWER])


def _groups(items: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    """`items` cut into up to `most` parts of equal length, in order."""
    parts = min(most, len(items))
    for part in range(parts):
        yield items[len(items) * part // parts : len(items) * (part + 1) // parts]


def ask(model: PreTrainedModel, probe: Probe, past: AttachedCache) -> Tensor:
    """Logits `[cues * T, vocabulary]` behind an attached cache."""
    found = []
    for ids in torch.split(probe.ids(input_device(model)), past.rows_at_once):
        past.reset()
        pieces = [model(each, logits_to_keep=ANSWER, **{CACHE_ARGUMENT: past}).logits for each in past.pieces(ids)]
        found.append(torch.cat(pieces, dim=1)[:, -ANSWER:])
    return torch.cat(found).flatten(0, 1)


def ask_without(model: PreTrainedModel, probe: Probe) -> Tensor:
    """Logits `[cues * T, vocabulary]` of a model that never saw the document, for the cues of `probe.without`."""
    ids = probe.without.ids(input_device(model), probe.prefix)
    logits: Tensor = model(ids, use_cache=False, logits_to_keep=ANSWER).logits
    return logits.flatten(0, 1)
