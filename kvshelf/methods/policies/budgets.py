"""Budgets: how many entries of a cache stay, as integers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvshelf.errors import DocumentTooShort, InvalidRequest, PolicyUnsupported, as_share

DEFAULT_COMPRESSION_RATIO = 0.5


@dataclass(frozen=True)
class Budget:
    """tokens: mean number of entries kept per layer and KV head, sinks and windows included. compression_ratio: the
    fraction REMOVED (kvpress's meaning): 0.75 keeps a quarter."""

    tokens: int
    compression_ratio: float

    @classmethod
    def resolve(cls, num_tokens: int, *, compression_ratio: float | None, budget_tokens: int | None) -> Budget:
        """The budget of a document, from a ratio or a number of tokens, by default from the default ratio."""
        if compression_ratio is not None and budget_tokens is not None:
            raise InvalidRequest(
                f"compression_ratio ({compression_ratio}) and budget_tokens ({budget_tokens}) say the same thing in "
                "two ways; give one of them",
                param="budget_tokens",
            )
        if budget_tokens is not None:
            return cls._from_tokens(num_tokens, budget_tokens)
        return cls._from_ratio(
            num_tokens, DEFAULT_COMPRESSION_RATIO if compression_ratio is None else compression_ratio
        )

    @classmethod
    def full(cls, num_tokens: int) -> Budget:
        """Everything stays."""
        return cls(num_tokens, 0.0)

    def beside(self, protected: int, num_tokens: int) -> Budget:
        """The budget of the tokens that are not protected, in a document of `num_tokens`."""
        if not protected:
            return self
        tokens = self.tokens - protected
        return Budget(tokens, 1 - tokens / (num_tokens - protected))

    def with_protected(self, protected: int, num_tokens: int) -> Budget:
        """Undoes `beside`."""
        if not protected:
            return self
        tokens = self.tokens + protected
        return Budget(tokens, 1 - tokens / num_tokens)

    @classmethod
    def _from_tokens(cls, num_tokens: int, budget_tokens: int) -> Budget:
        if isinstance(budget_tokens, bool) or not isinstance(budget_tokens, int) or budget_tokens < 1:
            raise InvalidRequest(
                f"budget_tokens is {budget_tokens!r}; it is the number of entries kept per KV head, an integer from 1",
                param="budget_tokens",
            )
        tokens = min(budget_tokens, num_tokens)
        return cls(tokens, 1 - tokens / num_tokens)

    @classmethod
    def _from_ratio(cls, num_tokens: int, ratio: float) -> Budget:
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio < 1:
            raise InvalidRequest(
                f"compression_ratio is {ratio!r}; it is the fraction removed, a number from 0 up to but not "
                f"including 1{as_share(ratio)}",
                param="compression_ratio",
            )
        # 1000 * (1 - 0.9) is 99.99...; the small term makes it the 100 that was meant.
        tokens = math.floor(num_tokens * (1 - ratio) + 1e-9)
        if tokens < 1:
            raise DocumentTooShort(
                f"removing {ratio:.6g} of a document of {num_tokens} tokens leaves nothing; lower compression_ratio or "
                "send a longer document",
                param="compression_ratio",
            )
        return cls(tokens, float(ratio))


@dataclass(frozen=True)
class LayerBudget:
    """Entries each KV head of one layer may keep."""

    per_head: tuple[int, ...]

    @classmethod
    def uniform(cls, kv_heads: int, tokens: int) -> LayerBudget:
        return cls((tokens,) * kv_heads)

    @property
    def total(self) -> int:
        return sum(self.per_head)


@dataclass(frozen=True)
class WholeLayers:
    """The first `first` layers and the last `last` keep everything, and the others pay for them, on the same total."""

    first: int = 0
    last: int = 0

    def of_layer(self, place: int, num_layers: int, num_tokens: int, budget: LayerBudget) -> LayerBudget:
        """The budget of the layer at `place`. budget: the mean. The first paying layers get the remainder."""
        if self == WholeLayers():
            return budget
        heads = len(budget.per_head)
        if not self.first <= place < num_layers - self.last:
            return LayerBudget.uniform(heads, num_tokens)
        total = self._of_others(num_layers, num_tokens, budget.total // heads)
        share, remainder = divmod(total, num_layers - self.first - self.last)
        return LayerBudget.uniform(heads, share + (place - self.first < remainder))

    def fewest(self, num_layers: int | None, num_tokens: int, mean: int, least: int, param: str) -> int:
        """Entries of each KV head of a layer that is not whole. Raises `PolicyUnsupported` below `least`. num_layers:
        None without a model; then no layer may be whole."""
        if self == WholeLayers():
            return mean
        whole, layers = self.first + self.last, num_layers or 0
        share = self._of_others(layers, num_tokens, mean) // (layers - whole) if layers > whole else -1
        if share < least:
            raise PolicyUnsupported(
                f"{whole} of {layers} layers stay whole, with {num_tokens} entries per KV head; a mean budget of "
                f"{mean} leaves {max(0, share)} for each of the others, and the policy needs {least}; lower {param} or "
                "compression_ratio",
                param=f"policy_params.{param}",
            )
        return share

    def _of_others(self, num_layers: int, num_tokens: int, mean: int) -> int:
        return mean * num_layers - (self.first + self.last) * num_tokens


def require_room(name: str, value: int, room: int, budget_tokens: int) -> None:
    """Raise `PolicyUnsupported` where the parameter asks for more entries than the budget has room for."""
    if value > room:
        raise PolicyUnsupported(
            f"{name} is {value}, and the budget of {budget_tokens} entries per KV head has room for {room}; lower "
            f"{name} or raise the budget",
            param=f"policy_params.{name}",
        )


def fitted_sink(sink: int, budget_tokens: int, *, room: int, requested: bool) -> int:
    """The number of sinks. A default shrinks to `room`; a request for more raises `PolicyUnsupported`."""
    if requested:
        require_room("sink", sink, room, budget_tokens)
    return min(sink, room)
