"""Methods as documentation and forms show them, and their measured rows. Needs no torch."""

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
    """One method. measured: its `measured_rows` of the bundled model. The fields from `version` on are of policies
    alone."""

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
        """`Policy.stored_beside` with default parameters."""
        return {what: self.parameters[name].default if name else True for what, name in self.stored.items()}

    @property
    def compress_share(self) -> float | None:
        """The time that a policy adds to a prefill that keeps everything, as a share of that prefill's time; None if
        nobody measured it.

        It is the largest over all ratios, with default parameters, that the quality bench measured on kvshelf-tiny, for
        documents of 2,048 tokens on one thread of a CPU. Other models and lengths have other shares.
        """
        return max((row["compress_share"] for row in self.measured if row["codec"] == "none"), default=None)

    def to_dict(self) -> dict[str, Any]:
        """The fields of the API's object: its id is the name."""
        return {"id": self.name} | asdict(self)


@cache
def packaged(kind: Kind) -> tuple[MethodInfo, ...]:
    """kvshelf's own methods of a kind, from the catalog.json that `scripts/publish_quality.py` writes from their
    classes."""
    infos = []
    for method in json.loads((files("kvshelf") / "methods" / kind.folder / "catalog.json").read_text()):
        for name, rule in method["parameters"].items():
            choices = None if rule["choices"] is None else tuple(rule["choices"])
            method["parameters"][name] = ParameterInfo(**rule | {"choices": choices})
        infos.append(MethodInfo(**method, measured=measured_rows(kind, method["name"])))
    return tuple(infos)


@cache
def packaged_rows(which: Literal["rows", "selected"]) -> list[dict[str, Any]]:
    """The quality bench's rows of the bundled model: of answers that read all entries, or of selectors."""
    return _numbers("quality.json").get(which, [])


@cache
def suffix_rows() -> list[dict[str, Any]]:
    """The rows of `kvshelf bench speed --parts suffix` on the bundled model, with the fields of its `BoundedAnswer`:
    first the answer with all of its suffix, then a row for each suffix policy."""
    return _numbers("suffix.json").get("rows", [])


def _numbers(name: str) -> dict[str, list[dict[str, Any]]]:
    """A file that `scripts/publish_quality.py` wrote; empty if the package has none."""
    file = files("kvshelf") / "model" / "bundled" / "kvshelf-tiny" / name
    numbers: dict[str, list[dict[str, Any]]] = json.loads(file.read_text()) if file.is_file() else {}
    return numbers


_ROWS: Mapping[Kind, tuple[Literal["rows", "selected"], str]] = {
    POLICY: ("rows", "policy"),
    SELECTOR: ("selected", "select"),
}
"""The rows of each kind, and the field that names the method. The quality bench measures no suffix policy."""


def measured_rows(kind: Kind, name: str) -> list[dict[str, Any]]:
    """Results of the quality bench for one method.

    A policy has a row for each fraction removed and codec. `exact`: mean share of exact answers over the cells that the
    model solves with the full cache. `bytes_per_token`: stored bytes per document token. `compress_share`: the time
    that the policy adds to a prefill, divided by the time of that prefill. The rows of a selector are of a cache with
    all entries under int4: `share` of a document's tokens that an answer's token may read, `read_share` that it does,
    and `exact`.
    """
    if kind not in _ROWS:
        return []
    which, field_name = _ROWS[kind]
    return [dict(row) for row in packaged_rows(which) if row[field_name] == name]
