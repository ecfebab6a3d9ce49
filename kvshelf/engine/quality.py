"""Quality of a compression on its own document, measured by cues when it is made: see docs/internals/probe.md.

The reference is the full cache and not the truth: an answer that the model cannot find is no fault of the compression.
With p the probabilities under the full cache, q under the compressed one, and n those that the model gave at the same
token of the document when it first read it, for d, the document's own token:

    the document decides a token where argmax p = d, p(d) >= 0.5 and p(d) - n(d) >= 0.3
    a cue counts if the document decides one of its tokens; it agrees where argmax q = d at the first of them
    agreement = share of the cues that count and agree
    kl = mean of KL(p || q) over all predicted tokens of the cues that count, in nats

So a token counts that surprised the model at first and does not after it has read the document; tokens that it would
have predicted anyway, or of which it is unsure, are in no denominator. Of a cue the first decided token counts, with
which the others are lost: cues are independent. KL takes the 64 likeliest tokens one by one and the others together. A
model with recurrent states, and appended tokens, have no logits of the document; there n is of the cue alone.

`low` and `high` are the exact bounds of a binomial share (Clopper and Pearson, 1934), each on one side, at 95 %. `low`
is None where fewer than `LEAST` cues count: a bound from so few is no floor. Where none counts there is no agreement.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

import torch
from torch import Tensor

from kvshelf.api import Quality, WorstPart
from kvshelf.engine.attention.attached import CACHE_ARGUMENT, AttachedCache
from kvshelf.methods.policies.view import CUE_ASKED, CUE_EVERY, DocumentView, ProbePass
from kvshelf.model.devices import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VERSION: Final = 3
"""Raised whenever the numbers of an unchanged cache can change."""

CUES: Final = 150
"""Cues of a full probe. On SmolLM2 58 to 74 of 100 count; if 90 count and agree, `low` is 0.967."""

LEAST: Final = 8
"""Cues that count below which there is no bound."""

_TOKENS_OF_A_CUE: Final = 128
_FEWEST, _MOST = 10, 48
"""A fast probe has a cue for so many tokens of the document, within these bounds: at 2,000 tokens it takes half the
time of their prefill, at 32,000 a tenth."""

How = Literal["full", "fast", False]
"""How quality is measured; False: not at all."""

QUESTION: Final = 10
SKIPPED: Final = 2
"""Tokens of the document between those of a cue and the answer."""
OPENING: Final = 4
"""Tokens that begin the answer. A model writes sentences: it seldom begins with the document's own words, and without
these a fifth of the cues counted in place of four fifths."""
ANSWER: Final = 6

_LIKELY: Final = 0.5
_LEARNT: Final = 0.3
_TIE: Final = 1e-4
"""Log-probabilities closer than this are equal, as in every comparison of answers: rounding decides their order."""
_LIKELIEST: Final = 64
"""A vocabulary has 150,000 tokens: whole distributions of 600 predictions would take as much memory as a document."""
_LOGITS: Final = 1 << 24
"""Logits that are in memory at a time: of 112 predictions, or 18 cues, where the vocabulary has 150,000 tokens."""
_CHUNK: Final = 64
"""Predictions whose probabilities are computed at a time, in fp32."""
BATCH: Final = 24
"""Cues that are asked at a time where a floor may end the asking: of a cache that agrees on two thirds, so many show
that it is below 0.95."""
_PARTS: Final = 8
_LEAST_OF_PART: Final = 10
_CONFIDENCE: Final = 0.95


def cue_count(how: How, num_tokens: int) -> int:
    """Cues of a probe of a document of so many tokens."""
    if how == "fast":
        return min(max(num_tokens // _TOKENS_OF_A_CUE, _FEWEST), _MOST)
    return CUES if how else 0


def highest_low(cues: int) -> float:
    """The bound where all of so many cues count and agree: no cache that loses something has a higher one."""
    return bounds(cues, cues)[0]


def exact(num_tokens: int, probe_s: float) -> Quality:
    """The quality of the full cache itself, which is known without cues."""
    worst: WorstPart = {"from": 0, "to": num_tokens, "agreement": 1.0}
    return Quality(agreement=1, low=1, high=1, worst=worst, cues=0, kl=0, probe_s=probe_s, version=VERSION)


@dataclass(frozen=True)
class Probe:
    """Cues made from a document, all of one length.

    places: where the predicted tokens of each cue begin in the document, ascending. answers: these tokens. passes:
    without the last of them, which predicts nothing. prefix: the chat template's tokens before the document. full:
    whether there are `CUES`, or as many as the document has room for.
    """

    places: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    passes: tuple[ProbePass, ...]
    prefix: tuple[int, ...]
    full: bool = True

    @classmethod
    def of(cls, document: DocumentView, count: int = CUES) -> Probe | None:
        """Of at most `count` cues; None for a document that is too short for one."""
        places = tuple(cue_places(document, count))
        if not places:
            return None
        ids = document.token_ids
        answers = tuple(tuple(ids[at : at + ANSWER]) for at in places)
        passes = tuple(document.cue(_cue_tokens(at), slice(at - OPENING, at + ANSWER - 1)) for at in places)
        full = count >= CUES or len(places) < count
        return cls(places, answers, passes, tuple(ids[: document.protected_prefix]), full)

    def only(self, cues: Sequence[int]) -> Probe:
        """The probe with these cues alone."""
        return replace(
            self,
            places=tuple(self.places[at] for at in cues),
            answers=tuple(self.answers[at] for at in cues),
            passes=tuple(self.passes[at] for at in cues),
        )

    @property
    def length(self) -> int:
        """Tokens of a cue."""
        return len(self.passes[0].token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of all cues together."""
        return self.length * len(self.passes)

    def reading(self, device: torch.device) -> Tensor:
        """The tokens at which the answers are predicted while the document is read, `[cues * T]`."""
        begins = torch.tensor(self.places, device=device)[:, None]
        return (begins + torch.arange(-1, ANSWER - 1, device=device)).flatten()

    def predicting(self, first: int, device: torch.device) -> Tensor:
        """The tokens at which the answers are predicted, `[cues * T]`, where the first cue begins at token `first`."""
        ends = torch.arange(1, len(self.passes) + 1, device=device)[:, None] * self.length
        return (ends + torch.arange(-ANSWER, 0, device=device)).flatten() + first

    def ids(self, device: torch.device, before: Sequence[int] = ()) -> Tensor:
        """Token ids of the cues, a row each, behind `before`: `[cues, length]`."""
        return torch.tensor([[*before, *cue.token_ids] for cue in self.passes], device=device)


