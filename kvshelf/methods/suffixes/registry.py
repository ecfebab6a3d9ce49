"""The suffix policies by name. A new one is a file here and a name in `SUFFIX_POLICIES`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvshelf.methods.policies.parameters import unknown
from kvshelf.methods.policies.registry import paragraphs, parameters_of
from kvshelf.methods.suffixes.base import SuffixPolicy
from kvshelf.methods.suffixes.cam import CaM
from kvshelf.methods.suffixes.ems import EMS
from kvshelf.methods.suffixes.h2o import H2O
from kvshelf.methods.suffixes.info import SuffixPolicyInfo
from kvshelf.methods.suffixes.lagkv import LagKV
from kvshelf.methods.suffixes.lazy_eviction import LazyEviction
from kvshelf.methods.suffixes.ngc import NGC
from kvshelf.methods.suffixes.window import Window

SUFFIX_POLICIES: Mapping[str, type[SuffixPolicy]] = {
    cls.name: cls for cls in (Window, LagKV, H2O, EMS, LazyEviction, CaM, NGC)
}


def build(name: str, params: Mapping[str, Any]) -> SuffixPolicy:
    """The suffix policy of that name with these parameters. Raises `InvalidRequest` on an unknown name or parameter."""
    if name not in SUFFIX_POLICIES:
        raise unknown("suffix policy", name, SUFFIX_POLICIES, "suffix.policy")
    return SUFFIX_POLICIES[name].build(params)


def info_of(cls: type[SuffixPolicy]) -> SuffixPolicyInfo:
    """A suffix policy with its parameters, ranges and source, from its class."""
    summary, *details = paragraphs(cls)
    return SuffixPolicyInfo(cls.name, summary, details, cls.advice, cls.source, parameters_of(cls))
