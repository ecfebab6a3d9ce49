"""All selectors as documentation and forms need them. Needs no torch, unless another package has a selector or a
policy."""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import entry_points
from importlib.resources import files

from kvshelf.workers.policies.info import GROUP as POLICIES
from kvshelf.workers.policies.info import parameter_of
from kvshelf.workers.selectors.info import GROUP, SelectorInfo, measured_rows


def catalog() -> list[SelectorInfo]:
    """Every selector with its parameters, ranges and source.

    Those of kvshelf come from catalog.json, which `scripts/publish_quality.py` writes from their classes. Those of
    other packages, and those that choose by their policies, come from their classes, and raise as `installed` does.
    """
    ours = list(_ours())
    if not (entry_points(group=GROUP) or entry_points(group=POLICIES)):
        return ours
    from kvshelf.workers.selectors.registry import info_of, names

    known = {info.name for info in ours}
    return [*ours, *(info_of(name) for name in names() if name not in known)]


@cache
def _ours() -> tuple[SelectorInfo, ...]:
    packaged = json.loads((files("kvshelf") / "workers" / "selectors" / "catalog.json").read_text())
    return tuple(
        SelectorInfo(
            **about
            | {"parameters": {name: parameter_of(each) for name, each in about["parameters"].items()}}
            | {"measured": measured_rows(about["name"])}
        )
        for about in packaged
    )
