"""The bodies that the proxy reads. The process that parses large ones imports this module alone."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

from pydantic import ConfigDict, Tag, ValidationInfo, model_validator

from kvshelf.api.strict import CHECKED, ONE_OR_LIST, ModelName, RequestBody, Text, TokenIds, misuse

_NOT_WITH_A_CACHE: Final = ("cache_salt", "echo", "prompt_embeds", "suffix", "truncate_prompt_tokens")


class Directions(RequestBody):
    """What of a body says where it goes: on to vLLM, or to a stored cache. The rest is not kept.

    Refuses one that asks the connector past the proxy, which would not look whose cache it is, and one about several
    caches, which vLLM would answer without any.
    """

    model_config = ConfigDict(extra="ignore")

    NEVER: ClassVar[dict[str, str]] = {
        "cache_ids": "vLLM answers from one cache at a time; give cache_id",
        "select": "vLLM reads whole caches; leave select out",
        "tool": "vLLM keeps its own cache of prefixes; leave tool out",
        "workflow": "vLLM keeps its own cache of prefixes; leave workflow out",
        "program": "vLLM has its own queue; leave program out",
    }

    names_cache: bool

    @model_validator(mode="before")
    @classmethod
    def _of_body(cls, data: Any, info: ValidationInfo) -> Any:
        if info.context is CHECKED:
            return data
        if not isinstance(data, dict):
            raise misuse("", "the body must be a JSON object")
        if "kv_transfer_params" in data:
            raise misuse("kv_transfer_params", "kv_transfer_params is written by the proxy; give cache_id")
        for name, why in cls.NEVER.items():
            if data.get(name) is not None:
                raise misuse(name, why)
        if isinstance(data.get("suffix"), dict):  # a text is what vLLM puts behind a completion
            raise misuse("suffix", "vLLM keeps whole answers; leave suffix out")
        names_cache = data.get("cache_id") is not None
        if names_cache and data.get("store"):
            raise misuse("store", "vLLM keeps no turns behind a cache; leave store out")
        return {"names_cache": names_cache}


class CacheCompletion(RequestBody):
    """vLLM's body of `/v1/completions` with `cache_id`. Fields that are not declared here are vLLM's."""

    model_config = ConfigDict(extra="allow")

    cache_id: str
    prompt: Annotated[Annotated[Text, Tag("(one)")] | Annotated[TokenIds, Tag("(list)")], ONE_OR_LIST]
    model: ModelName | None = None
    stream: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _asks_a_question(cls, data: Any) -> Any:
        for name in _NOT_WITH_A_CACHE:
            if isinstance(data, dict) and data.get(name) not in (None, False):
                raise misuse(name, f"{name} cannot be given with cache_id: the prompt is a question behind a document")
        return data
