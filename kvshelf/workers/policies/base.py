"""What a policy is: the mechanism (`Policy`), its one common case (`ScoringPolicy`), and what a policy may look at
(`LayerView`).

A policy is a frozen dataclass in a file of its own. Its fields are its parameters; `parameter()` gives each one its
default, range and help text, from which requests are checked and `kvshelf policies` is printed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.kernels.select import gather, select
from kvshelf.store.artifact import Kept
from kvshelf.workers.budgets import Budget, LayerBudget


class Phase(Enum):
    """When a policy can act. So far every policy needs one layer at a time."""

    DURING = "during"
    """At once, as each layer's attention is done: the peak is one full layer beside what was kept of the others."""


class Observes(Enum):
    """What of the prefill a policy must see besides keys and values."""

    NOTHING = "nothing"
    WINDOW_QUERIES = "window_queries"


@dataclass(frozen=True, eq=False)
class LayerView:
    """One layer of a prefilled document, as a policy sees it. Read-only; it is freed when the layer is reduced.

    keys: `[kv_heads, N, D]` and values: `[kv_heads, N, Dv]`, after RoPE and any key norm. queries: `[q_heads, N, D]`,
    likewise, and None unless the policy observes them. `protected_prefix` counts the tokens the chat template put
    before the document; they are never evicted.
    """

    layer_idx: int
    keys: Tensor
    values: Tensor
    queries: Tensor | None
    scaling: float
    protected_prefix: int

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[1]

    @cached_property
    def positions(self) -> Tensor:
        """Original positions `[N]`."""
        return torch.arange(self.num_tokens, device=self.keys.device)

    def window_queries(self, window: int) -> Tensor:
        """Queries of the last `window` tokens, `[q_heads, w, D]`."""
        assert self.queries is not None, "the policy must say that it observes them"
        return self.queries[:, -window:]


def parameter(
    default: Any, help: str, *, minimum: float | None = None, choices: tuple[Any, ...] | None = None, odd: bool = False
) -> Any:
    """A policy's parameter: a dataclass field that knows its legal range."""
    return field(default=default, metadata={"help": help, "minimum": minimum, "choices": choices, "odd": odd})


@dataclass(frozen=True)
class Policy(ABC):
    """One layer in, one reduced layer out.

    `version` is raised by hand whenever the entries a policy chooses can change; it is part of a cache's identity.
    `source` names the paper. The class docstring's first line is the summary people are shown.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    version: ClassVar[int] = 1
    phase: ClassVar[Phase] = Phase.DURING
    observes: ClassVar[Observes] = Observes.NOTHING
    takes_budget: ClassVar[bool] = True

    @abstractmethod
    def reduce(self, layer: LayerView, budget: LayerBudget) -> Kept:
        """Reduce one layer to its budget. Must not modify the view; same view, same result."""

    def fitted(self, num_tokens: int, budget: Budget, protected_prefix: int, given: frozenset[str]) -> Self:  # noqa: ARG002
        """This policy with the defaults that were not `given` shrunk to the document and the budget.

        Raises `PolicyUnsupported` where given values cannot be held by the budget.
        """
        if budget.tokens <= protected_prefix:
            raise PolicyUnsupported(
                f"the budget of {budget.tokens} entries per KV head is filled by the {protected_prefix} tokens of the "
                "chat "
                "template, which are always kept; lower compression_ratio or raise budget_tokens",
                param="compression_ratio",
            )
        return self

    def parameters(self) -> dict[str, Any]:
        """The parameters as used."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def build(cls, given: Mapping[str, Any]) -> Self:
        """Make the policy from a request's parameters. Raises `InvalidRequest` naming the parameter and its range."""
        known = {f.name: f for f in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise InvalidRequest(
                    f"policy {cls.name!r} has no parameter {name!r}; it has {', '.join(known) or 'none'}",
                    param=f"policy_params.{name}",
                )
            _check(cls.name, name, value, type(known[name].default), known[name].metadata)
        return cls(**given)


@dataclass(frozen=True)
class ScoringPolicy(Policy):
    """The common case: score every token of every head, keep the best."""

    @abstractmethod
    def score(self, layer: LayerView) -> Tensor:
        """`[kv_heads, N]` fp32, higher is kept."""

    def protected(self, layer: LayerView) -> Tensor:
        """`[N]` bool: tokens kept whatever their score. A mask, because no score is safely above all others."""
        return layer.positions < layer.protected_prefix

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Kept:
        return keep(layer, select(self.score(layer), self.protected(layer), budget.per_head))


def keep(layer: LayerView, mask: Tensor) -> Kept:
    """The record of the entries where `mask` `[kv_heads, N]` is set."""
    lengths = mask.sum(dim=1).tolist()
    return Kept(
        keys=gather(layer.keys, mask),
        values=gather(layer.values, mask),
        entry_positions=mask.nonzero()[:, 1].to(torch.int32),
        offsets=tuple(accumulate(lengths, initial=0)),
    )


def _check(policy: str, name: str, value: Any, expected: type, rule: Mapping[str, Any]) -> None:
    legal = f"one of {', '.join(map(repr, rule['choices']))}" if rule["choices"] else expected.__name__
    if rule["odd"]:
        legal = f"an odd {legal}"
    if rule["minimum"] is not None:
        legal += f" from {rule['minimum']}"
    numeric = expected is float and isinstance(value, int) and not isinstance(value, bool)
    fits = type(value) is expected or numeric
    fits = fits and (rule["choices"] is None or value in rule["choices"])
    fits = fits and (rule["minimum"] is None or value >= rule["minimum"]) and (not rule["odd"] or value % 2 == 1)
    if not fits:
        raise InvalidRequest(
            f"parameter {name!r} of policy {policy!r} is {value!r}; it must be {legal}", param=f"policy_params.{name}"
        )
