"""The module and class of each of kvshelf's own methods, in the form of entry points."""

from __future__ import annotations

from typing import Final, NamedTuple


class MethodPackage(NamedTuple):
    """A package whose methods kvshelf adapts. value: the entry point of the function that has their classes."""

    package: str
    value: str


BUNDLED: Final = {
    "policies": {
        "full": "kvshelf.methods.policies.full:Full",
        "ada": "kvshelf.methods.policies.ada:Ada",
        "arkv": "kvshelf.methods.policies.arkv:ARKV",
        "attention_gate": "kvshelf.methods.policies.gates.attention_gate:AttentionGate",
        "cake": "kvshelf.methods.policies.cake:Cake",
        "cam": "kvshelf.methods.policies.cam:CaM",
        "chunkkv": "kvshelf.methods.policies.chunkkv:ChunkKV",
        "compresskv": "kvshelf.methods.policies.compresskv:CompressKV",
        "d2o": "kvshelf.methods.policies.d2o:D2O",
        "dapq": "kvshelf.methods.policies.dapq:DapQ",
        "defensivekv": "kvshelf.methods.policies.defensivekv:DefensiveKV",
        "duo_attention": "kvshelf.methods.policies.duo_attention:DuoAttention",
        "ems": "kvshelf.methods.policies.ems:EMS",
        "epicache": "kvshelf.methods.policies.epicache:EpiCache",
        "expected_attention": "kvshelf.methods.policies.expected_attention:ExpectedAttention",
        "fair": "kvshelf.methods.policies.fair:Fair",
        "h2o": "kvshelf.methods.policies.h2o:H2O",
        "headkv": "kvshelf.methods.policies.headkv:HeadKV",
        "infllm": "kvshelf.methods.policies.infllm:InfLLM",
        "keydiff": "kvshelf.methods.policies.keydiff:KeyDiff",
        "knorm": "kvshelf.methods.policies.knorm:Knorm",
        "kvcues": "kvshelf.methods.policies.kvcues:KVcues",
        "kvdirect": "kvshelf.methods.policies.kvdirect:KVDirect",
        "kvmerger": "kvshelf.methods.policies.kvmerger:KVMerger",
        "kvzip": "kvshelf.methods.policies.kvzip:KVzip",
        "kvzip_gate": "kvshelf.methods.policies.gates.kvzip_gate:KVzipGate",
        "lagkv": "kvshelf.methods.policies.lagkv:LagKV",
        "layer_defensivekv": "kvshelf.methods.policies.layer_defensivekv:LayerDefensiveKV",
        "localkv": "kvshelf.methods.policies.localkv:LocalKV",
        "locret": "kvshelf.methods.policies.gates.locret:Locret",
        "lookaheadkv": "kvshelf.methods.policies.gates.lookaheadkv:LookaheadKV",
        "make_each_token_count": "kvshelf.methods.policies.gates.make_each_token_count:MakeEachTokenCount",
        "mikv": "kvshelf.methods.policies.mikv:MiKV",
        "mpcache": "kvshelf.methods.policies.mpcache:MPCache",
        "pyramidinfer": "kvshelf.methods.policies.pyramidinfer:PyramidInfer",
        "pyramidkv": "kvshelf.methods.policies.pyramidkv:PyramidKV",
        "sablock": "kvshelf.methods.policies.sablock:SABlock",
        "sage": "kvshelf.methods.policies.sage:Sage",
        "sentencekv": "kvshelf.methods.policies.sentencekv:SentenceKV",
        "sirllm": "kvshelf.methods.policies.sirllm:SirLLM",
        "snapkv": "kvshelf.methods.policies.snapkv:SnapKV",
        "streaming_llm": "kvshelf.methods.policies.streaming_llm:StreamingLLM",
        "think": "kvshelf.methods.policies.think:Think",
        "tova": "kvshelf.methods.policies.tova:Tova",
        "trimkv": "kvshelf.methods.policies.gates.trimkv:TrimKV",
    },
    "selectors": {
        "quest": "kvshelf.methods.selectors.quest:Quest",
        "fasa": "kvshelf.methods.selectors.fasa:Fasa",
        "infinigen": "kvshelf.methods.selectors.infinigen:InfiniGen",
        "infllm": "kvshelf.methods.selectors.infllm:InfLLM",
        "mpcache": "kvshelf.methods.selectors.mpcache:MPCache",
        "sentencekv": "kvshelf.methods.selectors.sentencekv:SentenceKV",
    },
    "suffixes": {
        "window": "kvshelf.methods.suffixes.window:Window",
        "lagkv": "kvshelf.methods.suffixes.lagkv:LagKV",
        "h2o": "kvshelf.methods.suffixes.h2o:H2O",
        "ems": "kvshelf.methods.suffixes.ems:EMS",
        "d2o": "kvshelf.methods.suffixes.d2o:D2O",
        "arkv": "kvshelf.methods.suffixes.arkv:ARKV",
        "lazy_eviction": "kvshelf.methods.suffixes.lazy_eviction:LazyEviction",
        "cam": "kvshelf.methods.suffixes.cam:CaM",
        "ngc_schedule": "kvshelf.methods.suffixes.ngc_schedule:NGCSchedule",
        "trimkv": "kvshelf.methods.suffixes.trimkv:TrimKV",
    },
}
"""By folder, in the order of listings. A new method is a file there and a line here."""

SOURCES: Final = {"policies": {"press": MethodPackage("kvpress", "kvshelf.integrations.presses:presses")}}
"""By folder and by the prefix of their names, as in `press:criticalkv`. Loaded when a request names one."""
