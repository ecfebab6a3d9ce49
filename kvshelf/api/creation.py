"""The types of creating a cache: the creation itself, its estimate, and the background request."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, Tag, field_validator, model_validator

from kvshelf.api import strict
from kvshelf.api.certificates import CertificateName
from kvshelf.api.options import ImageParts, Protecting, has_images, unmarked, without_images
from kvshelf.api.shapes import TemplateKwargs
from kvshelf.api.strict import misuse

DEFAULT_POLICY = "full"
DEFAULT_CODEC = "int8"
"""Of a creation without size and policy. It loses least on real documents: see docs/internals/probe.md."""

REMOVING_POLICY = "keydiff"
"""Of a creation that says how much to remove, but no policy."""

_REMOVALS = ("compression_ratio", "budget_tokens", "levels", "policy_params")


def default_policy(fields: Mapping[str, Any]) -> str:
    """The policy where none is named: one that removes entries only if `fields` of the creation ask for it."""
    if fields.get("certificate") is not None:
        return "auto"
    return REMOVING_POLICY if _removes(fields) else DEFAULT_POLICY


def default_codec(fields: Mapping[str, Any]) -> str:
    """The codec where none is named. A policy that is named stores numbers as the model makes them."""
    return "none" if fields.get("policy") is not None or _removes(fields) else DEFAULT_CODEC


def _removes(fields: Mapping[str, Any]) -> bool:
    return any(fields.get(name) not in (None, {}) for name in _REMOVALS)


CHOSEN_BY_AUTO = {"policy_params", "compression_ratio", "budget_tokens", "codec", "levels", "expected_questions"}
"""Fields that the policy "auto" chooses itself."""


class LevelOptions(strict.RequestBody):
    """One of several levels: how much is removed, and the codec, by default that of the request."""

    compression_ratio: strict.Ratio
    codec: strict.CodecText | None = None


Level = Annotated[
    Annotated[strict.Ratio, Tag("(ratio)")] | Annotated[LevelOptions, Tag("(options)")],
    strict.by_form(dict | LevelOptions, "(options)", "(ratio)"),
]

_FLAG_OR_FORM = strict.by_form(str, "(form)", "(flag)")

KeepSource = Annotated[Annotated[bool, Tag("(flag)")] | Annotated[Literal["tokens"], Tag("(form)")], _FLAG_OR_FORM]
"""Whether the source of a cache is kept: true for the text, or the token ids alone."""


def _day(date: str) -> str:
    try:
        return datetime.datetime.strptime(date, "%Y-%m-%d").date().isoformat()
    except ValueError:
        raise misuse("date", f"date is {date!r:.80}; write a day as YYYY-MM-DD") from None


Measured = Annotated[
    Annotated[Literal[False], Tag("(flag)")] | Annotated[Literal["full", "fast"], Tag("(form)")], _FLAG_OR_FORM
]
"""How the quality of a cache is measured: "full", "fast", or false for not at all."""


class CacheOptions(Protecting, strict.Renewable):
    """How to compress and store a document, without the document. See `CreateCache`."""

    model: strict.ModelName | None = Field(None, description="one of /v1/models; default: the first one")
    adapter: strict.ModelName | None = Field(
        None, description="one of the service's LoRA adapters, a model by its own name"
    )
    layout: strict.LayoutName | None = Field(
        None, description="default: chat if the model has a chat template, else plain"
    )
    policy_params: strict.AnyFields = Field(default_factory=dict, max_length=64)
    compression_ratio: strict.Ratio | None = Field(None, description="fraction of the entries to REMOVE, such as 0.75")
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="entries to keep per layer and head, instead of a ratio"
    )
    levels: Annotated[list[Level], Field(min_length=1, max_length=strict.MAX_LEVELS, fail_fast=True)] | None = Field(
        None, description="several compression ratios, or ratios with codecs: one cache each, all from one prefill"
    )
    certificate: CertificateName | None = Field(
        None,
        description="stores the smallest level that this one of /v1/certificates allows for the document; it chooses "
        "policy, ratio and codec",
    )
    policy: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        default_factory=default_policy,
        description="one of /v1/policies; auto chooses policy, ratio and codec for the document; default: full, and "
        "keydiff with a ratio, a budget, levels or parameters",
    )
    codec: strict.CodecText = Field(
        "none",
        description="one of none, int8, int4, int2, mixed, klt and lossless, with parameters if any: int4:group=64, "
        "klt:step=2,steps=kl; default: none; int8 without a policy, a ratio, a budget, levels and parameters",
    )
    min_quality: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None,
        description="lowest acceptable quality.low, a bound of the agreement with the full cache: stores the smallest "
        "level that reaches it, or none; default with the policy auto, without a size: 0.95",
    )
    max_bytes: Annotated[int, Field(ge=1, lt=2**50)] | None = Field(
        None,
        description="largest acceptable bytes.stored: stores the level of the best quality that fits, or none; with "
        "min_quality the smallest that reaches it",
    )
    bytes_per_token: Annotated[float, Field(gt=0, lt=2**40)] | None = Field(
        None, description="max_bytes as bytes for each token of the document"
    )
    quality: Measured | None = Field(
        None,
        description="how the quality of the cache is measured: full by 150 cues, fast by as many as take half the time "
        "of the prefill at most, false not at all; default: as the service is set, and full with a floor or a size",
    )
    expected_questions: Annotated[list[strict.Text], Field(fail_fast=True)] = Field(
        default_factory=list, max_length=256, description="questions for the policies that score by the prompt's end"
    )
    chat_template_kwargs: TemplateKwargs | None = Field(
        None,
        description="what the model's chat template is told, as `reasoning_effort`: kept with the cache where it "
        "changes what stands before the document, and told again behind it",
    )
    date: Annotated[str, AfterValidator(_day)] | None = Field(
        None,
        description="the day that the model's chat template is told, YYYY-MM-DD; default: that of the document's first "
        "cache, or today",
    )
    ttl_s: strict.Ttl | None = Field(None, description="seconds until the cache expires")
    expires_at: strict.ExpiresAt | None = Field(None, description="Unix seconds, instead of ttl_s")
    ttl_renew: bool = Field(False, description="each question moves the end of the cache to ttl_s from then")
    guaranteed_until: strict.Guarantee | None = Field(
        None, description="Unix seconds, at most those of its end: it is never evicted before, within the budget"
    )
    labels: strict.Labels = Field(default_factory=dict)
    keep_source: KeepSource = Field(
        False,
        description="keep what the cache is made from, so that on_miss=recompute makes it again when it is lost: true "
        "for the text, or the messages as JSON; tokens for the token ids alone",
    )
    source_ttl_s: strict.Ttl | None = Field(
        None,
        description="with keep_source: seconds until the source expires, before or after its cache; default: the "
        "lifetime that the shelf gives, or until the cache is deleted",
    )

    @field_validator("levels")
    @classmethod
    def _distinct(cls, levels: list[float | LevelOptions] | None) -> list[float | LevelOptions] | None:
        if levels is not None and any(level in levels[:at] for at, level in enumerate(levels)):
            raise misuse("levels", "a level is given twice; each level makes its own cache")
        return levels

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        chosen = [name for name in CHOSEN_BY_AUTO & self.model_fields_set if getattr(self, name) not in (None, {}, [])]
        if self.policy == "auto" and chosen:
            raise misuse(min(chosen), f'the policy "auto" chooses these itself; leave {", ".join(sorted(chosen))} out')
        if self.certificate is not None:
            self._require_certified()
        if self.quality is False and self.chooses:
            raise misuse("quality", "a cache is chosen by its quality, which has to be measured; leave quality out")
        if self.compression_ratio is not None and self.budget_tokens is not None:
            raise misuse("budget_tokens", "give compression_ratio or budget_tokens, not both")
        for other in ("compression_ratio", "budget_tokens"):
            if self.levels is not None and getattr(self, other) is not None:
                raise misuse("levels", f"give levels or {other}, not both")
        if self.max_bytes is not None and self.bytes_per_token is not None:
            raise misuse("bytes_per_token", "give max_bytes or bytes_per_token, not both")
        if self.source_ttl_s is not None and not self.keep_source:
            raise misuse("source_ttl_s", "source_ttl_s is the lifetime of a kept source; give keep_source with it")
        strict.require_one_expiry(self.ttl_s, self.expires_at, ttl_renew=self.ttl_renew)
        return self

    def _require_certified(self) -> None:
        for other in ("min_quality", "max_bytes", "bytes_per_token"):
            if getattr(self, other) is not None:
                raise misuse(other, f"the certificate chooses the size; leave {other} or certificate out")
        if self.policy not in ("auto", None):  # an estimate may name none
            raise misuse("policy", "the certificate chooses policy, ratio and codec; leave policy or certificate out")

    @property
    def ways(self) -> list[tuple[float | None, str]]:
        """Compression ratio and codec of each level, or those of the one cache."""
        if self.levels is None:
            return [(self.compression_ratio, self.codec)]
        return [
            (level.compression_ratio, level.codec or self.codec)
            if isinstance(level, LevelOptions)
            else (level, self.codec)
            for level in self.levels
        ]

    @property
    def chooses(self) -> bool:
        """Whether one cache is chosen among several, by its quality or its size."""
        targets = (self.min_quality, self.max_bytes, self.bytes_per_token)
        return self.policy == "auto" or any(target is not None for target in targets)


class SplitOptions(strict.RequestBody):
    """How a document is split into parts.

    The end of each part, at least `overlap_tokens`, is also the beginning of the next. `max_tokens` counts the tokens
    of one part, with those of the chat template.
    """

    overlap_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None,
        description="a fact of up to this length is whole in one part; at most a quarter of a part; default: 128, or "
        "that quarter",
    )
    max_tokens: Annotated[int, Field(ge=64, lt=2**31)] | None = Field(
        None, description="default: seven eighths of what the model takes, which leaves room for questions"
    )


Split = Annotated[
    Annotated[bool, Tag("(flag)")] | Annotated[SplitOptions, Tag("(options)")],
    strict.by_form(dict | SplitOptions, "(options)", "(flag)"),
]

PART_LABELS = ("part", "split")
"""Labels that a split sets: the number of a part, such as 2/5, and what the parts of one split share."""

EPISODE_LABELS = ("episode", "episodes")
"""Labels that episodes set: the number of an episode, such as 2/4, and what those of one document share."""

_OF_EPISODES = ("probe", "centroid")
"""Parameters of policy epicache that a creation with episodes sets itself."""

EPISODES_POLICY = "epicache"
"""The policy of a creation with episodes."""


class EpisodeOptions(strict.RequestBody):
    """The number of episodes of a conversation. Each has a cache of the whole document with the whole budget: `count`
    times the bytes."""

    count: Annotated[int, Field(ge=1, le=strict.MAX_EPISODES)] = 4


class CreateCache(CacheOptions):
    """POST /v1/caches: compress a document once. Exactly one of `document`, `messages` and `token_ids` is required.

    `compression_ratio` is the fraction of entries REMOVED, `budget_tokens` the mean number of entries kept per layer
    and KV head; a policy that removes entries removes half without either. A creation that names neither a policy nor
    what to remove keeps all entries, under the codec int8.
    """

    model_config = ConfigDict(json_schema_extra=strict.one_of(document="string", messages="array", token_ids="array"))

    document: str | None = Field(
        None,
        description='the document as text; special tokens in it are plain text; or blocks of text, {"text": "...", '
        '"protect": true} for those that every policy keeps, and {"type": "image", "data": "..."} for images',
    )
    images: ImageParts = Field(
        default_factory=list,
        description="PNG or JPEG files in base64, each before the character `at` of the document, for models that see",
    )
    messages: strict.MessageList | None = Field(None, description="a conversation prefix, for chat models")
    token_ids: strict.TokenIds | None = Field(None, description="the document as token ids of the model")
    tokenizer: Annotated[str, Field(max_length=128)] | None = Field(
        None, description="with token_ids: digest of their tokenizer, from /v1/models; a different one is refused"
    )
    name: strict.CacheName = ""
    split: Split = Field(
        False,
        description="make one cache for each part of the text, however long it is; the parts share the labels "
        "`document` (the name) and `split`, and have `part` (2/5)",
    )
    episodes: EpisodeOptions | None = Field(
        None,
        description="make one cache for each episode of a conversation, by policy epicache; they share the label "
        "`episodes` and have `episode` (2/4); ask the one that a question is about with route=nearest",
    )

    @model_validator(mode="before")
    @classmethod
    def _settled(cls, data: Any) -> Any:
        """With the policy or the codec that follows from the other fields."""
        data = without_marks(data)
        if not isinstance(data, dict) or data.get("policy") is not None:
            return data
        if data.get("certificate") is not None:
            return {**data, "policy": "auto"}
        if data.get("episodes") is not None:
            return {**data, "policy": EPISODES_POLICY}
        return {"codec": default_codec(data), **data}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        strict.require_one_document(self)
        if self.images:
            self._require_seen_whole()
        if self.episodes is not None:
            self._require_episodes()
        if self.split_options is not None:
            self._require_splittable()
        if self.tokenizer is not None and self.token_ids is None:
            raise misuse("tokenizer", "tokenizer belongs to token_ids; leave it out")
        if self.keep_source is True and self.token_ids is not None:
            raise misuse("keep_source", "token_ids have no text to keep; keep the ids alone, with tokens")
        return self

    def _require_seen_whole(self) -> None:
        if self.document is None:
            raise misuse("images", "images stand in a text; send it as document, and no messages or token_ids")
        for name, why in {
            "split": "a text that is split",
            "episodes": "a text that is split",
            "keep_source": "a kept source, which is text or token ids alone",
        }.items():
            if getattr(self, name):
                raise misuse(name, f"images have no place in {why}; leave {name} or the images out")

    def _require_episodes(self) -> None:
        if self.token_ids is not None:
            raise misuse("episodes", "episodes are found in a text or in messages; token_ids have neither")
        if self.split_options is not None:
            raise misuse("episodes", "a split document has one cache for each part; leave split or episodes out")
        if self.levels is not None or self.chooses:
            raise misuse("episodes", "each episode has one cache, of one ratio; leave levels and targets out")
        if self.policy != EPISODES_POLICY:
            raise misuse("policy", f"episodes are kept by policy epicache, not by {self.policy}; leave policy out")
        for name in _OF_EPISODES:
            if name in self.policy_params:
                raise misuse(f"policy_params.{name}", f"{name} is set by episodes; leave it out")
        self._require_free(EPISODE_LABELS, "episodes")

    def _require_free(self, labels: tuple[str, ...], by: str) -> None:
        for label in labels:
            if label in self.labels:
                raise misuse("labels", f"the label {label!r} is set by {by}; choose another name")

    def _require_splittable(self) -> None:
        if self.document is None:
            raise misuse("split", "only a text can be split; send it as document or file")
        if self.protect:
            raise misuse("protect", "protect is of one document, and a split makes several; leave one of them out")
        if self.levels is not None:
            raise misuse("split", "a split document has one cache for each part; give one ratio instead of levels")
        self._require_free(PART_LABELS, "split")

    @property
    def in_parts(self) -> bool:
        """Whether several creations follow from this: one for each part or episode."""
        return self.split_options is not None or self.episodes is not None

    @property
    def split_options(self) -> SplitOptions | None:
        """How to split the document; None: not at all."""
        if isinstance(self.split, SplitOptions):
            return self.split
        return SplitOptions() if self.split else None


class AppendCache(Protecting, strict.Renewable):
    """POST /v1/caches/{id}/append: more of a document, read behind its cache. Exactly one of `document` (a text, which
    goes on where the document ends), `messages` (whole turns) and `token_ids` is required.

    A new cache is stored; the one that it was appended to stays as it is. Policy, ratio and budget are of what is
    appended alone: by default the policy and the ratio of the cache, under whose codec all of it is stored. With
    `policy_params` `{"prefill": "chunked"}` the policy of the cache goes on: one budget, or ratio, for all of both.
    Without `ttl_s` and `expires_at` the new cache has the lifetime of the cache that it was appended to. `protect` is
    of what is appended; what was protected before stays so.
    """

    model_config = ConfigDict(json_schema_extra=strict.one_of(document="string", messages="array", token_ids="array"))

    document: str | None = Field(None, description="text; special tokens in it are plain text")
    messages: strict.MessageList | None = Field(None, description="turns behind a document or a conversation")
    token_ids: strict.TokenIds | None = Field(None, description="token ids of the model")
    tokenizer: Annotated[str, Field(max_length=128)] | None = Field(
        None, description="with token_ids: digest of their tokenizer, from /v1/models; a different one is refused"
    )
    policy: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(
        None, description="one of /v1/policies; default: that of the cache"
    )
    policy_params: strict.AnyFields = Field(default_factory=dict, max_length=64)
    compression_ratio: strict.Ratio | None = Field(None, description="fraction of the entries to REMOVE, such as 0.75")
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="entries to keep per layer and head, instead of a ratio"
    )
    expected_questions: Annotated[list[strict.Text], Field(fail_fast=True)] = Field(
        default_factory=list, max_length=256, description="questions for the policies that score by the prompt's end"
    )
    ttl_s: strict.Ttl | None = Field(None, description="seconds until the new cache expires")
    expires_at: strict.ExpiresAt | None = Field(None, description="Unix seconds, instead of ttl_s")
    ttl_renew: bool = Field(False, description="each question moves the end of the cache to ttl_s from then")
    labels: strict.Labels = Field(default_factory=dict)
    name: strict.CacheName = ""

    @model_validator(mode="before")
    @classmethod
    def _marked(cls, data: Any) -> Any:
        if isinstance(data, dict) and has_images(data.get("document")):
            raise misuse("document", "images are read with the document that they are in, not behind it; append text")
        return without_marks(data)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        strict.require_one_document(self)
        if self.policy == "auto":
            raise misuse("policy", 'the policy "auto" chooses for a whole document; name a policy')
        if self.compression_ratio is not None and self.budget_tokens is not None:
            raise misuse("budget_tokens", "give compression_ratio or budget_tokens, not both")
        if self.tokenizer is not None and self.token_ids is None:
            raise misuse("tokenizer", "tokenizer belongs to token_ids; leave it out")
        strict.require_one_expiry(self.ttl_s, self.expires_at, ttl_renew=self.ttl_renew)
        return self


def without_marks(data: Any) -> Any:
    """The fields of a creation with plain text for blocks: marks become rules of `protect`, images `images`."""
    if not isinstance(data, dict):
        return data
    if has_images(data.get("document")):
        if data.get("images"):
            raise misuse("images", "the images of a document are blocks of it or in images; give them in one way")
        document, images = without_images(data["document"])
        data = data | {"document": document, "images": images}
    document, messages, rules = unmarked(data.get("document"), data.get("messages"))
    if document is data.get("document") and not rules and messages == data.get("messages"):
        return data
    texts = {"document": document, "messages": messages}
    plain = data | {name: value for name, value in texts.items() if name in data}
    return plain | ({"protect": [*(data.get("protect") or ()), *rules]} if rules else {})


class Estimate(CreateCache):
    """POST /v1/estimate: the cost of a creation with these fields. Nothing is compressed or stored.

    Without `policy`, estimates all policies with their default parameters; without `codec`, all codecs. Each of
    the `levels` gets a row, and so does each combination that the policy "auto" would try.
    """

    policy: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(  # type: ignore[assignment]  # wider
        None, description="one of /v1/policies, or auto; default: all of them"
    )
    codec: strict.CodecText | None = Field(None, description="as in a creation; default: all codecs")  # type: ignore[assignment]

    @model_validator(mode="before")
    @classmethod
    def _settled(cls, data: Any) -> Any:
        """Without a policy: an estimate is then of all of them."""
        return without_marks(data)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.certificate is not None:
            raise misuse("certificate", "what it chooses is known when it is measured; estimate policy auto")
        if self.split_options is not None:
            raise misuse("split", "an estimate is of a whole document; leave split out")
        if self.episodes is not None:
            raise misuse("episodes", "an estimate is of one cache, and each episode has such a one; leave episodes out")
        return self


class RequestObject(strict.ResponseBody):
    """A background request. `cache_id` is set when it is done, `error` when it has failed.

    `cache_ids` has one id per level, in their order; `cache_id` is the first.
    """

    id: str
    object: Literal["cache.request"] = "cache.request"
    state: strict.RequestState
    cache_id: str | None = None
    cache_ids: list[str] = Field(default_factory=list)
    attempts: int = 0
    error: strict.ErrorBody | None = None
    created_at: float | None = None
    updated_at: float | None = None


class CreationProgress(strict.ResponseBody):
    """An event of a creation that is watched (`Accept: text/event-stream`).

    `prefill` counts layers, each of which the policy reduces at once; `quality` and `store` count caches. `seconds`
    since the phase began. `part`: the part of a document that is split, or the episode, such as 2/5. A creation that
    joins an equal one under way, or finds its cache on the shelf, has no events but the last, its answer.
    """

    object: Literal["cache.progress"] = "cache.progress"
    phase: Literal["prefill", "quality", "store"]
    done: int
    total: int
    seconds: float
    part: str | None = None


class PolicyEstimate(strict.ResponseBody):
    """Estimate for one policy. `kept` entries stay per layer and KV head; `bytes_stored` is the blob's size by codec.

    `compress_share` is what the policy adds to a prefill that keeps everything, as a share of its time, measured on
    kvshelf-tiny; null if nobody measured it, as with policies of other packages. `seconds` covers prefill and
    compression, without waiting and storing. `basis` is its origin: `measured` on this policy here; or `compress_share`
    added to a prefill measured on `other_policies`, or `assumed` from the model's size. Both are null if nothing tells
    what the policy takes. If the policy refuses the document, `refused` says why and the numbers are null.
    """

    policy: str
    kept: int | None = None
    compression_ratio: float | None = None
    bytes_stored: dict[str, int] | None = None
    compress_share: float | None = None
    seconds: float | None = None
    basis: Literal["measured", "other_policies", "assumed"] | None = None
    refused: str | None = None


class EstimateObject(strict.ResponseBody):
    """Estimated cost of a creation. `tokens`, `bytes_full` (the uncompressed KV cache) and
    `bytes_full_16bit` (the same in 16-bit numbers) are exact.

    `measured_tokens`: document tokens that the answering worker has compressed since it started.
    """

    object: Literal["estimate"] = "estimate"
    model: str
    layout: strict.LayoutName
    tokens: int
    bytes_full: int
    bytes_full_16bit: int
    measured_tokens: int
    policies: list[PolicyEstimate]