@dataclass(frozen=True)
class CueAgreement:
    """One cue that counts, by number: whether a compressed cache agrees, and the mean KL of its predictions."""

    cue: int
    agreed: bool
    kl: float


@dataclass(frozen=True, eq=False)
class Reference:
    """The full cache's predictions for the cues of a probe that count; T = 6 for each.

    document: the digest of the document's ids, as in an `Identity`. num_cues: of the whole probe. `probe` has those
    that count. likeliest: `[cues * T, 64]` token ids. log_probs: `[cues * T, 65]` fp32 of these and of all others
    together. decided: of each cue, the first token that the document decides, `[cues]` of `cues * T`. finite: whether
    the model's logits are numbers. probe_s: seconds that the full cache's answers took, those of a shared pass by their
    share of its tokens.
    """

    document: str
    num_cues: int
    probe: Probe
    likeliest: Tensor
    log_probs: Tensor
    decided: Tensor
    finite: bool
    probe_s: float

    @classmethod
    def of(cls, document: str, probe: Probe, full: Iterable[Tensor], before: Iterable[Tensor]) -> Reference:
        """From logits of the full cache, and of the model before it knew the document: `[cues * T, vocabulary]` each,
        in parts `[rows, vocabulary]`. probe_s: 0, as only the caller knows it."""
        parts = []
        for logits in full:
            tokens = logits.topk(min(_LIKELIEST, logits.shape[-1]), dim=-1).indices
            parts.append((tokens, _events([logits], tokens)[0]))
        likeliest, log_probs = map(torch.cat, zip(*parts, strict=True))
        own = torch.tensor(probe.answers, device=likeliest.device).flatten()  # the document's tokens
        known = _events(before, own[:, None])[0][:, 0].exp()
        decided = decides(own, likeliest[:, 0], log_probs[:, 0].exp(), known).view(-1, ANSWER)
        counting = decided.any(dim=1).nonzero().flatten()
        rows = (counting[:, None] * ANSWER + torch.arange(ANSWER, device=own.device)).flatten()
        firsts = decided[counting].int().argmax(dim=1) + torch.arange(len(counting), device=own.device) * ANSWER
        return cls(
            document,
            len(probe.places),
            probe.only(counting.tolist()),
            likeliest[rows],
            log_probs[rows],
            firsts,
            bool(log_probs.isfinite().all()),
            0.0,
        )

    def batches(self, floor: float | None) -> list[range]:
        """The cues that count in the order of asking, by number: all at once, or, where a floor may end the asking,
        `BATCH` at a time, each batch spread over the document."""
        cues = len(self.probe.places)
        count = 1 if floor is None else -(-cues // BATCH)
        return [range(first, cues, count) for first in range(count)]

    def answered(self, cues: Sequence[int], logits: Iterable[Tensor]) -> list[CueAgreement]:
        """How a compressed cache answers some cues, by its logits `[cues * T, vocabulary]`, in parts `[rows,
        vocabulary]`."""
        numbers = torch.tensor(cues, device=self.decided.device)
        rows = (numbers[:, None] * ANSWER + torch.arange(ANSWER, device=numbers.device)).flatten()
        log_probs, highest = _events(logits, self.likeliest[rows])
        same = (highest - log_probs[:, 0] <= _TIE).view(-1, ANSWER)
        agreed = same.gather(1, (self.decided[numbers] - numbers * ANSWER)[:, None])[:, 0]
        full = self.log_probs[rows]
        kl = (full.exp() * (full - log_probs)).sum(dim=-1).view(-1, ANSWER).mean(dim=1)
        return list(map(CueAgreement, cues, agreed.tolist(), kl.tolist()))

    def quality(self, answered: Sequence[CueAgreement]) -> Quality:
        """Of a compressed cache, from cues that count: all, or those before a floor was out of reach. `kl` is not
        finite where its logits are not. probe_s: of the full cache's answers."""
        answered = sorted(answered, key=lambda answer: answer.cue)
        agreed, cues, most = [answer.agreed for answer in answered], len(answered), len(self.probe.places)
        kl = sum(answer.kl for answer in answered) / cues
        low, high = bounds(sum(agreed), cues)
        reason = None if cues == most else f"{cues} of the {most} cues that count show that the floor is out of reach"
        return Quality(
            agreement=sum(agreed) / cues,
            low=low if cues >= LEAST else None,
            high=high,
            worst=worst_part([self.probe.places[answer.cue] for answer in answered], agreed),
            cues=cues,
            asked=self.num_cues,
            full=self.probe.full and cues == most,
            reason=reason if cues >= LEAST else f"{self._count_text}, and a bound takes {LEAST}",
            kl=kl if math.isnan(kl) else max(kl, 0.0),
            probe_s=self.probe_s,
            version=VERSION,
        )

    def undecided(self) -> Quality:
        """The quality of any cache where no cue counts."""
        return Quality(
            agreement=None, low=None, high=None, worst=None, cues=0, asked=self.num_cues, reason=self._count_text,
            kl=0.0, full=self.probe.full, probe_s=self.probe_s, version=VERSION,
        )  # fmt: skip

    @property
    def _count_text(self) -> str:
        return f"the document decides {len(self.probe.places) or 'none'} of the {self.num_cues} cues that it was asked"


def decides(own: Tensor, likeliest: Tensor, likely: Tensor, known: Tensor) -> Tensor:
    """Which of the document's `own` tokens it decides, `[n]` bool: from the token that the full cache gives the highest
    probability, that probability, and the one that the own token had before."""
    return (likeliest == own) & (likely >= _LIKELY) & (likely - known >= _LEARNT)


def _events(logits: Iterable[Tensor], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """From logits `[n, vocabulary]`, in parts, and token ids `[n, k]`: log-probabilities `[n, k + 1]` fp32 of these
    tokens and of all others together, and the largest of any token `[n]`."""
    log_probs, highest, done = [], [], 0
    for rows in (rows for part in logits for rows in torch.split(part, _CHUNK)):
        chosen, done = tokens[done : done + len(rows)], done + len(rows)
        of_all = rows.float().log_softmax(dim=-1)
        highest.append(of_all.amax(dim=-1))
        named = of_all.gather(-1, chosen)
        others = (1 - named.exp().sum(dim=-1, keepdim=True)).clamp(min=1e-6).log()
        log_probs.append(torch.cat([named, others], dim=-1))
    return torch.cat(log_probs), torch.cat(highest)


def bounds(agreed: int, cues: int) -> tuple[float, float]:
    """The lowest and the highest share under which at least, or at most, `agreed` of `cues` come about in 5 % of all
    cases."""
    return 1 - _highest_rate(cues - agreed, cues), _highest_rate(agreed, cues)


def _highest_rate(count: int, of: int) -> float:
    """The rate at which at most `count` of `of` happen in 5 % of all cases. By logarithms: a batch has a hundred
    thousand documents."""
    if count == of:
        return 1.0
    happen = torch.arange(count + 1, dtype=torch.float64)
    ways = math.lgamma(of + 1) - torch.lgamma(happen + 1) - torch.lgamma(of - happen + 1)
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        tail = (ways + happen * math.log(rate) + (of - happen) * math.log1p(-rate)).logsumexp(0).exp()
        low, high = (rate, high) if tail > 1 - _CONFIDENCE else (low, rate)
    return round(high, 6)


def worst_part(places: Sequence[int], agreed: Sequence[bool]) -> WorstPart:
    """Where the smallest share of the cues agrees, among parts of the document with equally many cues."""
    parts = max(1, min(_PARTS, len(places) // _LEAST_OF_PART))
    groups = list(_groups(range(len(places)), parts))
    worst = min(groups, key=lambda group: sum(agreed[at] for at in group) / len(group))
    share = sum(agreed[at] for at in worst) / len(worst)
    return {"from": _cue_tokens(places[worst[0]]).start, "to": places[worst[-1]] + ANSWER, "agreement": share}


def _cue_tokens(at: int) -> slice:
    """The tokens of the document that a cue asks with, whose predicted tokens begin at token `at`."""
    end = at - OPENING - SKIPPED
    return slice(end - QUESTION, end)


def cue_places(document: DocumentView, count: int) -> list[int]:
    """Where the predicted tokens of up to `count` cues begin, in ascending order. They do not overlap.

    Answers that begin with a number come first, then those that begin with a name, then all others: people ask for
    numbers and names, and a model that only copies what follows is no witness of what it can find. Of each kind the
    places are taken evenly from the whole document, the rarest of each part; rare means few in this document, because
    the model's own surprise would need logits of all of it. No answer begins where one of policy `kvcues` does,
    which keeps what its own cues read. No cue has a token of an image: it would stand there without its states.
    """
    ids = document.token_ids
    prefix, last = document.protected_prefix, document.num_tokens - ANSWER
    length = QUESTION + SKIPPED + OPENING
    first = prefix + length
    allowed = [at for at in range(first, last + 1) if (at - prefix - CUE_ASKED) % CUE_EVERY]
    if document.images:
        images = document.images
        allowed = [at for at in allowed if all(end <= at - length or at + ANSWER <= begin for begin, end in images)]
    frequency = Counter(ids)
    rarity = [-math.log(frequency[token]) for token in ids]
    occupied = bytearray(document.num_tokens)
    chosen: list[int] = []
    for begins in (document.number_starts, document.name_starts, None):
        of_kind = [at for at in allowed if begins is None or begins[at]]
        while (room := count - len(chosen)) and (free := [at for at in of_kind if _free(occupied, at)]):
            for part in _groups(free, room):
                # Among equals the last one: sentences say what is new at their end.
                apart = [(sum(rarity[at : at + ANSWER]), at) for at in part if _free(occupied, at)]
                if apart:
                    _, best = max(apart)
                    occupied[best : best + ANSWER] = b"\1" * ANSWER
                    chosen.append(best)
    return sorted(chosen)


def _free(occupied: bytearray, at: int) -> bool:
    """Whether an answer that begins here overlaps no other."""
    return not any(occupied[at : at + ANSWER])


def _groups(items: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    """`items` cut into up to `most` parts of equal length, in order."""
    parts = min(most, len(items))
    for part in range(parts):
        yield items[len(items) * part // parts : len(items) * (part + 1) // parts]


def rows_at_once(model: PreTrainedModel) -> int:
    """Predictions whose logits are in memory at a time."""
    vocabulary: int = model.config.vocab_size
    return max(ANSWER, _LOGITS // vocabulary)


def ask(model: PreTrainedModel, probe: Probe, past: AttachedCache) -> Iterator[Tensor]:
    """Logits `[cues * T, vocabulary]` behind an attached cache, in parts."""
    cues = min(past.rows_at_once, rows_at_once(model) // ANSWER)
    for ids in torch.split(probe.ids(input_device(model)), cues):
        past.reset()
        logits = [model(piece, logits_to_keep=ANSWER, **{CACHE_ARGUMENT: past}).logits for piece in past.pieces(ids)]
        yield torch.cat(logits, dim=1)[:, -ANSWER:].flatten(0, 1)


def ask_without(model: PreTrainedModel, probe: Probe) -> Iterator[Tensor]:
    """Logits `[cues * T, vocabulary]` of a model that never saw the document, in parts."""
    for ids in torch.split(probe.ids(input_device(model), probe.prefix), rows_at_once(model) // ANSWER):
        logits: Tensor = model(ids, use_cache=False, logits_to_keep=ANSWER).logits
        yield logits.flatten(0, 1)
