"""How a question of `Engine.answer` is answered: its keyword arguments, and the value that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kvshelf.api import Select, SuffixOptions
from kvshelf.api.options import Ask, AskFields
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.decode.grammar import Grammar
from kvshelf.engine.requirements import require_suffix_fields


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
    """select: what the answer reads; None: all. suffix: what stays of it in memory; None: all."""

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
        """From `AnswerFields`; ask: those of `AskFields`. Raises `InvalidRequest` for what no answer can have."""
        sampling = Sampling(max_new_tokens, Ask.of(ask), Grammar.of(shape) if shape else None, logprobs)
        params = {} if select_params is None else dict(select_params)
        chosen = None if select is None else Select.model_construct(method=select, tokens=select_tokens, params=params)
        bound = None if suffix is None else SuffixOptions.model_construct(**require_suffix_fields(suffix))
        return cls(sampling, chosen, bound)
