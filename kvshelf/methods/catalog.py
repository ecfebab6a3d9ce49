"""All methods as documentation, forms and plans need them. Needs no torch, unless another package brings a method."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

from kvshelf.methods.bundled import SOURCES
from kvshelf.methods.info import MethodInfo, packaged
from kvshelf.methods.method import POLICY, SELECTOR, SUFFIX_POLICY, Kind, unknown

KINDS = {kind.folder: kind for kind in (POLICY, SELECTOR, SUFFIX_POLICY)}


def catalog(kind: Kind = POLICY) -> list[MethodInfo]:
    """Every method of a kind with its parameters, ranges and source.

    kvshelf's own are `packaged`. Methods of other packages, and selectors that choose by their policies, come from
    their classes, and raise as `Registry` does. Last come the methods of installed `SOURCES`.
    """
    infos = list(packaged(kind))
    groups = {kind.group, *([POLICY.group] if kind == SELECTOR else [])}
    if any(entry_points(group=group) for group in groups):
        known = {info.name for info in infos}
        of_classes = import_module(f"kvshelf.methods.{kind.folder}.registry").infos()
        infos += [info for info in of_classes if info.name not in known]
    if kind == POLICY and any(find_spec(source.package) for source in SOURCES[kind.folder].values()):
        from kvshelf.methods.policies.registry import sourced_infos

        infos += sourced_infos()
    return infos


def policy_info(name: str) -> MethodInfo:
    """One policy. Raises `InvalidRequest` for an unknown name."""
    known = {info.name: info for info in catalog()}
    if name not in known:
        raise unknown(POLICY, name, known)
    return known[name]


def cost_name(policy: str, params: Mapping[str, Any]) -> str:
    """The name under which a policy's cost is measured.

    A policy around a `base` costs what its base costs. Around another base than its default, no bench has measured it.
    """
    base = params.get("base")
    parameter = policy_info(policy).parameters.get("base")
    return policy if parameter is None or base in (None, parameter.default) else f"{policy} around {base}"


def compress_share(cost: str) -> float | None:
    """`MethodInfo.compress_share` of a `cost_name`; None if nobody measured it."""
    return next((info.compress_share for info in catalog() if info.name == cost), None)
