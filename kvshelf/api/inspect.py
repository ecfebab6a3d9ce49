"""The types of `/v1/caches/{id}/kept` and `/prompt`: the tokens that a cache kept, and those of a question's prompt."""

from __future__ import annotations

import base64
from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from kvshelf.api.strict import MessageList, RequestBody, ResponseBody, TokenIds, one_of, require_one_document


class KeptOf(RequestBody):
    """POST /v1/caches/{id}/kept: the cache's document. Exactly one of `document`, `messages` and `token_ids`."""

    model_config = ConfigDict(json_schema_extra=one_of(document="string", messages="array", token_ids="array"))

    document: str | None = None
    messages: MessageList | None = None
    token_ids: TokenIds | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        require_one_document(self)
        return self


class KeptLayer(ResponseBody):
    """One layer: per KV head a base64 bitmap with one bit per token, least significant bit first. `merged` is null if
    the layer merges nothing. In each head a token is in `kept`, in `merged`, or evicted."""

    layer: int
    kept: list[str]
    merged: list[str] | None = None

    def positions(self, head: int) -> list[int]:
        """The indices of the tokens that the head kept, ascending."""
        bits = int.from_bytes(base64.b64decode(self.kept[head]), "little")
        return [at for at in range(bits.bit_length()) if bits >> at & 1]


class KeptTokens(ResponseBody):
    """Which tokens of its document a cache kept; `meaning` explains this for the policy.

    `tokens` holds the texts of the `num_tokens` tokens; the first `template_tokens` come from the chat template. If a
    character takes several tokens, the last one has its text. For each token, `counts` says how many of all `num_heads`
    (KV heads of all layers that see the whole document) kept it, `merged_counts` how many merged it into another. Only
    the first page has these lists. `layers` is one page of layers; `next_layer` starts the next page, null after the
    last.
    """

    id: str
    object: Literal["cache.kept"] = "cache.kept"
    document_id: str
    policy: str
    num_tokens: int
    num_layers: int
    num_heads: int
    meaning: str
    template_tokens: int = 0
    tokens: list[str] = Field(default_factory=list)
    counts: list[int] = Field(default_factory=list)
    merged_counts: list[int] | None = None
    layers: list[KeptLayer]
    next_layer: int | None = None


PromptPartName = Literal["template", "document", "question"]
"""Whose text it is: the chat template's; the document's; that of the question's messages, earlier answers included."""


class PromptPart(ResponseBody):
    """Neighbouring tokens of a prompt, `num_tokens` of them. from_shelf: they are read from the shelf; the others go
    through the model. `token_ids` and `texts`, one for each, are empty for a document that nobody kept."""

    part: PromptPartName
    from_shelf: bool
    num_tokens: int
    token_ids: list[int]
    texts: list[str]


class BuiltPrompt(ResponseBody):
    """POST /v1/caches/{id}/prompt: what a question builds, as the model reads it. `id`: of the cache that it is asked
    of, the longest stored beginning of a conversation; null for one in memory."""

    object: Literal["cache.prompt"] = "cache.prompt"
    id: str | None
    layout: Literal["chat", "plain"]
    parts: list[PromptPart]
