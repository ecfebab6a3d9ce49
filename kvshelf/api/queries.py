"""The types of asking stored caches: the question and its answers."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import ConfigDict, Field, model_validator

from kvshelf.api import shapes, strict
from kvshelf.api.options import Ask
from kvshelf.api.strict import misuse
from kvshelf.api.workflows import AtStep


class Select(strict.RequestBody):
    """What the answer reads of the stored entries, where it does not read all: those that a selector chooses for this
    question (GET /v1/selectors), `tokens` of each KV head at most, over all documents together; by default as many as
    the selector says. The question itself reads all entries."""

    method: Annotated[str, Field(min_length=1, max_length=64)]
    tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    params: strict.AnyFields = Field(default_factory=dict, max_length=64)
    passages: bool = Field(False, description="also say which tokens of the documents the answer read")


SuffixScope = Literal["suffix", "cache"]
"""What a suffix policy chooses among: question and answer, or the document's entries, too."""


class SuffixOptions(strict.RequestBody):
    """What stays in memory of the question and the answer while it is made: what a suffix policy keeps (GET
    /v1/suffix_policies), `budget` entries of each KV head, the question's included; by default 512 beside these. With
    `scope` "cache" the document's entries count, too, and leave as the policy says, for this answer alone; by default
    there are as many as the document has. What is stored is not touched."""

    policy: Annotated[str, Field(min_length=1, max_length=64)]
    scope: SuffixScope = "suffix"
    budget: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    params: strict.AnyFields = Field(default_factory=dict, max_length=64)


class AskShelf(Ask, strict.Renewable):
    """How a question to the shelf is answered, in every dialect of the API."""

    adapter: strict.ModelName | None = Field(
        None, description="the LoRA adapter under which the caches were made; default: whichever that is"
    )
    select: Select | None = None
    suffix: SuffixOptions | None = None
    store: bool = Field(
        False, description="keep question and answer behind the cache, as a new one: `stored_cache_id` of the answer"
    )
    ttl_s: strict.Ttl | None = Field(
        None, description="with store: seconds until the new cache expires; default: with the cache that was asked"
    )
    ttl_renew: bool = Field(
        False, description="with store and ttl_s: each question moves the end of the new cache to ttl_s from then"
    )
    tool: strict.ToolName | None = Field(
        None, description="the tool that the answer calls: the caches stay in memory for its result"
    )
    workflow: AtStep | None = Field(
        None,
        description="the step of a workflow that this is: memory is kept and read for the steps that follow, if the "
        "key has the scope write. Runs at the same time need a program each",
    )
    program: strict.Conversation | None = Field(
        None,
        description="the program of an agent that asks: for an hour, its questions go before programs that came later",
    )
    on_miss: Literal["error", "recompute"] = Field(
        "error",
        description="recompute: make a cache that was evicted, has expired or cannot be used anew from its source",
    )

    def require_storable(self) -> None:
        """For a validator: refuses fields that do not go with keeping an answer."""
        if self.ttl_s is not None and not self.store:
            raise misuse("ttl_s", "ttl_s is of the cache that store makes; leave it out, or give store: true")
        strict.require_one_expiry(self.ttl_s, None, ttl_renew=self.ttl_renew)
        if self.store and self.select is not None:
            raise misuse("store", "an answer that reads a part of the cache is not kept behind it; leave select out")
        if self.store and self.suffix is not None:
            raise misuse("store", "an answer of which a part is dropped is not kept behind the cache; leave suffix out")


class Asking(AskShelf):
    """A question to any caches, and how it is answered. Exactly one of `prompt` (one or several) and `messages`."""

    model_config = ConfigDict(json_schema_extra=strict.one_of(prompt=["string", "array"], messages="array"))

    prompt: strict.Prompts | None = None
    messages: strict.MessageList | None = None
    max_tokens: strict.MaxTokens = Field(64, description="maximum length of the answer, in tokens")
    response_format: shapes.ResponseFormat | None = Field(
        None, description="json_schema: the answer is JSON that fits the schema; json_object: any JSON object"
    )
    grammar: shapes.Grammar | None = Field(
        None, description="the answer fits this grammar, in llguidance's Lark dialect"
    )
    choices: shapes.Choices | None = Field(None, description="the answer is one of these texts")
    logprobs: bool = Field(False, description="tell how likely each token of the answer was")
    top_logprobs: shapes.TopLogprobs | None = Field(
        None, description="with logprobs: so many of the likeliest tokens, too"
    )
    n: shapes.Answers = Field(1, description="answers to each prompt; with a seed, the next ones have the next seeds")
    stream: bool = False
    chat_template_kwargs: shapes.TemplateKwargs | None = Field(
        None, description="what the model's chat template is told, as `enable_thinking`"
    )
    reasoning_effort: shapes.Effort | None = Field(
        None, description="how much the model thinks first; none: not at all"
    )
    conversation: strict.Conversation | None = Field(
        None, description="the id of the conversation that this is a turn of, for `GET /v1/usage` and traces"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            problem = "neither was given" if self.prompt is None else "both were given"
            raise misuse("prompt", f"exactly one of prompt and messages is needed; {problem}")
        if self.stream and isinstance(self.prompt, list):
            raise misuse("stream", "several prompts cannot be streamed in one call; send one prompt per stream")
        self.require_storable()
        if self.tool is not None and isinstance(self.prompt, list):
            raise misuse("tool", "a tool is called by one answer; send the prompt whose answer calls it alone")
        shapes.require_one_shape(self)
        shapes.require_logprobs(self)
        for name in ("stream", "store", "tool"):
            if self.n > 1 and getattr(self, name):
                raise misuse("n", f"{name} is of one answer; leave n out")
        return self

    @property
    def several(self) -> bool:
        """Whether the answer is a list."""
        return isinstance(self.prompt, list) or self.n > 1


class Query(Asking):
    """POST /v1/caches/{id}/query: ask a stored cache. Exactly one of `prompt` (one or several) and `messages`."""

    compare: bool = Field(False, description="also answer from the full cache; needs it stored, or the source kept")

    @model_validator(mode="after")
    def _comparable(self) -> Self:
        if self.stream and self.compare:
            raise misuse("compare", "a comparison needs whole answers; leave stream out")
        if self.store and self.compare:
            raise misuse("compare", "a comparison keeps no answer; leave store out")
        if self.tool is not None and self.compare:
            raise misuse("compare", "after a comparison, no tool's result is awaited; leave tool out")
        return self


Route = Literal["likelihood", "attention", "nearest"]
"""How those of several caches are chosen that answer a question."""


class JointQuery(Asking):
    """POST /v1/query: ask several stored caches of one model together; every prompt sees all of their documents, or
    with `route` one or two of them. One of `prompt` (one or several) and `messages`."""

    cache_ids: strict.CacheIds
    route: Route | None = Field(
        None,
        description="only the one or two answer that the question is about. likelihood: behind which the model gives "
        "the question the most; attention: to which the question attends most, read over all; nearest: the one of "
        "these caches of episodes that has its words. Default: all together",
    )

    @model_validator(mode="before")
    @classmethod
    def _not_compared(cls, data: Any) -> Any:
        if isinstance(data, dict) and "compare" in data:
            raise misuse("compare", "a comparison needs one document; leave compare out, or ask each cache by itself")
        if isinstance(data, dict) and data.get("store"):
            raise misuse("store", "an answer is kept behind one cache; leave store out, or ask one cache by itself")
        if isinstance(data, dict) and "repair" in data:
            raise misuse(
                "repair",
                "keys of later documents are not computed again in sight of earlier ones: one prefill of all, which "
                "that approaches, answered no more than documents asked together; leave repair out, and take route "
                "where many documents lose answers",
            )
        return data

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        strict.require_each_once(self.cache_ids)
        if self.route is not None and len(self.cache_ids) < 2:
            raise misuse("route", "route chooses among several caches, and one was given; leave route out")
        return self


class Usage(strict.ResponseBody):
    """`cache_read_tokens`: document tokens served from the shelf. `read_tokens`: stored entries that a token of the
    answer reads, of a KV head; the mean over layers and heads. `prefill_tokens`: tokens that went through the model,
    counted in its forward. `completion_tokens`: generated tokens. `suffix_tokens`: entries of a KV head that the answer
    held at its end beside what it read of the documents, those of the question included, and under suffix.scope "cache"
    its copies of the document's, which `read_tokens` leaves out; null where nobody told.
    `prefill_token_equivalents`: what question and answer cost, in tokens of a prefill: a step of the answer counts as
    many as could be computed while it reads the stored bytes; null for a device that nobody measured.
    `prefill_token_equivalents_saved`: how many more they would cost without the shelf."""

    cache_read_tokens: int
    read_tokens: int
    prefill_tokens: int
    completion_tokens: int
    suffix_tokens: int | None = None
    prefill_token_equivalents: float | None = None
    prefill_token_equivalents_saved: float | None = None


class Comparison(strict.ResponseBody):
    """The answer of the full cache. `agreement` is the fraction of positions at which both answers have the same token,
    up to the end of the shorter one; that end counts as a token."""

    text: str
    agreement: float


class TokenRun(NamedTuple):
    """Neighbouring tokens of a document, `first` to the one before `end`. share: their mean."""

    share: float
    first: int
    end: int


class ReadShares(strict.ResponseBody):
    """Which tokens of one document an answer read. `shares`: base64 of one byte for each of its `tokens` tokens,
    round(255 * share). A share is the part of (tokens of the answer that chose) x (layers that choose) x (KV heads)
    that read the token; a token that the cache does not hold has 0. If no token chose, because the budget has room for
    all or the answer is one token, everything stored was read: a share is then the part of the KV heads of all layers
    that hold the token."""

    cache_id: str
    tokens: int
    shares: str

    @classmethod
    def of(cls, cache_id: str, shares: bytes) -> ReadShares:
        """shares: one byte for each token."""
        return cls(cache_id=cache_id, tokens=len(shares), shares=base64.b64encode(shares).decode())

    def fractions(self) -> list[float]:
        """The share of each token, 0 to 1."""
        return [byte / 255 for byte in base64.b64decode(self.shares)]

    def most_read(self, count: int = 5) -> list[TokenRun]:
        """Up to `count` runs of tokens, the one with the highest mean share first.

        A run grows around the highest share outside the runs so far, over neighbours with at least half of that share.
        """
        shares = self.fractions()
        runs: list[TokenRun] = []
        while len(runs) < count and (highest := max(shares, default=0)) > 0:
            first = shares.index(highest)
            end = first + 1
            while first > 0 and 2 * shares[first - 1] >= highest:
                first -= 1
            while end < len(shares) and 2 * shares[end] >= highest:
                end += 1
            runs.append(TokenRun(sum(shares[first:end]) / (end - first), first, end))
            shares[first:end] = [0.0] * (end - first)
        return sorted(runs, key=lambda run: (-run.share, run.first))


class Answered(strict.ResponseBody):
    """What an answer says, whichever caches were asked. `load_ms`: until the slowest of them was in memory.
    `passages`: what it read of each document, in their order, present only if `select.passages` asks for it.
    `logprobs`: of each token of the text, present only if asked for. `reasoning_content`: thoughts before it, if any.
    """

    id: str
    object: Literal["answer"] = "answer"
    text: str
    finish_reason: strict.FinishReason
    usage: Usage
    load_ms: float
    passages: list[ReadShares] | None = None
    logprobs: list[shapes.Logprob] | None = None
    reasoning_content: str | None = None


class AnswerObject(Answered):
    """`cache_id` is the cache that answered. If it replaces a cache that could not be used, `recomputed` says why.
    `compare` is the answer of the full cache. Of a query with `store`, `stored_cache_id` is the cache of question and
    answer behind the one that was asked, and `not_stored` says why there is none. Each is present only if it
    applies. So is `linked`, where the model that answered is linked to the one that made the cache."""

    cache_id: str
    policy: str
    compression_ratio: float
    compare: Comparison | None = None
    recomputed: strict.MissReason | None = None
    stored_cache_id: str | None = None
    not_stored: str | None = None
    linked: Linked | None = None


class AnswerList(strict.ListBody):
    data: list[AnswerObject]


class Source(strict.ResponseBody):
    """`share`: of the attention that the question's last token gave to documents, the part that went to this one; a
    mean over layers and heads. The answer begins from this token; of its later ones the share says nothing. The shares
    of an answer add up to 1. With `route`, those of caches that did not answer are 0."""

    cache_id: str
    share: float


class Linked(strict.ResponseBody):
    """`linked_from` is the model that made the cache of an answer, and `agreement` the share of cues on which the model
    that answered agreed with it when the two were linked."""

    linked_from: str
    agreement: float


class Remade(strict.ResponseBody):
    """A cache that was asked and could not be used: `reason` says why another replaces it."""

    cache_id: str
    reason: strict.MissReason


class JointAnswer(Answered):
    """The answer of several caches together. `cache_ids` are the caches that answered, in the order of the query, and
    `sources` the share of each; with `route`, those among which it chose. `recomputed` names those of the query that
    could not be used, and is present only if there are any. `exact` is false, and present, where more than one was
    read: their documents did not see each other, so it is not the answer of all as one text."""

    cache_ids: list[str]
    sources: list[Source]
    exact: Literal[False] | None = None
    recomputed: list[Remade] | None = None


class JointAnswerList(strict.ListBody):
    data: list[JointAnswer]


class AnswerDelta(strict.ResponseBody):
    """One piece of a streamed answer. The joined pieces are the text of the answer that follows. `logprobs`: of the
    tokens whose text ends in it, if asked for. `reasoning_content`: thoughts of the model; `text` is then empty."""

    object: Literal["answer.delta"] = "answer.delta"
    text: str
    logprobs: list[shapes.Logprob] | None = None
    reasoning_content: str | None = None
