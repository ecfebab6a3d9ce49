"""A selector as documentation and forms show it, and what it measured. Needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from kvshelf.methods.policies.info import ParameterInfo, packaged_rows

GROUP: Final = "kvshelf.selectors"
"""The entry points under which other packages name their selectors."""


@dataclass(frozen=True)
class SelectorInfo:
    """One selector. `measured`: its rows of the quality bench, over a cache with all entries under int4: `share` of a
    document's tokens that a token of an answer may read, `read_share` that it read, and `exact` answers."""

    name: str
    summary: str
    details: list[str]
    advice: str
    source: str
    parameters: dict[str, ParameterInfo]
    measured: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """The fields of the API's selector object: its id is the name."""
        return {"id": self.name} | asdict(self)


def measured_rows(selector: str) -> list[dict[str, Any]]:
    """The rows of a selector that `scripts/publish_quality.py` wrote; empty if the package contains none."""
    return [dict(row) for row in packaged_rows("selected") if row["select"] == selector]
