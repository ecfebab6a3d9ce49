"""The options of `Engine` as values: how a document is reduced, and how a question is answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypedDict, get_args

from kvshelf.api import Select, SuffixOptions
from kvshelf.api.creation import default_policy
from kvshelf.api.options import Ask, AskFields
from kvshelf.api.queries import SuffixScope
from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.identity import Identity
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.decode.grammar import Grammar
from kvshelf.engine.exclusions import Combination, require_possible
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.methods.policies.base import Policy
from kvshelf.methods.policies.budgets import Budget
from kvshelf.methods.policies.registry import build
from kvshelf.methods.policies.view import DocumentView


class CompressFields(TypedDict, total=False):
    """The keyword arguments of `Engine.prepare` that are fields of `CompressOptions`."""

    policy: str | None
    compression_ratio: float | None
    budget_tokens: int | None
    policy_params: Mapping[str, Any] | None
    expected_questions: Sequence[str]


@dataclass(frozen=True)
class CompressOptions:
    """How a document, or tokens that are appended to a cache, are reduced: see `Engine.prepare`."""

    policy: str | None = None
    compression_ratio: float | None = None
    budget_tokens: int | None = None
    policy_params: Mapping[str, Any] | None = None
    expected_questions: Sequence[str] = ()

    @property
    def chosen_params(self) -> frozenset[str]:
        return frozenset(self.policy_params or {})

    @property
    def sizes(self) -> dict[str, Any]:
        """The fields that say how much stays, without those that are None."""
        fields = {"compression_ratio": self.compression_ratio, "budget_tokens": self.budget_tokens}
        return {name: value for name, value in fields.items() if value is not None}

    def built(self, default: str = "") -> Policy:
        """The policy. default: its name where none is named; "": as of a document by itself. Raises `InvalidRequest`,
        also for a size or questions that it does not take."""
        params = dict(self.policy_params or {})
        name = self.policy
        if name is None:
            name = default or default_policy({**self.sizes, "policy_params": params})
        policy = build(name, params)
        require_possible(Combination(policy=policy, sizes=self.sizes, questions=self.expected_questions))
        return policy

    def behind(self, identity: Identity) -> Self:
        """The options for tokens that are appended to a cache with this identity: in chunks its policy goes on, by its
        parameters where these name no others."""
        params = dict(self.policy_params or {})
        if params.get("prefill") != "chunked" or self.policy not in (None, identity.policy):
            return self
        return replace(self, policy_params={**identity.policy_params, **params})

    def budget(
        self,
        policy: Policy,
        document: DocumentView,
        default_ratio: float | None = None,
        *,
        before: CompressedCache | None = None,
    ) -> Budget:
        """The budget of the policy for a document. default_ratio: where no size is set; None: half is removed. before:
        the cache whose entries compete with those of the document. The size is of the tokens of both, and tokens that
        the cache has dropped do not come back."""
        if policy.sizes_itself:
            protected = document.num_protected
            if protected == document.num_tokens:  # which is refused, and of no tokens nothing has a size
                return Budget.full(protected)
            return policy.own_budget(document.judged).with_protected(protected, document.num_tokens)
        ratio = self.compression_ratio if self.sizes else default_ratio
        read, kept = (0, 0) if before is None else (before.num_tokens, before.kept_tokens)
        tokens = document.num_tokens
        budget = Budget.resolve(read + tokens, compression_ratio=ratio, budget_tokens=self.budget_tokens)
        if before is not None and budget.tokens <= policy.first_kept:
            raise self._too_small(budget, policy.first_kept)
        return replace(budget, tokens=min(budget.tokens, kept + tokens))

    def _too_small(self, budget: Budget, first_kept: int) -> PolicyUnsupported:
        """The error about the size, because a caller cannot choose the parameters of a cache that goes on."""
        size, advice, param = f"budget_tokens is {budget.tokens}", "raise it", "budget_tokens"
        if self.budget_tokens is None:
            size = f"compression_ratio {budget.compression_ratio} leaves {budget.tokens} entries per KV head"
            advice, param = "lower it", "compression_ratio"
        return PolicyUnsupported(
            f"{size}, for the cache and what is appended together, and the cache was made to keep its first "
            f"{first_kept} tokens (sink); {advice} so that more than {first_kept} entries stay",
            param=param,
        )


class BoundFields(TypedDict, total=False):
    """The options of `Engine.bound` beside the policy, as in `suffix` of `Engine.answer`."""

    budget: int | None
    params: Mapping[str, Any] | None


class AnswerFields(AskFields, total=False):
    """The keyword arguments of `Engine.answer` and `Engine.answer_all`."""

    max_new_tokens: int
    select: str | None
    select_tokens: int | None
    select_params: Mapping[str, Any] | None
    suffix: Mapping[str, Any] | None
    shape: Mapping[str, Any] | None
    logprobs: int | None


@dataclass(frozen=True)
class AnswerOptions:
    """How a question is answered. select: which entries the answer reads; None: all. suffix: which of its own stay in
    memory; None: all."""

    sampling: Sampling
    select: Select | None
    suffix: SuffixOptions | None

    @classmethod
    def of(
        cls,
        max_new_tokens: int = 32,
        select: str | None = None,
        select_tokens: int | None = None,
        select_params: Mapping[str, Any] | None = None,
        suffix: Mapping[str, Any] | None = None,
        shape: Mapping[str, Any] | None = None,
        logprobs: int | None = None,
        **ask: object,
    ) -> Self:
        """From `AnswerFields`; ask: those of `AskFields`. Raises `InvalidRequest` for options that no answer has."""
        grammar = None if shape is None else Grammar.of(_mapping(shape, "shape"))
        sampling = Sampling(max_new_tokens, Ask.of(ask), grammar, logprobs)
        for name, value in (("select_tokens", select_tokens), ("select_params", select_params)):
            if select is None and value not in (None, {}):
                raise InvalidRequest(f"{name} is of a selector, and none is named; give select, too", param=name)
        params = {} if select_params is None else _mapping(select_params, "select_params")
        chosen = None if select is None else Select.model_construct(method=select, tokens=select_tokens, params=params)
        bound = None if suffix is None else SuffixOptions.model_construct(**_suffix_fields(suffix))
        return cls(sampling, chosen, bound)


def _mapping(value: object, param: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{param} is {value!r:.80}; it maps names to values", param=param)
    return dict(value)


def _suffix_fields(suffix: Mapping[str, Any]) -> dict[str, Any]:
    """A checked copy of a suffix: `policy`, and perhaps `scope`, `budget` and `params`. Raises `InvalidRequest` for
    other fields, another scope, and a budget that is no integer from 1."""
    fields = _mapping(suffix, "suffix")
    for name in fields.keys() - {"policy", "scope", "budget", "params"}:
        raise InvalidRequest(f"suffix has no {name!r}; it has policy, scope, budget and params", param=f"suffix.{name}")
    if not isinstance(fields.get("policy"), str):
        raise InvalidRequest("suffix needs the name of a policy", param="suffix.policy")
    if (scope := fields.get("scope", "suffix")) not in get_args(SuffixScope):
        raise InvalidRequest(f"suffix.scope is {scope!r}; it must be suffix or cache", param="suffix.scope")
    budget = fields.get("budget")
    if budget is not None and (type(budget) is not int or budget < 1):
        raise InvalidRequest(f"suffix.budget is {budget!r}; it must be an integer from 1", param="suffix.budget")
    if not isinstance(fields.get("params") or {}, Mapping):
        raise InvalidRequest("suffix.params must map names to values", param="suffix.params")
    return fields
