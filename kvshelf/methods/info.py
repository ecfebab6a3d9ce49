"""A method as documentation and forms show it, and what it measured. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from kvshelf.methods.method import POLICY, SELECTOR, Kind


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter of a method, as documentation and forms show it."""

    type: str
    default: Any
    help: str
    legal: str
    minimum: float | None
    maximum: float | None
    choices: tuple[Any, ...] | None
    odd: bool


@dataclass(frozen=True)
class MethodInfo:
    """One method. measured: its rows of the quality bench on the bundled model (`measured_rows`). version, phase,
    takes_budget, takes_questions and stored say something of policies alone."""

    name: str
    summary: str
    details: list[str]
    advice: str
    source: str
    parameters: dict[str, ParameterInfo]
    measured: list[dict[str, Any]]
    version: int = 1
    phase: str = "during"
    takes_budget: bool = True
    takes_questions: bool = False
    stored: dict[str, str] = field(default_factory=dict)

    @property
    def stored_beside(self) -> dict[str, Any]:
        """What a cache has beside whole entries, with default parameters: see `Policy.stored`."""
        return {what: self.parameters[name].default if name else True for what, name in self.stored.items()}

    @property
    def compress_share(self) -> float | None:
        """What a policy adds to a prefill that keeps everything, as a share of its time; None if nobody measured it.

        The most of all ratios, with default parameters, as the quality bench measured it on kvshelf-tiny: documents of
        2,048 tokens on one thread of a CPU. On other models and lengths it is another one.
        """
        return max((row["compress_share"] for row in self.measured if row["codec"] == "none"), default=None)

    def to_dict(self) -> dict[str, Any]:
        """The fields of the API's object: its id is the name."""
        return {"id": self.name} | asdict(self)


@cache
def packaged(kind: Kind) -> tuple[MethodInfo, ...]:
    """kvshelf's own methods of a kind, from the catalog.json that `scripts/publish_quality.py` writes from their
    classes."""
    about = json.loads((files("kvshelf") / "methods" / kind.folder / "catalog.json").read_text())
    return tuple(
        MethodInfo(
            **each | {"parameters": {name: _parameter(said) for name, said in each["parameters"].items()}},
            measured=measured_rows(kind, each["name"]),
        )
        for each in about
    )


def _parameter(said: Mapping[str, Any]) -> ParameterInfo:
    return ParameterInfo(**{**said, "choices": None if said["choices"] is None else tuple(said["choices"])})


@cache
def packaged_rows(which: Literal["rows", "selected"]) -> list[dict[str, Any]]:
    """What the quality bench measured on the bundled model: rows that read all, or what selectors read."""
    return _numbers("quality.json").get(which, [])


@cache
def suffix_rows() -> list[dict[str, Any]]:
    """What `kvshelf bench speed --parts suffix` measured on the bundled model, fields as of its `BoundedAnswer`: first
    the answer with all of its suffix, then a row for each suffix policy."""
    return _numbers("suffix.json").get("rows", [])


def _numbers(name: str) -> dict[str, list[dict[str, Any]]]:
    """A file of numbers, as `scripts/publish_quality.py` wrote it; empty if the package contains none."""
    file = files("kvshelf") / "model" / "bundled" / "kvshelf-tiny" / name
    numbers: dict[str, list[dict[str, Any]]] = json.loads(file.read_text()) if file.is_file() else {}
    return numbers


_ROWS: Mapping[Kind, tuple[Literal["rows", "selected"], str]] = {
    POLICY: ("rows", "policy"),
    SELECTOR: ("selected", "select"),
}
"""Which rows are of which kind, and the field that names the method. Of suffix policies the bench measures nothing."""


def measured_rows(kind: Kind, name: str) -> list[dict[str, Any]]:
    """Results of the quality bench for one method.

    Of a policy each row is of one fraction removed and one codec. `exact`: mean share of exact answers over the cells
    that the model solves with the full cache. `bytes_per_token`: stored bytes per document token. `compress_share`: the
    time that the policy adds to a prefill, divided by the time of that prefill. Of a selector they are over a cache
    with all entries under int4: `share` of a document's tokens that a token of an answer may read, `read_share` that
    it read, and `exact`.
    """
    if kind not in _ROWS:
        return []
    which, named = _ROWS[kind]
    return [dict(row) for row in packaged_rows(which) if row[named] == name]
