"""Calls of tools in the channels of harmony (gpt-oss): a function's name as the recipient of a message of JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from kvshelf.api.tools import Tool
from kvshelf.engine.decode.grammar import WRITTEN
from kvshelf.engine.tools import calls
from kvshelf.model.text import TextFormat

_RECIPIENT: Final = "to=functions."
_BEHIND: Final = "<|channel|>commentary json<|message|>"
_HEADER: Final = re.compile(r"(?:<\|channel\|>commentary)?\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>\s*")


@dataclass(frozen=True)
class HarmonyCalls(calls.CallFormat):
    """A model names the recipient before its channel or behind it; templates before it. opening: up to the name."""

    @property
    def begins(self) -> tuple[str, ...]:
        turns = ("<|end|><|start|>assistant", "<|start|>assistant", "")
        return tuple(
            f"{turn}{channel}{_RECIPIENT}".strip() for turn, channel in product(turns, (" ", "<|channel|>commentary "))
        )

    @property
    def about(self) -> str:
        return f"{_RECIPIENT}...{_BEHIND}{{...}}"

    def may_follow(self, text: str, tools: Sequence[Tool]) -> bool:
        return calls.may_be_named(text, tools)

    def read(self, text: str, tools: Sequence[Tool]) -> calls.ParsedCalls | None:
        if (tool := calls.named_in(text, tools)) is None:
            return None
        if (header := _HEADER.match(text, len(tool.function.name))) is None:
            return None
        try:
            arguments, end = json.JSONDecoder().raw_decode(text, header.end())
        except (ValueError, RecursionError):
            return None
        if not isinstance(arguments, dict):
            return None
        return calls.ParsedCalls([calls.called(tool.function.name, arguments)], text[end:])

    def rules(self, tools: Sequence[Tool]) -> list[str]:
        literal = self.form.tokens.literal
        rules = [f"call: {literal(self.opening)} ({' | '.join(f'call_{at}' for at in range(len(tools)))})"]
        for at, tool in enumerate(tools):
            schema: dict[str, Any] = {**calls.parameters_of(tool), **WRITTEN}
            rules += [
                f"call_{at}: {json.dumps(tool.function.name)} {literal(_BEHIND)} arguments_{at}",
                f"arguments_{at}: %json {json.dumps(schema)}",
            ]
        return rules

    def grammar(self, tools: Sequence[Tool], *, several: bool) -> str:  # noqa: ARG002 - a call ends an answer
        return super().grammar(tools, several=False)


def as_harmony(form: TextFormat, write: calls.Write) -> HarmonyCalls | None:
    """Calls in channels; None for another way. write: up to the end of a turn, which is that of a recipient here."""
    opening, name, rest = write(calls.ONE).partition(calls.NAME)
    if not name or rest or not opening.endswith(_RECIPIENT):
        return None
    return HarmonyCalls(form, opening, "")
