"""The types of the HTTP API, shared word for word by the service and the clients: the one place to import them from.

Requests are strict: an unknown field, "3" where 3 is meant, true where a number is meant, NaN, and a value outside its
bounds are refused, with the field named. Responses are read leniently, so that a client understands a newer service.

Times are Unix seconds, sizes bytes; durations carry `_s` or `_ms`. Each file of types has one subject; the bases and
shared fields are in `strict`. Apart stand `openai` and `batch_types`, in OpenAI's shapes, and `kept_types`.
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
