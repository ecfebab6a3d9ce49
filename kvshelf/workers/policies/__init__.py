"""The compression policies, by name. A new policy is a file here and a line in `_OURS`, or an installed package."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from kvshelf.errors import InvalidRequest, nearest
from kvshelf.workers.policies.ada import Ada
from kvshelf.workers.policies.base import Policy, ScoringPolicy, parameter, parameter_fields, parameter_types
from kvshelf.workers.policies.cake import Cake
from kvshelf.workers.policies.chunkkv import ChunkKV
from kvshelf.workers.policies.compresskv import CompressKV
from kvshelf.workers.policies.dapq import DapQ
from kvshelf.workers.policies.defensivekv import DefensiveKV
from kvshelf.workers.policies.ems import EMS
from kvshelf.workers.policies.expected_attention import ExpectedAttention
from kvshelf.workers.policies.full import Full
from kvshelf.workers.policies.h2o import H2O
from kvshelf.workers.policies.installed import installed
from kvshelf.workers.policies.keydiff import KeyDiff
from kvshelf.workers.policies.knorm import Knorm
from kvshelf.workers.policies.kvcues import KVcues
from kvshelf.workers.policies.kvzip import KVzip
from kvshelf.workers.policies.lagkv import LagKV
from kvshelf.workers.policies.layer_defensivekv import LayerDefensiveKV
from kvshelf.workers.policies.localkv import LocalKV
from kvshelf.workers.policies.parameters import legal_values
from kvshelf.workers.policies.pyramidkv import PyramidKV
from kvshelf.workers.policies.sablock import SABlock
from kvshelf.workers.policies.sage import Sage
from kvshelf.workers.policies.sentencekv import SentenceKV
from kvshelf.workers.policies.snapkv import SnapKV
from kvshelf.workers.policies.streaming_llm import StreamingLLM
from kvshelf.workers.policies.tova import Tova
from kvshelf.workers.policies.view import LayerView

__all__ = ["POLICIES", "LayerView", "Policy", "PolicyInfo", "ScoringPolicy", "build", "catalog", "parameter"]

DEFAULT_POLICY = "keydiff"

_OURS: Mapping[str, type[Policy]] = {
    cls.name: cls
    for cls in (
        Full,
        Ada,
        Cake,
        ChunkKV,
        CompressKV,
        DapQ,
        DefensiveKV,
        EMS,
        ExpectedAttention,
        H2O,
        KeyDiff,
        Knorm,
        KVcues,
        KVzip,
        LagKV,
        LayerDefensiveKV,
        LocalKV,
        PyramidKV,
        SABlock,
        Sage,
        SentenceKV,
        SnapKV,
        StreamingLLM,
        Tova,
    )
}

POLICIES: Mapping[str, type[Policy]] = {**_OURS, **installed(_OURS)}


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter of a policy, as documentation and forms show it."""

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
    """One policy, as documentation and forms show it. `measured`: its rows of the quality bench, see `_measured`."""

    name: str
    version: int
    summary: str
    details: list[str]
    advice: str
    source: str
    phase: str
    takes_budget: bool
    takes_questions: bool
    measured: list[dict[str, Any]]
    parameters: dict[str, ParameterInfo]

    def to_dict(self) -> dict[str, Any]:
        """The fields of the API's policy object: its id is the name."""
        return {"id": self.name} | asdict(self)


def build(name: str, params: Mapping[str, Any]) -> Policy:
    """The policy of that name with these parameters. Raises `InvalidRequest` on an unknown name or parameter."""
    if name not in POLICIES:
        raise InvalidRequest(
            f"unknown policy {name!r}{nearest(name, POLICIES)}; this version has {', '.join(POLICIES)}", param="policy"
        )
    return POLICIES[name].build(params, POLICIES)


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
    summary, *details = (" ".join(part.split()) for part in inspect.cleandoc(cls.__doc__ or "").split("\n\n"))
    default = cls.build({}, POLICIES)
    return PolicyInfo(
        name=cls.name,
        version=cls.version,
        summary=summary,
        details=details,
        advice=cls.advice,
        source=cls.source,
        phase=default.phase,
        takes_budget=cls.takes_budget,
        takes_questions=default.takes_questions,
        measured=[dict(row) for row in _measured() if row["policy"] == cls.name],
        parameters=parameters,
    )


@cache
def _measured() -> list[dict[str, Any]]:
    """Results of the quality bench on the bundled model, as `scripts/publish_quality.py` wrote them; empty if the
    package contains none. Each row is of one policy, fraction removed and codec. `exact`: mean share of exact answers
    over the cells that the model solves with the full cache. `bytes_per_token`: stored bytes per document token.
    `compress_share`: the policy's time divided by its prefill's time."""
    file = files("kvshelf") / "models" / "kvshelf-tiny" / "quality.json"
    return json.loads(file.read_text())["rows"] if file.is_file() else []
