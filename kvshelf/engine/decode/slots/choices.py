"""The next tokens of rows, chosen where their logits are, by the same operations in a recording and behind any pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from kvshelf.api.answers import Piece
from kvshelf.engine.decode.generation import LEAST, Generation
from kvshelf.errors import CacheUnusable
from kvshelf.kernels.transfer import upload

if TYPE_CHECKING:
    from kvshelf.engine.decode.guide import Constraint

_ROWS_AT_ONCE: Final = 8
"""Of which tokens are drawn: probabilities, ranks and what sorts them are some 45 bytes a token."""

CHOOSING_BYTES: Final = 45 * _ROWS_AT_ONCE
"""For each token of the vocabulary, while rows draw."""


class Draws(NamedTuple):
    """What tokens are drawn by. temperatures, masses: `[rows]` fp32, `temperature` and `top_p` of `Ask`; a row at
    temperature 0 takes the likeliest token. numbers: `[rows, vocabulary]` fp32, those of `Sampler.numbers`."""

    temperatures: Tensor
    masses: Tensor
    numbers: Tensor


class TokenRules(NamedTuple):
    """What the next token of each row is chosen by. allowed: `[rows, words]` int32, a bit for each token, set if it may
    come; None: all may. draws: None: every row takes the likeliest token."""

    allowed: Tensor | None
    draws: Draws | None

    def write(self, rows: Iterable[tuple[int, Generation]]) -> None:
        """Fill rules in the host's memory with those of some rows. The others take the likeliest of all tokens."""
        if self.allowed is not None:
            self.allowed.fill_(-1)
        if self.draws is not None:
            self.draws.temperatures.zero_()
        for row, generation in rows:
            if self.allowed is not None and generation.constraint is not None and not generation.finished:
                _allow(self.allowed[row], generation.constraint)
            if self.draws is not None and _samples(generation):
                sampler = generation.sampler
                self.draws.temperatures[row], self.draws.masses[row] = sampler.temperature, sampler.top_p
                self.draws.numbers[row] = sampler.numbers(self.draws.numbers.shape[1])


