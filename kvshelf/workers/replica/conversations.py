"""Conversations on the shelf: each turn that was stored is a cache, appended to the one before it.

A client that sends the whole conversation each time is answered from the last turn that is there. The id of a turn's
cache follows from the cache before it and the turn's tokens, so finding it takes a look at the index and no search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from kvshelf.api import Asking
from kvshelf.api.tools import ToolAsking
from kvshelf.errors import CacheError, CacheNotFound, InvalidRequest, KvshelfError
from kvshelf.store.artifact.cache import CompressedCache
from kvshelf.store.artifact.identity import Identity, canonical_json
from kvshelf.store.base import Store
from kvshelf.store.manifest import Manifest
from kvshelf.workers.engine.attention.attachment import Attachment
from kvshelf.workers.engine.decode.generation import Answer
from kvshelf.workers.engine.decode.turns import Turn
from kvshelf.workers.engine.engine import Engine
from kvshelf.workers.engine.inputs.tools import ToolFormat
from kvshelf.workers.replica.reading import whole

Said = dict[str, str]
"""A message: its role and content."""

TURN_TTL_S: Final = 7 * 86400.0
"""How long a stored turn is kept where neither the query nor the cache that it follows says so."""

_TRIES: Final = 4
"""Beginnings of a conversation that are looked for behind one cache. Turns are stored one by one, so the first is there
unless it expired before the next, or the model has states."""


class Kept(NamedTuple):
    """The cache of a stored turn, and the same in memory, if it is the one that was stored."""

    manifest: Manifest
    document: Attachment | None


class Conversations:
    """The stored turns of one model. Blocks; for threads."""

    def __init__(self, engine: Engine, store: Store) -> None:
        self._engine = engine
        self._store = store

    def shelved(self, cache_id: str, messages: Sequence[Said], tenant: str) -> tuple[str, Sequence[Said]]:
        """The cache behind the longest beginning of a conversation that is on the shelf, and the messages that follow:
        at least one. Raises as `Store.stat` for the cache that the conversation is about."""
        manifest = self._store.stat(cache_id, tenant=tenant)
        while (found := self._next(manifest, messages)) is not None:
            manifest, messages = found
        return manifest.id, messages

    def _next(self, manifest: Manifest, messages: Sequence[Said]) -> tuple[Manifest, Sequence[Said]] | None:
        """The cache of the first turns that are stored behind one, and the messages after them."""
        for end in ends_of_turns(messages[:-1])[:_TRIES]:  # the question is to have a message
            try:
                identity = self._engine.turn_identity(
                    Identity.from_dict(manifest.identity), manifest.codec, manifest.kept_tokens, messages[:end]
                )
                cache_id = self._store.cache_id(identity, tenant=manifest.tenant, codec=manifest.codec)
                return self._store.stat(cache_id, tenant=manifest.tenant), messages[end:]
            except (CacheNotFound, CacheError):
                continue  # stored with the turns after it, perhaps
            except InvalidRequest:
                return None  # the turns are no continuation; the query itself gets the error
        return None

    def keep(
        self, cache_id: str, document: Attachment, query: Asking, prompt: str | list[Said], answer: Answer, tenant: str
    ) -> Kept:
        """Store the turn of an answer behind the cache that it was asked of, and before it the turns that the prompt
        has. The texts of a turn are its cache's source. document: that cache, attached. prompt: of the query, as the
        model reads it. What was stored before an error stays.

        Raises as `Store.put` and `Engine.with_turns`, and the error that kept the turn from being whole.
        """
        if isinstance(answer.turn, KvshelfError):
            raise answer.turn
        assert answer.turn is not None, "the question was asked with its turn to be kept"
        manifest = self._store.stat(cache_id, tenant=tenant)
        parent = document.stored(manifest.codec) or whole(self._engine, self._store, cache_id, tenant)
        lives = self._lifetime(query, manifest)
        for messages, cache in self._caches(parent, prompt, answer, answer.turn):
            manifest = self._store.put(
                cache,
                codec=cache.codec,
                tenant=tenant,
                **lives,
                source=canonical_json(messages),
                parent_id=cache_id,
            )
            cache_id = manifest.id
        # An equal turn may have been stored before, by another batch, whose last bits are its own.
        ours = cache.pack().root.hex() == manifest.blob_digest
        return Kept(manifest, self._engine.attach(cache) if ours else None)

    def _lifetime(self, query: Asking, manifest: Manifest) -> dict[str, Any]:
        """How long a turn behind a cache is kept: arguments of `Store.put`."""
        if query.ttl_s is not None:
            return {"ttl_s": query.ttl_s, "ttl_renew_s": query.ttl_renew_s}
        if manifest.expires_at is None and self._store.expiry(None, None) is None:
            return {"ttl_s": TURN_TTL_S}
        return {"expires_at": manifest.expires_at, "ttl_renew_s": manifest.ttl_renew_s}

    def _caches(
        self, parent: CompressedCache, prompt: str | list[Said], answer: Answer, turn: Turn
    ) -> Iterator[tuple[Sequence[Said], CompressedCache]]:
        """Each turn, and the cache after it; all as one where states of the model are known behind the last alone."""
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        said = [*asked, {"role": "assistant", "content": answer.text}]
        plain = parent.identity.boundary == "text"
        if plain or any(kind.states for kind in self._engine.kinds):
            turns = [said]
        else:
            turns = [said[start:end] for start, end in pairwise([0, *ends_of_turns(said)])]
        documents = [list(turn.token_ids)] if plain else turns
        yield from zip(turns, self._engine.with_turns(parent, documents, turn), strict=True)


def said_in(query: Asking, tools: ToolFormat | None) -> list[Said]:
    """The messages of a query as the model reads them: with calls, and the text of the tools."""
    if isinstance(query, ToolAsking) and tools is not None:
        return tools.turns(query.messages, told=query.told)
    return [message.model_dump() for message in query.messages or ()]


def prompt_of(query: Asking, tools: ToolFormat | None) -> str | list[Said]:
    """What a query asks: its one prompt, or its messages as `said_in`."""
    if query.prompt is None:  # the type asks for exactly one of the two
        return said_in(query, tools)
    (prompt,) = query.prompt if isinstance(query.prompt, list) else [query.prompt]
    return prompt


def ends_of_turns(messages: Sequence[Said]) -> list[int]:
    """Where each turn of a conversation ends: behind the assistant's messages."""
    return [at for at, message in enumerate(messages, 1) if message["role"] == "assistant"]
