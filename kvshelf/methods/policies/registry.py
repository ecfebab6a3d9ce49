"""The classes of all policies, by name. A new policy is a file here and a line in `_OURS`, or an installed package."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from kvshelf.methods.policies.ada import Ada
from kvshelf.methods.policies.arkv import ARKV
from kvshelf.methods.policies.base import Policy, parameter_fields, parameter_types
from kvshelf.methods.policies.cake import Cake
from kvshelf.methods.policies.chunkkv import ChunkKV
from kvshelf.methods.policies.compresskv import CompressKV
from kvshelf.methods.policies.d2o import D2O
from kvshelf.methods.policies.dapq import DapQ
from kvshelf.methods.policies.defensivekv import DefensiveKV
from kvshelf.methods.policies.ems import EMS
from kvshelf.methods.policies.epicache import EpiCache
from kvshelf.methods.policies.expected_attention import ExpectedAttention
from kvshelf.methods.policies.full import Full
from kvshelf.methods.policies.gates.attention_gate import AttentionGate
from kvshelf.methods.policies.gates.kvzip_gate import KVzipGate
from kvshelf.methods.policies.gates.locret import Locret
from kvshelf.methods.policies.gates.lookaheadkv import LookaheadKV
from kvshelf.methods.policies.gates.make_each_token_count import MakeEachTokenCount
from kvshelf.methods.policies.gates.trimkv import TrimKV
from kvshelf.methods.policies.h2o import H2O
from kvshelf.methods.policies.infllm import InfLLM
from kvshelf.methods.policies.info import GROUP, ParameterInfo, PolicyInfo, measured_rows
from kvshelf.methods.policies.installed import installed
from kvshelf.methods.policies.keydiff import KeyDiff
from kvshelf.methods.policies.knorm import Knorm
from kvshelf.methods.policies.kvcues import KVcues
from kvshelf.methods.policies.kvmerger import KVMerger
from kvshelf.methods.policies.kvzip import KVzip
from kvshelf.methods.policies.lagkv import LagKV
from kvshelf.methods.policies.layer_defensivekv import LayerDefensiveKV
from kvshelf.methods.policies.localkv import LocalKV
from kvshelf.methods.policies.mikv import MiKV
from kvshelf.methods.policies.mpcache import MPCache
from kvshelf.methods.policies.parameters import legal_values, unknown
from kvshelf.methods.policies.pyramidkv import PyramidKV
from kvshelf.methods.policies.sablock import SABlock
from kvshelf.methods.policies.sage import Sage
from kvshelf.methods.policies.sentencekv import SentenceKV
from kvshelf.methods.policies.snapkv import SnapKV
from kvshelf.methods.policies.streaming_llm import StreamingLLM
from kvshelf.methods.policies.think import Think
from kvshelf.methods.policies.tova import Tova

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