class RuleKind(NamedTuple):
    """Which rules the next tokens of some rows have: whether a grammar holds one, and whether one is drawn."""

    masked: bool
    drawn: bool

    @classmethod
    def of(cls, rows: Iterable[Generation]) -> RuleKind:
        open_rows = [row for row in rows if not row.finished]
        return cls(any(row.constraint is not None for row in open_rows), any(map(_samples, open_rows)))

    def sizes(self, rows: int, vocabulary: int) -> list[int]:
        """Numbers of 32 bits that each of the rules takes."""
        bits = [rows * -(-vocabulary // 32)] if self.masked else []
        return bits + ([rows, rows, rows * vocabulary] if self.drawn else [])

    def rules(self, columns: Sequence[Tensor], rows: int) -> TokenRules:
        """The rules that lie in int32 tensors of these sizes, one behind the other."""
        allowed = columns[0].view(rows, -1) if self.masked else None
        if not self.drawn:
            return TokenRules(allowed, None)
        temperatures, masses, numbers = (column.view(torch.float32) for column in columns[-3:])
        return TokenRules(allowed, Draws(temperatures, masses, numbers.view(rows, -1)))


def choose(logits: Tensor, rules: TokenRules) -> Tensor:
    """The next token of each row of logits `[rows, vocabulary]`, `[rows]` int64; -1 where a logit is not a number. The
    maximum of a row with a NaN is NaN."""
    if rules.allowed is not None:
        logits = logits + _terms_of(rules.allowed, logits)
    best, tokens = logits.max(dim=-1)
    if rules.draws is not None:
        parts = zip(*(torch.split(rows, _ROWS_AT_ONCE) for rows in (logits, best, *rules.draws)), strict=True)
        drawn = torch.cat([_draw(part, most, Draws(*draws)) for part, most, *draws in parts])
        tokens = torch.where(rules.draws.temperatures > 0, drawn, tokens)
    return tokens.masked_fill(~best.isfinite(), -1)


def _draw(logits: Tensor, best: Tensor, draws: Draws) -> Tensor:
    """A token of each row, drawn from the likeliest of `masses`. In fp32."""
    # The largest becomes 0, so that no temperature makes it infinite. At the least temperature only it has mass.
    scaled = (logits.float() - best.float()[:, None]) / draws.temperatures.clamp_min(LEAST)[:, None]
    ranked, order = torch.softmax(scaled, dim=-1).sort(dim=-1, descending=True, stable=True)
    # A token stays while the mass before it is short of top_p.
    ranked = ranked.masked_fill(ranked.cumsum(dim=-1) - ranked >= draws.masses[:, None], 0)
    # As `torch.multinomial` draws one: the largest of masses over numbers that are exponentially distributed.
    rank = (ranked / draws.numbers).argmax(dim=-1, keepdim=True)
    return order.gather(-1, rank)[:, 0]


def _samples(row: Generation) -> bool:
    return row.sampler.samples and not row.finished


def _allow(words: Tensor, constraint: Constraint) -> None:
    """Set the bits of what may come next, and clear those of ids beyond the tokenizer's, the padding of some models."""
    count = -(-constraint.vocabulary // 32)
    bits = torch.zeros(max(count, len(words)), dtype=torch.int32)
    constraint.fill(bits.data_ptr(), 4 * count)
    words.copy_(bits[: len(words)])


def _terms_of(allowed: Tensor, logits: Tensor) -> Tensor:
    """What is added to logits. The bits have travelled to the device, and 0 or -inf is made there: on a CPU,
    `masked_fill_` takes longer, and a mask of floats is 32 times as large."""
    octets = allowed.view(torch.uint8).flatten().int()
    terms = _terms(logits.device, logits.dtype).index_select(0, octets).view(len(logits), -1)
    return terms[:, : logits.shape[1]]


@cache
def _terms(device: torch.device, dtype: torch.dtype) -> Tensor:
    """What is added to eight logits, by the octet of their bits, `[256, 8]`: 0 where the bit is set, else -inf."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return torch.zeros(256, 8, dtype=dtype, device=device).masked_fill_(bits == 0, float("-inf"))


class Choices(NamedTuple):
    """The next tokens of rows, -1 where a logit is not a number. logprobs: `[vocabulary]` fp32 of the rows that
    report them."""

    tokens: list[int]
    logprobs: Mapping[int, Tensor]

    @classmethod
    def of(cls, logits: Tensor, rows: Sequence[Generation]) -> Choices:
        """From logits `[rows, vocabulary]`. Rows that draw are by themselves: to sort takes longer than a maximum."""
        tokens = [-1] * len(rows)
        for draws in (False, True):
            places = [place for place, row in enumerate(rows) if _samples(row) == draws]
            if places:
                own = logits if len(places) == len(rows) else logits[places]
                chosen = choose(own, _rules_of([rows[place] for place in places], own)).tolist()
                for place, token in zip(places, chosen, strict=True):
                    tokens[place] = token
        return cls.chosen(tokens, range(len(rows)), logits, rows)

    @classmethod
    def chosen(
        cls, tokens: Sequence[int], places: Sequence[int], logits: Tensor, rows: Sequence[Generation]
    ) -> Choices:
        """Of rows whose tokens and logits stand at these places among others."""
        logprobs = {
            row: logits[place].float().log_softmax(dim=-1)
            for row, place in enumerate(places)
            if rows[row].logprobs is not None
        }
        return cls([tokens[place] for place in places], logprobs)

    def take(self, generation: Generation, row: int) -> Piece:
        """Add the next token of one answer to it. Returns the text that became final."""
        token = self.tokens[row]
        if token < 0:
            raise CacheUnusable(
                "the model's logits after this cache are not numbers, so no answer can be given. If the model "
                "overflows in float16, load it with dtype bfloat16 or float32; an imported cache may hold such numbers "
                "itself"
            )
        if row in self.logprobs:
            generation.tell(token, self.logprobs[row])
        return generation.take(token)


def _rules_of(rows: Sequence[Generation], logits: Tensor) -> TokenRules:
    kind = RuleKind.of(rows)
    sizes = kind.sizes(len(rows), logits.shape[1])
    columns = [torch.empty(size, dtype=torch.int32) for size in sizes]
    kind.rules(columns, len(rows)).write(enumerate(rows))
    return kind.rules(upload(columns, logits.device), len(rows)) if columns else TokenRules(None, None)
