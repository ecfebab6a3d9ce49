"""The compression policies, by name. A new one is a file here and a line in `POLICIES`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvshelf.errors import InvalidRequest
from kvshelf.workers.policies.ada import Ada
from kvshelf.workers.policies.base import (
    Policy,
    ScoringPolicy,
    legal_values,
    parameter,
    parameter_fields,
    parameter_types,
)
from kvshelf.workers.policies.cake import Cake
from kvshelf.workers.policies.compresskv import CompressKV
from kvshelf.workers.policies.dapq import DapQ
from kvshelf.workers.policies.defensivekv import DefensiveKV
from kvshelf.workers.policies.ems import EMS
from kvshelf.workers.policies.expected_attention import ExpectedAttention
from kvshelf.workers.policies.full import Full
from kvshelf.workers.policies.h2o import H2O
from kvshelf.workers.policies.keydiff import KeyDiff
from kvshelf.workers.policies.kvzip import KVzip
from kvshelf.workers.policies.lagkv import LagKV
from kvshelf.workers.policies.layer_defensivekv import LayerDefensiveKV
from kvshelf.workers.policies.localkv import LocalKV
from kvshelf.workers.policies.pyramidkv import PyramidKV
from kvshelf.workers.policies.snapkv import SnapKV
from kvshelf.workers.policies.streaming_llm import StreamingLLM
from kvshelf.workers.policies.view import LayerView

__all__ = ["POLICIES", "LayerView", "Policy", "PolicyInfo", "ScoringPolicy", "build", "catalog", "parameter"]

DEFAULT_POLICY = "keydiff"

POLICIES: Mapping[str, type[Policy]] = {
    cls.name: cls
    for cls in (
        Full,
        Ada,
        Cake,
        CompressKV,
        DapQ,
        DefensiveKV,
        EMS,
        ExpectedAttention,
        H2O,
        KeyDiff,
        KVzip,
        LagKV,
        LayerDefensiveKV,
        LocalKV,
        PyramidKV,
        SnapKV,
        StreamingLLM,
    )
}


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter of a policy, for people and for forms."""

    type: str
    default: Any
    help: str
    legal: str
    minimum: float | None
    maximum: float | None
    choices: tuple[Any, ...] | None
    odd: bool


@dataclass(frozen=True)
class PolicyInfo:
    """One policy, for people and for forms."""

    name: str
    version: int
    summary: str
    source: str
    takes_budget: bool
    parameters: dict[str, ParameterInfo]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def build(name: str, params: Mapping[str, Any]) -> Policy:
    """The policy of that name with these parameters. Raises `InvalidRequest` on an unknown name or parameter."""
    if name not in POLICIES:
        raise InvalidRequest(f"unknown policy {name!r}; this version has {', '.join(POLICIES)}", param="policy")
    return POLICIES[name].build(params)


def catalog() -> list[PolicyInfo]:
    """Every policy with its parameters, ranges and source."""
    return [_info(cls) for cls in POLICIES.values()]


def _info(cls: type[Policy]) -> PolicyInfo:
    types = parameter_types(cls)
    parameters = {
        f.name: ParameterInfo(
            type=" or ".join("null" if kind is type(None) else kind.__name__ for kind in types[f.name]),
            default=f.default,
            legal=legal_values(types[f.name], f.metadata),
            **f.metadata,
        )
        for f in parameter_fields(cls)
    }
    summary = " ".join(inspect.cleandoc(cls.__doc__ or "").split("\n\n", 1)[0].split())
    return PolicyInfo(cls.name, cls.version, summary, cls.source, cls.takes_budget, parameters)
