"""One answer: how its tokens are chosen, when it ends, and which part of its text is final."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import reduce
from numbers import Integral, Real
from operator import or_
from typing import TYPE_CHECKING, Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from kvshelf.api import Usage
from kvshelf.api.answers import Answer, Piece
from kvshelf.api.options import Ask
from kvshelf.api.shapes import Logprob, TokenLogprob
from kvshelf.api.strict import FinishReason
from kvshelf.engine.attention.attachment import Attached, Wait
from kvshelf.engine.decode.detokenizer import Detokenizer, may_begin
from kvshelf.engine.decode.equivalents import Equivalents
from kvshelf.engine.decode.grammar import Grammar
from kvshelf.engine.decode.hooks import Copied, RowHook, Shown, Wants
from kvshelf.engine.decode.passages import Passages, QuestionLikelihood, SourceShares
from kvshelf.engine.decode.reduction import SuffixReducer
from kvshelf.engine.decode.selection import SeenDocument, Selection
from kvshelf.engine.decode.suffixes import SuffixRow
from kvshelf.engine.decode.turns import Turn
from kvshelf.errors import InvalidRequest, KvshelfError

if TYPE_CHECKING:
    from kvshelf.engine.decode.guide import Constraint  # it needs llguidance, and an answer mostly none

LEAST: Final = 1e-30
"""Temperature and top_p at least: float32 has smaller numbers, but not many. Only the likeliest token is left then."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and when to stop. ask: at temperature 0 the likeliest one; above, one is drawn from the
    likeliest `top_p` of the mass, repeatably with a `seed`. grammar: what the answer must be. logprobs: how many of the
    likeliest tokens stand beside each token of the answer, with their logarithms; None: no logarithms."""

    max_tokens: int = 64
    ask: Ask = field(default_factory=Ask)
    grammar: Grammar | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        ask, tokens, top = self.ask, self.max_tokens, self.logprobs
        stops = ask.stops if ask.stop is None or isinstance(ask.stop, Collection) else ask.stop
        texts = isinstance(stops, tuple) and all(isinstance(stop, str) and stop for stop in stops)
        _require(_of(tokens, Integral) and tokens >= 1, "max_tokens", tokens, "an integer from 1")
        _require(_of(ask.temperature, Real) and ask.temperature >= 0, "temperature", ask.temperature, "a number from 0")
        _require(_of(ask.top_p, Real) and 0 < ask.top_p <= 1, "top_p", ask.top_p, "above 0 and at most 1")
        _require(
            ask.seed is None or (_of(ask.seed, Integral) and -(2**63) <= ask.seed < 2**64),
            "seed",
            ask.seed,
            "an integer of 64 bits",
        )
        _require(texts, "stop", stops, "texts that are not empty")
        _require(top is None or (_of(top, Integral) and top >= 0), "logprobs", top, "an integer from 0")


@dataclass(frozen=True)
class AnswerReads:
    """How an answer reads its documents, and what it tells of that.

    selection: what the answer's tokens see of the document; None: all. The question's tokens see all. reducer: bounds
    the suffix; None: all of it stays. passages: whether to count what the tokens read. likelihood: whether to tell what
    the model gives the tokens of the question.
    """

    selection: Selection | None = None
    reducer: SuffixReducer | None = None
    passages: bool = False
    likelihood: bool = False


@dataclass(frozen=True)
class AnswerTokens:
    """What tokens say. end_ids: those that end an answer. decoder: makes text of the others; None: they have none."""

    end_ids: frozenset[int] = frozenset()
    decoder: Tokenizer | None = None


class Generation:
    """An unfinished answer: the tokens that a `DecodeBatch` must run next, and the text so far.

    Several may be open on one engine and one compressed cache. The same batch runs all of its steps.
    """

    def __init__(
        self,
        document: Attached,
        query: Sequence[int],
        sampling: Sampling,
        equivalents: Equivalents,
        *,
        tokens: AnswerTokens,
        reads: AnswerReads,
        constraint: Constraint | None = None,
        logprobs: Logprobs | None = None,
    ) -> None:
        """sampling: its `max_tokens` have room behind the question. constraint: which tokens may come; None: all.
        logprobs: takes what the model gives the tokens."""
        self.room = sampling.max_tokens
        """Tokens that the answer may have."""
        selection, reducer = reads.selection, reads.reducer
        if reducer is not None:
            reducer.expect(len(query) + self.room)
            selection = selection or reducer.tail
        self._copied = 0 if reducer is None else reducer.of_document
        self._reducer = reducer
        self.document = document
        self._selection = selection
        sources = SourceShares(len(document.parts)) if len(document.parts) > 1 else None
        likelihood = QuestionLikelihood() if reads.likelihood else None
        passages = Passages(document, selection) if reads.passages else None
        hooks = selection, passages, sources, likelihood, reducer
        self._hooks: tuple[RowHook, ...] = tuple(hook for hook in hooks if hook is not None)
        self.pending = list(query)
        """Tokens that must run through the model before the next one can be chosen."""
        self._query = tuple(query)
        self.closing = False
        """Whether the answer is complete, and tokens still run that its turn is to have behind it."""
        self.turn_ids: tuple[int, ...] = ()
        """The tokens of a turn that is being closed."""
        self.turn: Turn | KvshelfError | None = None
        """Question and answer, or why they could not be kept; None if nobody asked for it."""
        self.constraint = constraint
        self.logprobs = logprobs
        self._end_ids = tokens.end_ids
        self._equivalents = equivalents
        self.sampler = Sampler(sampling.ask)
        self._text = _TextStream(tokens.decoder, sampling.ask.stops)
        self.row = SuffixRow(None if reducer is None else reducer.most, document.next_position)
        self._prefill_tokens = 0
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """The text that is final."""
        return self._text.text

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def next_position(self) -> int:
        """Position of the first pending token."""
        return self.row.first + self.row.logical

    @property
    def seen(self) -> Attached | Selection:
        """What its pending tokens see before its suffix."""
        seen: Attached | Selection = self.document
        if self._selection is not None and (self.token_ids or self._selection.reads_question):
            seen = self._selection.seen
        return seen if self._reducer is None else self._reducer.seen(self.document, seen, self.row)

    @property
    def seen_parts(self) -> Sequence[SeenDocument]:
        """What the tokens of the question see of each document."""
        return self.document.parts if self._selection is None else self._selection.parts

    @property
    def held_bytes(self) -> int:
        """Bytes that it holds beside its document, its entries and its states: as of a `SuffixReducer`."""
        return 0 if self._reducer is None else self._reducer.held_bytes

    @property
    def wants(self) -> Wants:
        """What its hooks want of the pass over its pending tokens."""
        if self.closing or not self._hooks:
            return Wants.NOTHING
        answering = bool(self.token_ids)
        return reduce(or_, (hook.wants(self.row, answering=answering) for hook in self._hooks))

    def before(self, layer: int, queries: Tensor, wait: Wait) -> None:
        """Give its hooks the queries of pending tokens, from the first on, `[T, q_heads, D]`."""
        for hook in self._hooks:
            hook.before(layer, queries, self.next_position, wait)

    def ran(self, count: int, shown: Shown) -> None:
        """Record that the first `count` pending tokens ran and are in the suffix. An error ends the answer."""
        self.row.logical += count
        self.row.stored += count
        del self.pending[:count]
        answering = bool(self.token_ids)
        if not answering:
            self._prefill_tokens = self.row.logical
        for hook in () if self.closing else self._hooks:
            hook.after(self.row, shown, answering=answering)

    def copies(self) -> Copied | None:
        """The entries of the document that its hooks have it own a copy of from now on; None: no more."""
        if len(self.token_ids) > 1:
            return None
        return next((copied for hook in self._hooks if (copied := hook.copies(self.row)) is not None), None)

    def reduced(self) -> int | None:
        """Have its hooks reduce the suffix. Returns how many entries need room from now on; None: as many as before."""
        rooms = [room for hook in self._hooks if (room := hook.reduced(self.row)) is not None]
        return max(rooms, default=None)

    def take(self, token: int) -> Piece:
        """Add a token to the answer. Returns the text that became final with it, possibly "".

        If this raises, the answer is over, and never `finished`.
        """
        assert not self.finished
        assert not self.pending
        self.sampler.took()
        ended = token in self._end_ids
        complete = self.constraint is not None and self.constraint.take(token)
        full = len(self.token_ids) + 1 == self.room
        text = "" if ended else self._text.push(token)
        if ended or complete or full:
            text += self._text.flush()
        self.token_ids.append(token)
        self.pending = [token]
        if ended or complete or self._text.stopped:
            self.finish_reason = "stop"
        elif full:
            self.finish_reason = "length"
        else:
            for hook in self._hooks:
                hook.took(self.token_ids)
        return Piece(text) if self.logprobs is None else self.logprobs.piece(text, self._text.tokens)

    def tell(self, token: int, logprobs: Tensor) -> None:
        """Note what the model gave a token that is about to be taken. logprobs: of all tokens, `[vocabulary]` fp32."""
        if self.logprobs is not None and token not in self._end_ids:
            self.logprobs.take(token, logprobs)

    def close(self, token_ids: Sequence[int]) -> None:
        """Have the suffix of a finished answer hold exactly these tokens, the whole turn. Those that ran already stay,
        up to the first that differs; the others are pending."""
        assert self.finished
        assert self.row.most is None, "nothing of a turn that is kept was dropped"
        ran = [*self._query, *self.token_ids][: self.row.logical]
        differing = (at for at, (old, new) in enumerate(zip(ran, token_ids, strict=False)) if old != new)
        shared = next(differing, min(len(ran), len(token_ids)))
        if shared < self.row.logical and self.row.states is not None:
            shared, self.row.states = 0, None  # states cannot be taken back
        self.row.logical = self.row.stored = shared
        self.pending, self.closing = list(token_ids[shared:]), True
        self.turn_ids = tuple(token_ids)

    def answer(self) -> Answer:
        assert self.finish_reason is not None
        answer = Answer(
            self._text.text,
            list(self.token_ids),
            self.finish_reason,
            self.usage(),
            logprobs=None if self.logprobs is None else tuple(self.logprobs.tokens),
            stop=self._text.stopped,
        )
        for hook in self._hooks:
            answer = hook.close(answer)
        return answer

    def usage(self) -> Usage:
        """The tokens counted so far."""
        decoded = len(self.token_ids)
        # The first token is the question's; what the next one would see has not been read.
        selects_question = self._selection is not None and self._selection.reads_question
        read = (self.seen if selects_question or decoded > 1 else self.document).read_tokens
        # Of copied entries some have left: counted as read, they cost what they did at first.
        share = min(1.0, (read + self._copied) / max(1, self.document.read_tokens))
        cost, saved = self._equivalents.answered(self.document, share, self._prefill_tokens, decoded)
        return Usage(
            cache_read_tokens=self.document.num_tokens,
            read_tokens=read,
            prefill_tokens=self._prefill_tokens,
            completion_tokens=decoded,
            suffix_tokens=self.row.stored + self.row.beside,
            prefill_token_equivalents=cost,
            prefill_token_equivalents_saved=saved,
        )


class Sampler:
    """What the tokens of one answer are drawn by: random numbers of the CPU, the same on every device."""

    def __init__(self, ask: Ask) -> None:
        self.samples = ask.temperature > 0
        """Whether tokens are drawn at random; otherwise the likeliest one is taken."""
        self.temperature = max(float(ask.temperature), LEAST)
        self.top_p = max(float(ask.top_p), LEAST)
        self._numbers: Tensor | None = None
        self._generator = torch.Generator()
        if ask.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(int(ask.seed))

    def numbers(self, vocabulary: int) -> Tensor:
        """Those that the next token is drawn by, `[vocabulary]` fp32, exponentially distributed: the same until it is
        taken, however often its step is abandoned."""
        if self._numbers is None:
            self._numbers = torch.empty(vocabulary, dtype=torch.float32).exponential_(generator=self._generator)
        return self._numbers

    def took(self) -> None:
        """The next token is another one."""
        self._numbers = None


_LEAST_LOGPROB: Final = -9999.0
"""Stands for less: JSON has no infinity."""


class Logprobs:
    """What the model gave the tokens of one answer, before temperature, top_p and any grammar, as vLLM reports it. top:
    how many of the likeliest tokens stand beside each. bytes_of: of a token's text."""

    def __init__(self, top: int, bytes_of: Callable[[int], bytes]) -> None:
        self._top = top
        self._bytes_of = bytes_of
        self.tokens: list[Logprob] = []
        """Of each token so far."""
        self._final = 0
        """How many of these have gone out beside their text."""

    def take(self, token: int, logprobs: Tensor) -> None:
        """Add a token of the answer. logprobs: of the whole vocabulary, `[vocabulary]` fp32."""
        best, ids = logprobs.topk(min(self._top, len(logprobs)))
        likeliest = [self._named(*pair) for pair in zip(ids.tolist(), best.tolist(), strict=True)]
        own = self._named(token, float(logprobs[token]))
        self.tokens.append(Logprob(**own.model_dump(), top_logprobs=likeliest))

    def piece(self, text: str, tokens: int) -> Piece:
        """The next text of the answer, with which the text of so many tokens is final."""
        first, self._final = self._final, tokens
        return Piece(text, self.tokens[first:tokens])

    def _named(self, token: int, logprob: float) -> TokenLogprob:
        text = self._bytes_of(token)
        return TokenLogprob(token=text.decode(errors="replace"), logprob=max(logprob, _LEAST_LOGPROB), bytes=list(text))


