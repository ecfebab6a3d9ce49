"""The suffix policies by name. A new one is a file here and a name in `SUFFIX_POLICIES`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvshelf.workers.policies.parameters import unknown
from kvshelf.workers.policies.registry import paragraphs, parameters_of
from kvshelf.workers.suffixes.base import SuffixPolicy
from kvshelf.workers.suffixes.cam import CaM
from kvshelf.workers.suffixes.ems import EMS
from kvshelf.workers.suffixes.h2o import H2O
from kvshelf.workers.suffixes.info import SuffixPolicyInfo
from kvshelf.workers.suffixes.lagkv import LagKV
from kvshelf.workers.suffixes.lazy_eviction import LazyEviction
from kvshelf.workers.suffixes.ngc import NGC
from kvshelf.workers.suffixes.window import Window

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
