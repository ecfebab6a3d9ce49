"""The options that several requests and `Engine` share: each is declared here, once, and reaches every surface.

A class is the value that travels from a request to the place that acts on it. The `...Fields` below it are its keyword
arguments, as clients and `Engine` take them: a type checker reads no keywords out of a class. A test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, TypedDict, cast

from pydantic import Field

from kvshelf.api.strict import RequestBody, Seed, Stops, Temperature, TopP


class Ask(RequestBody):
    """How the tokens of an answer are chosen, wherever a question is asked."""

    temperature: Temperature = Field(0.0, description="sampling temperature; 0 takes the most likely token")
    top_p: TopP = Field(1.0, description="sample from the most likely tokens with this total probability")
    seed: Seed | None = Field(None, description="makes sampling repeatable")
    stop: Stops | None = Field(None, description="text that ends the answer")

    @classmethod
    def of(cls, fields: Mapping[str, object]) -> Self:
        """From keyword arguments, of which None means absent. Raises `TypeError` for other names, as a call does; what
        uses a value checks it."""
        if unknown := fields.keys() - cls.model_fields.keys():
            raise TypeError(f"got an unexpected keyword argument {min(unknown)!r}")
        told: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
        return cast(Self, cls.model_construct(**told))

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts of `stop`."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class AskFields(TypedDict, total=False):
    """How the tokens of an answer are chosen, see `Ask`. Temperature 0 is greedy. None means absent."""

    temperature: float | None
    top_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
