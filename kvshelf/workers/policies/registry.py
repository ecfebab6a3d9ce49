"""The classes of all policies, by name. A new policy is a file here and a line in `_OURS`, or an installed package."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from kvshelf.workers.policies.ada import Ada
from kvshelf.workers.policies.arkv import ARKV
from kvshelf.workers.policies.base import Policy, parameter_fields, parameter_types
from kvshelf.workers.policies.cake import Cake
from kvshelf.workers.policies.chunkkv import ChunkKV
from kvshelf.workers.policies.compresskv import CompressKV
from kvshelf.workers.policies.d2o import D2O
from kvshelf.workers.policies.dapq import DapQ
from kvshelf.workers.policies.defensivekv import DefensiveKV
from kvshelf.workers.policies.ems import EMS
from kvshelf.workers.policies.epicache import EpiCache
from kvshelf.workers.policies.expected_attention import ExpectedAttention
from kvshelf.workers.policies.full import Full
from kvshelf.workers.policies.gates.attention_gate import AttentionGate
from kvshelf.workers.policies.gates.kvzip_gate import KVzipGate
from kvshelf.workers.policies.gates.locret import Locret
from kvshelf.workers.policies.gates.lookaheadkv import LookaheadKV
from kvshelf.workers.policies.gates.make_each_token_count import MakeEachTokenCount
from kvshelf.workers.policies.gates.trimkv import TrimKV
from kvshelf.workers.policies.h2o import H2O
from kvshelf.workers.policies.infllm import InfLLM
from kvshelf.workers.policies.info import GROUP, ParameterInfo, PolicyInfo, measured_rows
from kvshelf.workers.policies.installed import installed
from kvshelf.workers.policies.keydiff import KeyDiff
from kvshelf.workers.policies.knorm import Knorm
from kvshelf.workers.policies.kvcues import KVcues
from kvshelf.workers.policies.kvmerger import KVMerger
from kvshelf.workers.policies.kvzip import KVzip
from kvshelf.workers.policies.lagkv import LagKV
from kvshelf.workers.policies.layer_defensivekv import LayerDefensiveKV
from kvshelf.workers.policies.localkv import LocalKV
from kvshelf.workers.policies.mikv import MiKV
from kvshelf.workers.policies.mpcache import MPCache
from kvshelf.workers.policies.parameters import legal_values, unknown
from kvshelf.workers.policies.pyramidkv import PyramidKV
from kvshelf.workers.policies.sablock import SABlock
from kvshelf.workers.policies.sage import Sage
from kvshelf.workers.policies.sentencekv import SentenceKV
from kvshelf.workers.policies.snapkv import SnapKV
from kvshelf.workers.policies.streaming_llm import StreamingLLM
from kvshelf.workers.policies.think import Think
from kvshelf.workers.policies.tova import Tova

_OURS: Mapping[str, type[Policy]] = {
    cls.name: cls
    for cls in (
        Full,
        Ada,
        ARKV,
        AttentionGate,
        Cake,
        ChunkKV,
        CompressKV,
        D2O,
        DapQ,
        DefensiveKV,
        EMS,
        EpiCache,
        ExpectedAttention,
        H2O,
        InfLLM,
        KeyDiff,
        Knorm,
        KVcues,
        KVMerger,
        KVzip,
        KVzipGate,
        LagKV,
        LayerDefensiveKV,
        LocalKV,
        Locret,
        LookaheadKV,
        MakeEachTokenCount,
        MiKV,
        MPCache,
        PyramidKV,
        SABlock,
        Sage,
        SentenceKV,
        SnapKV,
        StreamingLLM,
        Think,
        Tova,
        TrimKV,
    )
}

POLICIES: Mapping[str, type[Policy]] = {**_OURS, **installed(GROUP, Policy, _OURS, kind="policy", param="policy")}


def build(name: str, params: Mapping[str, Any]) -> Policy:
    """The policy of that name with these parameters. Raises `InvalidRequest` on an unknown name or parameter."""
    if name not in POLICIES:
        raise unknown("policy", name, POLICIES, "policy")
    return POLICIES[name].build(params, POLICIES)


def info_of(cls: type[Policy]) -> PolicyInfo:
    """A policy with its parameters, ranges and source, from its class."""
    summary, *details = paragraphs(cls)
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
        measured=measured_rows(cls.name),
        parameters=parameters_of(cls),
    )


def paragraphs(cls: type) -> list[str]:
    """The paragraphs of a class's docstring, each on one line."""
    return [" ".join(part.split()) for part in inspect.cleandoc(cls.__doc__ or "").split("\n\n")]


def parameters_of(cls: type) -> dict[str, ParameterInfo]:
    """The parameters of a policy or selector."""
    types = parameter_types(cls)
    return {
        f.name: ParameterInfo(
            type=" or ".join("null" if kind is type(None) else kind.__name__ for kind in types[f.name]),
            default=f.default,
            legal=legal_values(types[f.name], f.metadata),
            **f.metadata,
        )
        for f in parameter_fields(cls)
    }
