"""Answers from the documents of one model: which entries they read, how their tokens are chosen, and their batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, cast, get_args
from weakref import WeakValueDictionary

from kvshelf.api import Asking, Select, SuffixOptions
from kvshelf.api.answers import Answer
from kvshelf.api.queries import JointQuery, Route, SuffixScope
from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.attachments import Attachments
from kvshelf.engine.attention.attachment import Attached, Attachment
from kvshelf.engine.attention.function import kvshelf_attention
from kvshelf.engine.decode.batch import DecodeBatch
from kvshelf.engine.decode.equivalents import Equivalents
from kvshelf.engine.decode.generation import AnswerReads, AnswerTokens, Generation, Logprobs, Sampling
from kvshelf.engine.decode.passages import Narrowing
from kvshelf.engine.decode.reduction import DocumentTail, SuffixReducer
from kvshelf.engine.decode.selection import (
    BlockSelection,
    EarlySelection,
    PolicySelection,
    Selection,
    SentenceSelection,
    UnitSelection,
    stored_entries,
)
from kvshelf.engine.decode.slots.slots import Slots
from kvshelf.engine.episodes import nearest_episode, require_several
from kvshelf.engine.exclusions import Combination, require_possible
from kvshelf.engine.forward.passes import Passes
from kvshelf.engine.inputs.encode import Encoder, Prompt
from kvshelf.engine.inputs.prepare import Preparer
from kvshelf.engine.options import AnswerOptions
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.methods.method import Needs
from kvshelf.methods.policies.base import Policy
from kvshelf.methods.policies.budgets import Budget
from kvshelf.methods.policies.gate_file import OpenGates
from kvshelf.methods.selectors import build as build_selector
from kvshelf.methods.selectors.base import UnitSelector
from kvshelf.methods.suffixes.base import SuffixPolicy
from kvshelf.methods.suffixes.registry import build as build_suffix_policy
from kvshelf.model import calibration
from kvshelf.model.rope import Rope

if TYPE_CHECKING:
    from kvshelf.engine.decode.guide import Guide

Caches = CompressedCache | Sequence[CompressedCache]
"""The cache of the document that a question is about, or those of several: see `Engine.joined`."""

_LEAST_RATED = 2
"""Tokens of a question that has a likelihood: of the first one nothing is known."""


class Asker:
    """Begins answers of one model. Thread-safe, but for `answer`, `answers` and `read`.

    equivalents: counts what answers cost. lacks: for a feature of a question that another engine does not have, its
    description and the field to leave out. answers_from: where that engine's answers come from, for the message.
    """

    answers_from: ClassVar[str] = ""
    lacks: ClassVar[Mapping[str, tuple[str, str]]] = {}

    def __init__(self, passes: Passes, encoder: Encoder, preparer: Preparer, attachments: Attachments) -> None:
        self._passes = passes
        self._facts = facts = passes.facts
        self._encoder = encoder
        self._preparer = preparer
        self._attachments = attachments
        self._open_gates: WeakValueDictionary[str, OpenGates] = WeakValueDictionary()  # by digest
        shared = facts.ranks is not None
        self.equivalents = Equivalents.of(facts.model, facts.kv_bytes_per_token, facts.kinds, shared=shared)

    def require_asked(self, query: Asking, caches: int) -> None:
        """Raises `PolicyUnsupported`, before any work, for a question about so many caches that this engine cannot
        answer."""
        route = query.route if isinstance(query, JointQuery) else None
        several = caches != 1 and route is None
        self._require(route=route != "nearest" and route, several=several, part=query.select, suffix=query.suffix)
        self._require_scope(query.suffix, 1 if route == "nearest" else caches)

    def _require(self, **features: object) -> None:
        """Raises `PolicyUnsupported` for the first feature of a question that this engine lacks."""
        for feature, param in (self.lacks[name] for name, value in features.items() if value and name in self.lacks):
            instead = "ask one" if param == "cache_ids" else f"leave {param} out"
            raise PolicyUnsupported(
                f"{self.answers_from}: it does not have {feature.format(features.get('route'))}; {instead}, or ask a "
                "service with kvshelf's own engine",
                param=param,
            )

    def _require_scope(self, suffix: SuffixOptions | None, documents: int) -> None:
        if suffix is not None and suffix.scope == "cache" and documents > 1:
            require_possible(Combination(facts=self._facts, verb="join", scope=suffix.scope))

    def batch(self) -> DecodeBatch:
        """An empty batch. Answers stepped in it together share one forward pass per token."""
        return DecodeBatch(self._passes, self._slots)

    @cached_property
    def _slots(self) -> Slots | None:
        """Shared by all batches: recorded graphs have a bound of memory for the model."""
        return Slots.of(self._passes)

    def start(
        self,
        document: Attached,
        query: Sequence[int],
        sampling: Sampling,
        selection: Selection | None = None,
        *,
        passages: bool = False,
        reducer: SuffixReducer | None = None,
        likelihood: bool = False,
    ) -> Generation:
        """Begin an answer to the token ids `query`. It runs when a batch steps it, not before.

        The answer ends early, with finish reason "length", where the model's longest sequence is reached. selection,
        reducer: made by `selection` and `reducer` for this document and this one answer. passages: whether the answer
        says which tokens of the documents it read. likelihood: whether the answer says how likely the question is.
        """
        self._require(several=len(document.parts) > 1, passages=passages, likelihood=likelihood)
        facts = self._facts
        longest = min(facts.longest(part.num_tokens) for part in document.parts)
        room = longest - document.next_position - len(query)
        if not query:
            raise InvalidRequest("the question is empty; ask something", param="prompt")
        if reducer is not None and reducer.tail is not None:
            _require_tail_of(document, reducer.tail, selection, passages=passages)
        if room < 1:
            raise InvalidRequest(
                f"document ({document.next_position} tokens) and question ({len(query)}) leave no room for an answer "
                f"within the {longest} tokens that {facts.name!r} takes behind it; ask a shorter question",
                param="prompt",
            )
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        grammar, logprobs = sampling.grammar, sampling.logprobs
        return Generation(
            document,
            query,
            sampling,
            self.equivalents,
            tokens=AnswerTokens(facts.end_ids(), None if facts.text is None else facts.text.answer_decoder()),
            reads=AnswerReads(selection, reducer, passages, likelihood),
            constraint=None if grammar is None else self.guide.constraint(grammar, sampling.max_tokens),
            logprobs=None if logprobs is None else Logprobs(logprobs, self.guide.bytes_of),
        )

    @cached_property
    def guide(self) -> Guide:
        """Constrains answers to grammars. Raises `InvalidRequest` without a tokenizer."""
        from kvshelf.engine.decode.guide import Guide  # llguidance, which most answers do without

        text = self._facts.text
        if text is None:
            raise InvalidRequest("an engine without a tokenizer makes token ids, which have no shape and no text")
        return Guide(text.decoder(), self._facts.end_ids(), text.longest_token)

    def reducer(self, suffix: SuffixOptions, question_tokens: int, document: Attached | None = None) -> SuffixReducer:
        """Bounds the keys and values of one question and its answer by a suffix policy.

        suffix: its budget is of entries of a KV head, those of the question included (default: 512 beside these); under
        scope "cache" the entries of the document count, too (default: as many as it has). document: under scope
        "cache"; waits until its layers have arrived. Raises `InvalidRequest` for an unknown policy or parameter and a
        budget below what is always kept, `PolicyUnsupported` for a model with windows, chunks or latents, or in several
        processes, and for a scope that policy, model or document cannot have.
        """
        self._require(suffix=suffix)
        policy = build_suffix_policy(suffix.policy, suffix.params or {})
        require_possible(Combination(facts=self._facts, verb="suffix", scope=suffix.scope))
        attending = [layer for layer, kind in enumerate(self._facts.kinds) if kind.attends]
        tail = None
        if suffix.scope == "suffix" and (idle := sorted(policy.of_tail & {*(suffix.params or {})})):
            raise InvalidRequest(
                f"{idle[0]} of suffix policy {policy.name!r} is about the document's entries, and under scope suffix "
                "none of them leave; leave it out, or give suffix.scope cache",
                param=f"suffix.params.{idle[0]}",
            )
        if suffix.scope == "cache":
            assert document is not None, "scope cache is about a document"
            self._require_scope(suffix, len(document.parts))
            tail = DocumentTail(document, policy, attending, self._encoder.stored_prefix(document.identity))
        gates = self._gates(policy) if Needs.GATES in policy.needs else None
        if tail is not None and gates is not None:
            of_cache = tail.document.identity.policy_params.get("gates")
            if of_cache != gates[0].digest:
                raise PolicyUnsupported(
                    f"the numbers of this cache are of gates {of_cache!r}, and those that are there for this model are "
                    f"{gates[0].digest!r}; compress the document anew, or put the file of its gates back",
                    param="suffix.scope",
                )
        return SuffixReducer(policy, question_tokens, suffix.budget, attending, tail, gates)

    def _gates(self, policy: SuffixPolicy) -> tuple[OpenGates, Rope]:
        """The gates by which a suffix policy scores new tokens, and the model's RoPE. The file is looked for each time,
        as for a policy."""
        facts = self._facts
        if facts.rope is None:
            raise PolicyUnsupported(
                f"suffix policy {policy.name!r} reads queries and keys without their rotation, and that of "
                f"{facts.name!r} is not known; take suffix policy lagkv",
                param="suffix.policy",
            )
        try:
            gates = policy.gate_file(facts.identity, facts.model.config.name_or_path, self._preparer.geometry)
        except PolicyUnsupported as error:
            raise PolicyUnsupported(error.message, param="suffix.policy") from error
        return self._open_gates.setdefault(gates.digest, OpenGates(gates)), facts.rope

    def selection(
        self, document: Attached, select: Select | None, question_tokens: int, suffix: SuffixOptions | None = None
    ) -> Selection | None:
        """The entries that one answer will read of a document, by a selector; None: all, because `select` is None or
        the budget has room for all. Waits for layers that are arriving.

        The question's tokens read all entries, and those of the answer at most `select.tokens` of a KV head, over all
        documents together (default: the selector's). suffix: of this answer. Raises `InvalidRequest` for an unknown
        selector or parameter and a budget below what is always read, `PolicyUnsupported` for a model or cache that
        cannot be read in part, and beside a suffix of scope "cache".
        """
        if select is None:
            return None
        self._require(part=select)
        selector, tokens = build_selector(select.method, select.params), select.tokens
        if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, Integral) or tokens < 1):
            raise InvalidRequest(f"select.tokens is {tokens!r}; it must be an integer from 1", param="select.tokens")
        policy = selector.policy_at(question_tokens)
        ends = [part.sentence_ends for part in document.parts]
        scope: SuffixScope = "suffix" if suffix is None else suffix.scope
        require_possible(Combination(facts=self._facts, policy=policy, selector=selector, ends=ends, scope=scope))
        budget = selector.default_tokens(document.read_tokens) if tokens is None else tokens
        if policy is not None:
            return self._by_policy(policy, document, budget, frozenset(select.params))
        by_units = self._by_units(cast(UnitSelector, selector), document, budget)
        return None if by_units.dense else by_units

    def _by_units(self, selector: UnitSelector, document: Attached, budget: int) -> UnitSelection:
        facts, kinds = self._facts, self._passes.kinds
        place, needed_by = (facts.identity, facts.folder), f"selector {selector.name}"
        if Needs.CHUNKS in selector.needs:
            heads = facts.kv_heads, self._preparer.geometry.head
            selector = selector.calibrated(calibration.find(*place, calibration.Chunks, heads, needed_by))
        if Needs.SKEWS in selector.needs:
            heads = self._preparer.geometry.q_heads, self._preparer.geometry.head
            selector = selector.skewed(calibration.find(*place, calibration.Skews, heads, needed_by))
        if Needs.EARLY in selector.needs:
            return EarlySelection(selector, document, budget, kinds)
        if Needs.INDEX in selector.needs:
            rope = facts.rope if Needs.ROPE in selector.needs else None
            return BlockSelection(selector, document, budget, kinds, rope)
        if Needs.SENTENCES not in selector.needs:
            return UnitSelection(selector, document, budget, kinds)
        return SentenceSelection(selector, document, budget, kinds, self._encoder.require_text("select.method"))

    def _by_policy(
        self, policy: Policy, document: Attached, budget: int, chosen: frozenset[str]
    ) -> PolicySelection | None:
        facts = self._facts
        entries = stored_entries(document, facts.kinds)
        if budget >= entries:
            return None
        view = self._preparer.of_model(self._encoder.stored_view(document.identity, entries))
        view = self._preparer.calibrated(view, policy)
        fitted = policy.fitted(view, Budget.resolve(entries, compression_ratio=None, budget_tokens=budget), chosen)
        return PolicySelection(fitted, document, budget, facts.kinds, view)

    def nearest(self, params: Sequence[Mapping[str, Any]], prompt: Prompt) -> int:
        """The number of the cache of an episode that a question is about, by its words: the model does not run. params:
        the policy parameters of each cache. Raises as `nearest_episode`."""
        return nearest_episode(params, self._encoder.words(prompt))

    def answer(self, cache: Caches, prompt: Prompt, route: Route | None, options: AnswerOptions) -> Answer:
        """See `Engine.answer`. route: only one or two of several documents answer, chosen by "likelihood" or
        "attention" as of `Narrowing`; "nearest": one of the caches of episodes. The share of the others among the
        `sources` is 0."""
        if route is None:
            return self.answers([(cache, prompt)], options)[0]
        caches = list(cache) if isinstance(cache, Iterable) else [cache]
        for part in caches:
            self._attachments.require_readable(part)
        usage = None
        if route == "nearest":
            places = [self.nearest([part.identity.policy_params for part in caches], prompt)]
        else:
            self._require_scope(options.suffix, len(caches))
            documents = list(map(self._attachments.of, caches))
            query = self._encoder.behind(documents[0].identity, prompt) if documents else []
            narrowing = self.narrowing(route, documents, query)
            while readings := narrowing.readings:
                narrowing.take([self.read(documents, places, query) for places in readings])
            places, usage = narrowing.places, narrowing.counted
        (answer,) = self.answers([([caches[at] for at in places], prompt)], options)
        shares = dict(zip(places, answer.sources, strict=True))
        sources = tuple(shares.get(at, 0.0) for at in range(len(caches)))
        return replace(answer, sources=sources, usage=answer.usage if usage is None else usage(answer.usage))

    def narrowing(self, route: Route, documents: Sequence[Attachment], query: Sequence[int]) -> Narrowing:
        """Chooses those of these documents that answer a question, by "likelihood" or "attention". query: its token
        ids. Raises `InvalidRequest` for another route, one document and one token, and as `Attachments.joined`."""
        self._require(routes=route)
        if route not in get_args(Route):
            raise InvalidRequest(f"route is {route!r}; it must be one of {', '.join(get_args(Route))}", param="route")
        require_several(len(documents))
        if len(query) < _LEAST_RATED:
            raise InvalidRequest(
                "a question of one token is about nothing; ask more, or leave route out", param="route"
            )
        self._attachments.joined(documents)
        return Narrowing(route, len(documents))

    def read(self, documents: Sequence[Attachment], places: Sequence[int], query: Sequence[int]) -> Answer:
        """The answer of one token that a `Narrowing` needs, over some of its documents, which must have arrived."""
        document = self._attachments.joined([documents[place] for place in places])
        (answer,) = self._stepped([self.start(document, query, Sampling(max_tokens=1), likelihood=len(places) == 1)])
        return answer

    def answers(self, questions: Sequence[tuple[Caches, Prompt]], options: AnswerOptions) -> list[Answer]:
        """See `Engine.answer_all`."""
        rows = []
        for cache, prompt in questions:
            caches = list(cache) if isinstance(cache, Iterable) else [cache]
            document = self._attachments.joined([self._attachments.of(part) for part in caches])
            query = self._encoder.behind(document.identity, prompt)
            selection = self.selection(document, options.select, len(query), options.suffix)
            reducer = None if options.suffix is None else self.reducer(options.suffix, len(query), document)
            rows.append(self.start(document, query, options.sampling, selection, reducer=reducer))
        return self._stepped(rows)

    def _stepped(self, rows: Sequence[Generation]) -> list[Answer]:
        """The answers, once all rows are finished. Raises the first error."""
        batch = self.batch()
        with kvshelf_attention(self._facts.model):  # otherwise each step would select and restore it
            while open_ones := [row for row in rows if not row.finished]:
                for outcome in batch.step(open_ones):
                    if isinstance(outcome, Exception):
                        raise outcome
        return [row.answer() for row in rows]


def _require_tail_of(document: Attached, tail: DocumentTail, selection: Selection | None, *, passages: bool) -> None:
    """Raises `InvalidRequest` where a tail is not of this document, or the answer has a selection or passages, too."""
    if tail.document is not document:
        raise InvalidRequest(
            "the reducer was made for another document; make one for each answer", param="suffix.scope"
        )
    if selection is not None or passages:
        raise InvalidRequest(
            "under suffix.scope cache an answer selects nothing and tells no passages, because entries that it read "
            "leave; take one of them",
            param="suffix.scope",
        )
