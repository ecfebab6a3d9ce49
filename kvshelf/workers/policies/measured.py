"""Results of the quality bench for each policy on the bundled model, packaged as rows.

`scripts/publish_quality.py` writes the file from a report of `kvshelf bench quality`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class MeasuredRow:
    """One policy, fraction removed and codec. `exact`: mean share of exact answers over the cells that the model can do
    with the full cache; bytes per document token as stored; time of the policy over that of its prefill."""

    policy: str
    removed: float
    codec: str
    exact: float
    bytes_per_token: float
    compress_share: float


@cache
def measured_rows() -> tuple[MeasuredRow, ...]:
    """The packaged rows; none where the package brings none."""
    file = files("kvshelf") / "models" / "kvshelf-tiny" / "quality.json"
    if not file.is_file():
        return ()
    return tuple(MeasuredRow(**row) for row in json.loads(file.read_text())["rows"])
