"""The types of the HTTP API, shared by the service and the clients. Import them from here.

Requests are strict: an unknown field, "3" or true in place of a number, NaN, and a value out of bounds are refused, and
the error names the field. Responses are parsed leniently, so a client understands a newer service.

Times are Unix seconds, sizes bytes; durations carry `_s` or `_ms`. Each module has one subject; base classes and shared
fields are in `strict`. Import the types of `openai` and `batches` (in OpenAI's shapes) and of `inspect` from there.
"""

from __future__ import annotations

from kvshelf.api.caches import (
    ByteCounts,
    CacheList,
    CacheObject,
    Deleted,
    ImportCache,
    LevelList,
    ListCaches,
    Quality,
    Timings,
    TokenCounts,
    Tried,
    UpdateCache,
    Verification,
)
from kvshelf.api.creation import CacheOptions, CreateCache, Estimate, EstimateObject, PolicyEstimate, RequestObject
from kvshelf.api.errors import ErrorBody, ErrorEnvelope
from kvshelf.api.queries import AnswerDelta, AnswerList, AnswerObject, Comparison, Query, Usage
from kvshelf.api.service import (
    Allowance,
    Limits,
    ModelList,
    ModelObject,
    PolicyList,
    PolicyObject,
    Readiness,
    ReadyPart,
    TenantAllowances,
)
from kvshelf.api.strict import Message, MessageList, QueryString

__all__ = [
    "Allowance",
    "AnswerDelta",
    "AnswerList",
    "AnswerObject",
    "ByteCounts",
    "CacheList",
    "CacheObject",
    "CacheOptions",
    "Comparison",
    "CreateCache",
    "Deleted",
    "ErrorBody",
    "ErrorEnvelope",
    "Estimate",
    "EstimateObject",
    "ImportCache",
    "LevelList",
    "Limits",
    "ListCaches",
    "Message",
    "MessageList",
    "ModelList",
    "ModelObject",
    "PolicyEstimate",
    "PolicyList",
    "PolicyObject",
    "Quality",
    "Query",
    "QueryString",
    "Readiness",
    "ReadyPart",
    "RequestObject",
    "TenantAllowances",
    "Timings",
    "TokenCounts",
    "Tried",
    "UpdateCache",
    "Usage",
    "Verification",
]
