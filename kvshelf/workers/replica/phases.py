"""Where the time of one call went. Replicas tell it with their replies: they serve no numbers of their own."""

from __future__ import annotations

from typing import NamedTuple


class Phase(NamedTuple):
    """A part of a call: it began `start_s` seconds after the replica took the call up, and took `seconds`."""

    name: str
    start_s: float
    seconds: float


def in_sequence(**seconds: float) -> tuple[Phase, ...]:
    """Phases of these lengths, each beginning where the one before it ended."""
    found: list[Phase] = []
    start_s = 0.0
    for name, length in seconds.items():
        found.append(Phase(name, start_s, length))
        start_s += length
    return tuple(found)


def rounded(phases: tuple[Phase, ...]) -> dict[str, float]:
    """Their seconds by name, for a log line."""
    return {f"{phase.name}_s": round(phase.seconds, 4) for phase in phases}
