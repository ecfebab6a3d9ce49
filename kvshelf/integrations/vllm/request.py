"""Requests to a vLLM with the `ShelfConnector`: stand-ins for the document's entries, and the question's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Self

from kvshelf.api.strict import MAX_TOKENS
from kvshelf.engine.inputs.encode import Encoder, Prompt
from kvshelf.errors import InvalidRequest, ModelMismatch, PolicyUnsupported
from kvshelf.integrations.vllm.ragged.pages import stand_ins
from kvshelf.methods.policies.registry import build
from kvshelf.model.text import TextFormat
from kvshelf.store.base import Store, lineage
from kvshelf.store.manifest import Manifest

FIELD: Final = "kvshelf"
"""The field of `kv_transfer_params` that is for the connector."""

STAND_IN: Final = 0
"""The token id in the place of each entry. Every vocabulary has it, and it is never computed."""

ID_PREFIX: Final = "kvs_"

PAGE: Final = 128
"""Tokens of a page of vLLM on a CPU, unless `--block-size` says otherwise."""


@dataclass(frozen=True)
class CacheReference:
    """The content of `FIELD`: a cache, and the caller's key or the tenant that the caller says it is of. ragged: how
    many stand-ins a cache has whose heads keep different numbers of entries; None for any other."""

    cache_id: str
    tenant: str | None = None
    api_key: str | None = field(default=None, repr=False)
    ragged: str | None = None

    @classmethod
    def parse(cls, values: Any) -> Self:
        """Raises `InvalidRequest`, without the values: one may be a key."""
        names = [member.name for member in fields(cls)]
        texts = isinstance(values, Mapping) and all(isinstance(value, str) for value in values.values())
        if not texts or "cache_id" not in values or not values.keys() <= set(names):
            raise InvalidRequest(
                f"kv_transfer_params.{FIELD} must be an object of texts: cache_id, tenant or api_key where this vLLM "
                "asks for one, and ragged where the cache is",
                param=f"kv_transfer_params.{FIELD}",
            )
        return cls(**values)


@dataclass(frozen=True)
class ServiceCache:
    """What a service tells of a cache. tenant: whose key asked it."""

    id: str
    kept_tokens: int
    tenant: str


@dataclass(frozen=True)
class ShelfRequest:
    """A question to one cache, as vLLM takes it. entries: K, the entries of the cache in every head and layer; of a
    `ragged` one, whose heads have different numbers of them, the places that vLLM keeps for them. question: the token
    ids behind them. tenant: of the cache, if known. api_key: the caller's, instead."""

    cache_id: str
    entries: int
    question: tuple[int, ...]
    tenant: str | None = None
    api_key: str | None = field(default=None, repr=False)
    ragged: bool = False

    @property
    def prompt_token_ids(self) -> list[int]:
        """K stand-ins, then the question."""
        return [STAND_IN] * self.entries + list(self.question)

    @property
    def kv_transfer_params(self) -> dict[str, Any]:
        who = {"tenant": self.tenant} if self.api_key is None else {"api_key": self.api_key}
        named = who | {"ragged": str(self.entries) if self.ragged else None}
        return {
            FIELD: {"cache_id": self.cache_id} | {name: value for name, value in named.items() if value is not None}
        }

    @property
    def offline(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The prompt for `LLM.generate`, and the `extra_args` for its `SamplingParams`."""
        prompt = {"prompt_token_ids": self.prompt_token_ids, "cache_salt": self.cache_id}
        return prompt, {"kv_transfer_params": self.kv_transfer_params}

    def body(self, model: str | None, **fields: Any) -> dict[str, Any]:
        """The JSON of `POST /v1/completions`. model: vLLM's name, or None. fields: more of the body, like
        max_tokens."""
        return fields | {
            "model": model,
            "prompt": self.prompt_token_ids,
            "cache_salt": self.cache_id,
            "kv_transfer_params": self.kv_transfer_params,
        }

    @classmethod
    def parse(
        cls, cache: Manifest | ServiceCache, prompt: Sequence[int], salt: str | None, ragged: str | None, page: int
    ) -> Self:
        """The request that a server with pages of `page` tokens received for a cache. ragged: as of `CacheReference`.
        Raises `InvalidRequest` for one that this module does not build."""
        cache_id, entries = cache.id, places_of(cache, page)
        own_places = is_ragged(cache)
        if ragged != (str(entries) if own_places else None):
            raise InvalidRequest(
                f"the request is for {ragged or 'no'} places of {cache_id}, and this vLLM keeps "
                f"{entries if own_places else 'no'} places of its own for the heads of that cache; build it with "
                f"kvshelf.integrations.vllm.shelf_request and page={page}",
                param="kv_transfer_params",
            )
        if salt != cache_id:
            raise InvalidRequest(
                f"cache_salt is {salt!r}; it must be the cache's id {cache_id}, because without it vLLM takes the "
                "pages of another document for those of this one",
                param="cache_salt",
            )
        if len(prompt) <= entries or any(token != STAND_IN for token in prompt[:entries]):
            raise InvalidRequest(
                f"the prompt must be {entries} times the token id {STAND_IN}, one for each entry of {cache_id}, and "
                "then the question; build it with kvshelf.integrations.vllm.shelf_request",
                param="prompt",
            )
        return cls(cache_id, entries, tuple(prompt[entries:]), cache.tenant, ragged=own_places)


def is_ragged(cache: Manifest | ServiceCache) -> bool:
    """Whether heads of a cache may keep different numbers of entries, by its policy. What a service tells, and
    a policy that is not installed here, do not say so."""
    if isinstance(cache, ServiceCache) or cache.kept_tokens == cache.num_tokens:
        return False
    with suppress(InvalidRequest):
        return build(cache.policy, cache.policy_params).ragged
    return False


def require_places(store: Store, cache: Manifest) -> None:
    """Raises `PolicyUnsupported` for a cache whose last piece keeps as many entries in every head, behind one that does
    not: by its manifest alone, of which a request is made, it has no places for heads."""
    if not is_ragged(cache) and any(map(is_ragged, lineage(store, cache))):
        raise PolicyUnsupported(
            f"{cache.id} was appended by policy {cache.policy!r} to a cache whose heads keep different numbers of "
            "entries, which its manifest does not say; append by the policy of that cache, or compress the whole "
            "document anew",
            param="cache_id",
        )


def places_of(cache: Manifest | ServiceCache, page: int) -> int:
    """Stand-ins that a request to a cache has, in a vLLM with pages of `page` tokens."""
    return stand_ins(cache.kept_tokens, page) if is_ragged(cache) else cache.kept_tokens


class QuestionBuilder:
    """Builds requests with a model's tokenizer for vLLMs with pages of `page` tokens. Thread-safe."""

    def __init__(self, tokenizer: Any, page: int = PAGE) -> None:
        self._page = page
        self._text = TextFormat(tokenizer)
        self._digests = self._text.digests()
        self._vocabulary = len(tokenizer)

    def request(self, cache: Manifest, prompt: Prompt) -> ShelfRequest:
        """As `shelf_request`."""
        model = cache.identity["model"]
        for part, digest in zip(("tokenizer", "template"), self._digests, strict=True):
            if model[part] not in ("", digest):
                raise ModelMismatch(
                    f"cache {cache.id} was made by {model['name']!r} with another {part} than the one given; load the "
                    "tokenizer from that model's folder",
                    field=part,
                )
        most = cache.num_tokens + MAX_TOKENS
        encoder = Encoder(cache.model, self._text, most, self._vocabulary, lambda _: most)
        question = tuple(encoder.query(cache.identity["boundary"], prompt))
        places = places_of(cache, self._page)
        return ShelfRequest(cache.id, places, question, cache.tenant, ragged=is_ragged(cache))


def shelf_request(
    cache: Manifest, prompt: Prompt, tokenizer: Any, *, api_key: str | None = None, page: int = PAGE
) -> ShelfRequest:
    """The request that asks `prompt` (a text, messages or token ids) of a cache, as `Engine.encode_query` writes it.

    cache: what `store.stat(cache_id)` gives. tokenizer: the model's, from transformers. api_key: the caller's, for a
    vLLM that asks for keys; without it the request names the cache's tenant. page: vLLM's `--block-size`, which matters
    to caches whose heads keep different numbers of entries. Raises `InvalidRequest` for a prompt that cannot be asked,
    and `ModelMismatch` for another tokenizer or template than the document's.
    """
    return replace(QuestionBuilder(tokenizer, page).request(cache, prompt), api_key=api_key)
