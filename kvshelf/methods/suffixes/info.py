"""A suffix policy as documentation and forms show it. Needs no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from kvshelf.methods.policies.info import ParameterInfo, packaged


@dataclass(frozen=True)
class SuffixPolicyInfo:
    """One suffix policy."""

    name: str
    summary: str
    details: list[str]
    advice: str
    source: str
    parameters: dict[str, ParameterInfo]

    def to_dict(self) -> dict[str, Any]:
        """The fields of the API's object of a suffix policy: its id is the name."""
        return {"id": self.name} | asdict(self)


@cache
def catalog() -> tuple[SuffixPolicyInfo, ...]:
    """Every suffix policy with its parameters, ranges and source."""
    return tuple(SuffixPolicyInfo(**about) for about in packaged("suffixes"))


@cache
def measured_rows() -> list[dict[str, Any]]:
    """What `kvshelf bench speed --parts suffix` measured on the bundled model, fields as of its `BoundedAnswer`: first
    the answer with all of its suffix, then a row for each policy."""
    file = files("kvshelf") / "model" / "bundled" / "kvshelf-tiny" / "suffix.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows
