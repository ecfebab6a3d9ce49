"""The types of the HTTP API, shared by the service and the clients. Import them from here.

Requests are strict: an unknown field, "3" or true in place of a number, NaN, and a value out of bounds are refused, and
the error names the field. Responses are parsed leniently, so a client understands a newer service.

Times are Unix seconds, sizes bytes; durations carry `_s` or `_ms`. Each module has one subject; base classes and shared
fields are in `strict`. Import the types of `openai` and `batches` (in OpenAI's shapes) and of `inspect` from there.
"""

from __future__ import annotations

from kvshelf.api.caches import ByteCounts as ByteCounts
from kvshelf.api.caches import CacheList as CacheList
from kvshelf.api.caches import CacheObject as CacheObject
from kvshelf.api.caches import CreateErasure as CreateErasure
from kvshelf.api.caches import Deleted as Deleted
from kvshelf.api.caches import ImportCache as ImportCache
from kvshelf.api.caches import LevelList as LevelList
from kvshelf.api.caches import ListCaches as ListCaches
from kvshelf.api.caches import Quality as Quality
from kvshelf.api.caches import RemakeCache as RemakeCache
from kvshelf.api.caches import SearchCaches as SearchCaches
from kvshelf.api.caches import SearchHit as SearchHit
from kvshelf.api.caches import SearchList as SearchList
from kvshelf.api.caches import Skipped as Skipped
from kvshelf.api.caches import StoredTurn as StoredTurn
from kvshelf.api.caches import Timings as Timings
from kvshelf.api.caches import TokenCounts as TokenCounts
from kvshelf.api.caches import Tried as Tried
from kvshelf.api.caches import TurnList as TurnList
from kvshelf.api.caches import UpdateCache as UpdateCache
from kvshelf.api.caches import Verification as Verification
from kvshelf.api.caches import WarmCaches as WarmCaches
from kvshelf.api.caches import WarmedCaches as WarmedCaches
from kvshelf.api.caches import WarmedReplica as WarmedReplica
from kvshelf.api.caches import WorstPart as WorstPart
from kvshelf.api.certificates import Certificate as Certificate
from kvshelf.api.certificates import CertificateList as CertificateList
from kvshelf.api.certificates import CertifiedBy as CertifiedBy
from kvshelf.api.certificates import GroupBound as GroupBound
from kvshelf.api.certificates import Way as Way
from kvshelf.api.certificates import WayResult as WayResult
from kvshelf.api.creation import AppendCache as AppendCache
from kvshelf.api.creation import CacheOptions as CacheOptions
from kvshelf.api.creation import CreateCache as CreateCache
from kvshelf.api.creation import CreationProgress as CreationProgress
from kvshelf.api.creation import EpisodeOptions as EpisodeOptions
from kvshelf.api.creation import Estimate as Estimate
from kvshelf.api.creation import EstimateObject as EstimateObject
from kvshelf.api.creation import LevelOptions as LevelOptions
from kvshelf.api.creation import PolicyEstimate as PolicyEstimate
from kvshelf.api.creation import RequestObject as RequestObject
from kvshelf.api.creation import SplitOptions as SplitOptions
from kvshelf.api.queries import AnswerDelta as AnswerDelta
from kvshelf.api.queries import Answered as Answered
from kvshelf.api.queries import AnswerList as AnswerList
from kvshelf.api.queries import AnswerObject as AnswerObject
from kvshelf.api.queries import Asking as Asking
from kvshelf.api.queries import Comparison as Comparison
from kvshelf.api.queries import JointAnswer as JointAnswer
from kvshelf.api.queries import JointAnswerList as JointAnswerList
from kvshelf.api.queries import JointQuery as JointQuery
from kvshelf.api.queries import Linked as Linked
from kvshelf.api.queries import Query as Query
from kvshelf.api.queries import ReadShares as ReadShares
from kvshelf.api.queries import Remade as Remade
from kvshelf.api.queries import Select as Select
from kvshelf.api.queries import Source as Source
from kvshelf.api.queries import SuffixOptions as SuffixOptions
from kvshelf.api.queries import TokenRun as TokenRun
from kvshelf.api.queries import Usage as Usage
from kvshelf.api.service import Allowance as Allowance
from kvshelf.api.service import Limits as Limits
from kvshelf.api.service import ModelList as ModelList
from kvshelf.api.service import ModelObject as ModelObject
from kvshelf.api.service import PolicyList as PolicyList
from kvshelf.api.service import PolicyObject as PolicyObject
from kvshelf.api.service import Readiness as Readiness
from kvshelf.api.service import ReadyPart as ReadyPart
from kvshelf.api.service import SelectorList as SelectorList
from kvshelf.api.service import SelectorObject as SelectorObject
from kvshelf.api.service import SuffixPolicyList as SuffixPolicyList
from kvshelf.api.service import SuffixPolicyObject as SuffixPolicyObject
from kvshelf.api.service import TenantAllowances as TenantAllowances
from kvshelf.api.strict import ErrorBody as ErrorBody
from kvshelf.api.strict import ErrorEnvelope as ErrorEnvelope
from kvshelf.api.strict import Message as Message
from kvshelf.api.strict import MessageList as MessageList
from kvshelf.api.strict import QueryString as QueryString
from kvshelf.api.workflows import AtStep as AtStep
from kvshelf.api.workflows import Workflow as Workflow
from kvshelf.api.workflows import WorkflowList as WorkflowList
from kvshelf.api.workflows import WorkflowObject as WorkflowObject
from kvshelf.api.workflows import WorkflowStep as WorkflowStep
