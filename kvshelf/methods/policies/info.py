"""A policy as documentation and forms show it, and what it measured. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final, Literal

GROUP: Final = "kvshelf.policies"
"""The entry points under which other packages name their policies."""


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter of a policy, as documentation and forms show it."""

    type: str
    default: Any
    help: str
    legal: str
    minimum: float | None
    maximum: float | None
    choices: tuple[Any, ...] | None
    odd: bool


def packaged(kind: Literal["policies", "selectors", "suffixes"]) -> list[dict[str, Any]]:
    """The fields of each of ours, from the catalog.json that `scripts/publish_quality.py` writes from their classes."""
    about = json.loads((files("kvshelf") / "methods" / kind / "catalog.json").read_text())
    return [each | {"parameters": {name: _parameter(p) for name, p in each["parameters"].items()}} for each in about]


def _parameter(said: Mapping[str, Any]) -> ParameterInfo:
    return ParameterInfo(**{**said, "choices": None if said["choices"] is None else tuple(said["choices"])})


@dataclass(frozen=True)
class PolicyInfo:
    """One policy, as documentation and forms show it. `measured`: its rows of the quality bench (`measured_rows`)."""

    name: str
    version: int
    summary: str
    details: list[str]
    advice: str
    source: str
    phase: str
    takes_budget: bool
    takes_questions: bool
    measured: list[dict[str, Any]]
    parameters: dict[str, ParameterInfo]

    @property
    def compress_share(self) -> float | None:
        """What the policy adds to a prefill that keeps everything, as a share of its time; None if nobody measured it.

        The most of all ratios, with default parameters, as the quality bench measured it on kvshelf-tiny: documents of
        2,048 tokens on one thread of a CPU. On other models and lengths it is another one.
        """
        return max((row["compress_share"] for row in self.measured if row["codec"] == "none"), default=None)

    def to_dict(self) -> dict[str, Any]:
        """The fields of the API's policy object: its id is the name."""
        return {"id": self.name} | asdict(self)


@cache
def packaged_rows(which: Literal["rows", "selected"]) -> list[dict[str, Any]]:
    """What the quality bench measured on the bundled model: rows that read all, or what selectors read."""
    file = files("kvshelf") / "model" / "bundled" / "kvshelf-tiny" / "quality.json"
    return json.loads(file.read_text()).get(which, []) if file.is_file() else []


def measured_rows(policy: str) -> list[dict[str, Any]]:
    """Results of the quality bench on the bundled model, as `scripts/publish_quality.py` wrote them; empty if the
    package contains none. Each row is of one fraction removed and one codec. `exact`: mean share of exact answers over
    the cells that the model solves with the full cache. `bytes_per_token`: stored bytes per document token.
    `compress_share`: the time that the policy adds to a prefill, divided by the time of that prefill."""
    return [dict(row) for row in packaged_rows("rows") if row["policy"] == policy]
