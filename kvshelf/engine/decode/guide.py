"""Answers held to a grammar: which tokens may come next, by llguidance, as a mask over the model's logits."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from functools import cached_property
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from kvshelf.engine.decode.grammar import Grammar
from kvshelf.engine.decode.trial import LEXER_STATES, Trials
from kvshelf.errors import InvalidRequest

_COMPILED: Final = 128
_COMPILED_TEXT: Final = 524_288
"""Grammars of a tokenizer that stay compiled, those that were used last, and the characters of their texts together:
60,000 of a schema are 11 MB once they are compiled."""


class Constraint:
    """The grammar of one answer, and how far the answer is."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, param: str) -> None:
        self._matcher = matcher
        self._param = param
        self.vocabulary = vocabulary
        """Ids of the tokenizer."""

    def fill(self, address: int, nbytes: int) -> None:
        """Write a bit for each token, set if it may come next, into memory of the vocabulary's size, a multiple of four
        bytes. It takes an address: to ask NumPy for the address of a row takes as long as the mask, a microsecond."""
        self._matcher.unsafe_compute_mask_ptr(address, nbytes)
        self._require_sound()

    def take(self, token: int) -> bool:
        """Move on by a token of the answer. Returns whether nothing may follow it."""
        self._matcher.consume_token(token)
        self._require_sound()
        return self._matcher.is_stopped()

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            problem = self._matcher.get_error().partition("\n<state>")[0]  # behind it stands the state of the parser
            raise InvalidRequest(f"the answer cannot be held to this {self._param}: {problem[:500]}", param=self._param)


class Guide:
    """A tokenizer as llguidance sees it, with the grammars that were compiled for it. For any thread."""

    def __init__(self, decoder: Tokenizer, end_ids: Iterable[int], longest_token: int) -> None:
        """longest_token: its bytes."""
        self._decoder = decoder
        self._end_ids = sorted(end_ids)
        self._longest_token = longest_token
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._trials = Trials(decoder.to_str())

    def constraint(self, grammar: Grammar, max_tokens: int) -> Constraint:
        """What holds one answer to a grammar. Raises `InvalidRequest` for a grammar that is none, that takes too much
        to compile, or whose shortest answer has more than `max_tokens` tokens."""
        matcher = self._matcher(grammar).deep_copy()
        least_bytes = max(grammar.least_bytes, len(matcher.compute_ff_bytes()))
        if (least := -(-least_bytes // self._longest_token)) > max_tokens:
            raise InvalidRequest(
                f"the shortest answer that fits {grammar.param} has {least_bytes} bytes, at least {least} tokens, and "
                f"max_tokens is {max_tokens}; allow more tokens, or a shorter answer",
                param="max_tokens",
            )
        return Constraint(matcher, self._tokenizer.vocab_size, grammar.param)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token's text; of a control token those of its name."""
        if self._tokenizer.is_special_token(token):
            return (self._decoder.id_to_token(token) or "").encode()
        return self._tokenizer.decode_bytes([token])

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return LLTokenizer(self._decoder.to_str(), eos_token=self._end_ids or None)

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        """The compiled grammar, of which copies share the most. Two threads may compile the same one."""
        with self._lock:
            if (matcher := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return matcher
        self._trials.require_compiled(grammar)
        limits = LLParserLimits(max_lexer_states=LEXER_STATES)
        matcher = LLMatcher(self._tokenizer, grammar.text, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidRequest(f"{grammar.param} cannot be used: {matcher.get_error()[:500]}", param=grammar.param)
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > _COMPILED or sum(len(other.text) for other in self._compiled) > _COMPILED_TEXT:
                self._compiled.popitem(last=False)
        return matcher
