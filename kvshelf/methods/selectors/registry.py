"""The selectors by name. A new selector is a file here and a name in `_OURS`, or an installed package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvshelf.errors import InvalidRequest
from kvshelf.methods.policies.base import require_parameters
from kvshelf.methods.policies.installed import installed
from kvshelf.methods.policies.parameters import unknown
from kvshelf.methods.policies.registry import POLICIES, paragraphs, parameters_of
from kvshelf.methods.selectors.base import Selector, UnitSelector
from kvshelf.methods.selectors.by_policy import ByPolicy, can_select
from kvshelf.methods.selectors.fasa import Fasa
from kvshelf.methods.selectors.infllm import InfLLM
from kvshelf.methods.selectors.info import GROUP, SelectorInfo, measured_rows
from kvshelf.methods.selectors.mpcache import MPCache
from kvshelf.methods.selectors.quest import Quest
from kvshelf.methods.selectors.sentencekv import SentenceKV

_OURS: Mapping[str, type[UnitSelector]] = {cls.name: cls for cls in (Quest, Fasa, InfLLM, MPCache, SentenceKV)}

_PREFIX = "policy:"
_BY_POLICY = ("sage", *(f"{_PREFIX}{name}" for name, cls in POLICIES.items() if can_select(cls)))

UNIT_SELECTORS: Mapping[str, type[UnitSelector]] = {
    **_OURS,
    **installed(GROUP, UnitSelector, {*_OURS, *_BY_POLICY}, kind="selector", param="select.method"),
}


def names() -> list[str]:
    """What `build` takes: the selectors, and `policy:NAME` of each policy that can choose for a question."""
    return [*UNIT_SELECTORS, *_BY_POLICY]


def reads_by_index(method: str) -> bool:
    """Whether the selector of this name reads in part from the shelf; see `UnitSelector.by_index`."""
    return method in UNIT_SELECTORS and UNIT_SELECTORS[method].by_index


def build(method: str, params: Mapping[str, Any]) -> Selector:
    """The selector of that name with these parameters. Raises `InvalidRequest` on an unknown name or parameter."""
    if method in UNIT_SELECTORS:
        return UNIT_SELECTORS[method].build(params)
    if method not in names():
        raise unknown("selector", method, names(), "select.method")
    cls = POLICIES[method.removeprefix(_PREFIX)]
    if "probe" in params:
        raise InvalidRequest("a selector observes the question, and takes no probe", param="select.params.probe")
    require_parameters(cls, f"policy {cls.name!r}", params, "select.params")
    return ByPolicy(policy=cls.build(params, POLICIES))


def info_of(name: str) -> SelectorInfo:
    """A selector with its parameters and source, from its class."""
    if name in UNIT_SELECTORS:
        unit = UNIT_SELECTORS[name]
        summary, *details = paragraphs(unit)
        return SelectorInfo(name, summary, details, unit.advice, unit.source, parameters_of(unit), measured_rows(name))
    policy = POLICIES[name.removeprefix(_PREFIX)]
    summary, *details = paragraphs(ByPolicy)
    named = f"{summary} Policy {policy.name}: {paragraphs(policy)[0]}"
    parameters = {key: about for key, about in parameters_of(policy).items() if key != "probe"}
    return SelectorInfo(name, named, details, ByPolicy.advice, policy.source, parameters, measured_rows(name))