class _TextStream:
    """Text of a growing answer: whole characters only, without a tail that may still become a stop text."""

    def __init__(self, decoder: Tokenizer | None, stop: Sequence[str]) -> None:
        self._tokens = None if decoder is None else Detokenizer(decoder, skip_special_tokens=True)
        self._stop = stop
        self._tail = ""
        self._pushed = 0
        self._ends: list[int] = []
        """Of each token whose text is known, the place in the answer's text where it ends."""
        self.text = ""
        self.stopped: str | None = None

    @property
    def tokens(self) -> int:
        """How many tokens have all of their text in the final text."""
        return bisect_right(self._ends, len(self.text))

    def push(self, token: int) -> str:
        """Add a token; returns the text that is final."""
        self._pushed += 1
        return "" if self._tokens is None else self._add(self._tokens.push(token))

    def flush(self) -> str:
        """End the answer: text held back becomes final, and an incomplete character U+FFFD."""
        if self._tokens is None or self.stopped:
            return ""
        return self._add(self._tokens.rest()) + self._release(len(self._tail))

    def _add(self, piece: str) -> str:
        self._tail += piece
        if piece:  # of all tokens since the last piece
            self._ends += [len(self.text) + len(self._tail)] * (self._pushed - len(self._ends))
        places = {stop: self._tail.index(stop) for stop in self._stop if stop in self._tail}
        if places:
            self.stopped = min(places, key=places.__getitem__)
            self._tail = self._tail[: places[self.stopped]]
            return self._release(len(self._tail))
        return self._release(len(self._tail) - may_begin(self._tail, self._stop))

    def _release(self, length: int) -> str:
        final, self._tail = self._tail[:length], self._tail[length:]
        self.text += final
        return final


def _of(value: object, kind: type) -> bool:
    """Whether a value is a number of this kind: True is none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _require(holds: bool, name: str, value: object, legal: str) -> None:
    if not holds:
        raise InvalidRequest(f"{name} is {value!r}; it must be {legal}", param=name)
