"""Parameters that ask for more than a budget has room for."""

from __future__ import annotations

from kvshelf.errors import PolicyUnsupported


def require_held(name: str, value: int, largest: int, budget_tokens: int) -> None:
    """Raise `PolicyUnsupported` where the parameter asks for more entries than the budget has room for."""
    if value > largest:
        raise PolicyUnsupported(
            f"{name} is {value}, and the budget of {budget_tokens} entries per KV head has room for {largest}; lower "
            f"{name} or raise the budget",
            param=f"policy_params.{name}",
        )


def fitted_sink(sink: int, budget_tokens: int, *, room: int, given: bool) -> int:
    """The number of sinks, at most `room`: a default shrinks, a given one raises `PolicyUnsupported`."""
    if given:
        require_held("sink", sink, room, budget_tokens)
    return min(sink, room)
