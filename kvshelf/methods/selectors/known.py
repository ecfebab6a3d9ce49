"""All selectors as documentation and forms need them. Needs no torch, unless another package has a selector or a
policy."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from kvshelf.methods.policies.info import GROUP as POLICIES
from kvshelf.methods.policies.info import packaged
from kvshelf.methods.selectors.info import GROUP, SelectorInfo, measured_rows


def catalog() -> list[SelectorInfo]:
    """Every selector with its parameters, ranges and source.

    Those of kvshelf are `packaged`. Those of other packages, and those that choose by their policies, come from their
    classes, and raise as `installed` does.
    """
    ours = list(_ours())
    if not (entry_points(group=GROUP) or entry_points(group=POLICIES)):
        return ours
    from kvshelf.methods.selectors.registry import info_of, names

    known = {info.name for info in ours}
    return [*ours, *(info_of(name) for name in names() if name not in known)]


@cache
def _ours() -> tuple[SelectorInfo, ...]:
    return tuple(SelectorInfo(**about, measured=measured_rows(about["name"])) for about in packaged("selectors"))
