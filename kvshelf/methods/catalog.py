"""All methods as documentation, forms and plans need them. Needs no torch, unless another package has one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

from kvshelf.methods.bundled import SOURCES
from kvshelf.methods.info import MethodInfo, packaged
from kvshelf.methods.method import POLICY, SELECTOR, SUFFIX_POLICY, Kind
from kvshelf.methods.parameters import unknown

KINDS = {kind.folder: kind for kind in (POLICY, SELECTOR, SUFFIX_POLICY)}


def catalog(kind: Kind = POLICY) -> list[MethodInfo]:
    """Every method of a kind with its parameters, ranges and source.

    Those of kvshelf are `packaged`. Those of other packages, and selectors that choose by their policies, come from
    their classes, and raise as `Registry` does. Last come those of sources, where these are installed.
    """
    ours = list(packaged(kind))
    groups = {kind.group, *([POLICY.group] if kind == SELECTOR else [])}
    if any(entry_points(group=group) for group in groups):
        known = {info.name for info in ours}
        ours += [info for info in _from_classes(kind) if info.name not in known]
    if kind == POLICY and any(find_spec(source.package) for source in SOURCES[kind.folder].values()):
        ours += _sourced()
    return ours


@cache
def _sourced() -> list[MethodInfo]:
    from kvshelf.methods.policies.registry import sourced_infos

    return sourced_infos()


def _from_classes(kind: Kind) -> list[MethodInfo]:
    from kvshelf.methods.policies import registry as policies
    from kvshelf.methods.selectors import registry as selectors
    from kvshelf.methods.suffixes import registry as suffixes

    return {POLICY: policies.infos, SELECTOR: selectors.infos, SUFFIX_POLICY: suffixes.infos}[kind]()


def policy_info(name: str) -> MethodInfo:
    """One policy. Raises `InvalidRequest` for an unknown name."""
    known = {info.name: info for info in catalog()}
    if name not in known:
        raise unknown(POLICY.noun, name, known, POLICY.param)
    return known[name]


def cost_name(policy: str, params: Mapping[str, Any]) -> str:
    """The name under which a policy's cost is measured.

    A policy that lets another one score, its `base`, costs what that one costs: around another base than by default its
    cost is another one, which no bench has measured.
    """
    base = params.get("base")
    about = policy_info(policy).parameters.get("base")
    return policy if about is None or base in (None, about.default) else f"{policy} around {base}"


def compress_share(cost: str) -> float | None:
    """`MethodInfo.compress_share` of a `cost_name`; None if nobody measured it."""
    return next((info.compress_share for info in catalog() if info.name == cost), None)
