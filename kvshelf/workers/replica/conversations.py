"""Conversations on the shelf: each turn that was stored is a cache, appended to one before it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvshelf.api import Asking
from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.identity import Identity, canonical_json
from kvshelf.engine.attention.attachment import Attachment
from kvshelf.engine.decode.turns import Turn
from kvshelf.engine.engine import Engine
from kvshelf.engine.turns import Dialogue, Said, TurnEnd, whole_turn
from kvshelf.errors import CacheError, CacheNotFound, KvshelfError, SourceNotKept, StateConflict
from kvshelf.model.text import Broken, TemplateOptions
from kvshelf.store.base import Store, lineage
from kvshelf.store.manifest import Manifest
from kvshelf.workers.replica.create.publish import name_behind
from kvshelf.workers.replica.reading import whole

TURN_TTL_S: Final = 7 * 86400.0
"""How long a stored turn is kept where neither the query nor the cache that it follows says so."""

_TRIES: Final = 4
"""Beginnings of a conversation that are looked for behind one cache. Turns are stored one by one, so the first is there
unless it expired before the next, or the model has states."""


@dataclass(frozen=True)
class Line:
    """A conversation behind its root, the cache `root_id`, and the cache to ask it of. read: how many of its tokens are
    in that cache, and `known` how many of its messages."""

    dialogue: Dialogue
    root_id: str
    cache_id: str
    read: int = 0
    known: int = 0

    @property
    def from_root(self) -> Line:
        """The same conversation, asked of the root."""
        return replace(self, cache_id=self.root_id, read=0, known=0)

    @property
    def query_ids(self) -> list[int]:
        """The tokens that are left to read."""
        return self.dialogue.prompt.token_ids[self.read :]

    def turn(self, answer: Said, ran: Sequence[int]) -> tuple[list[int], list[TurnEnd]]:
        """The tokens that a kept turn appends to the cache, and the ends of the turns in them: messages counted from
        the root, tokens from the cache. ran: the answer's tokens, without the one that ended it."""
        ids, ends = self.dialogue.answered(answer)
        before = self.dialogue.prompt.token_ids[: self.read]
        if ids[: self.read] != before or len(ids) <= self.read:
            # The template writes the cached turns otherwise once this one is an earlier turn. It is kept as it ran, and
            # the next question reads again from where that is right.
            return [*self.query_ids, *ran], [TurnEnd(len(self.dialogue.messages) + 1, len(self.query_ids) + len(ran))]
        return ids[self.read :], [TurnEnd(at, end - self.read) for at, end in ends if end > self.read]


class Conversations:
    """The stored turns of one model. The id of a turn's cache follows from the cache before it and the turn's tokens,
    so finding it takes a look at the index and no search. Blocks; for threads."""

    def __init__(self, engine: Engine, store: Store) -> None:
        self._engine = engine
        self._store = store

    def line(
        self,
        cache_id: str,
        messages: Sequence[Said],
        tenant: str,
        variables: Mapping[str, Any],
        intro: Callable[[Broken], str] | None,
    ) -> Line:
        """The conversation that these messages go on with behind a cache, and the cache behind the longest beginning of
        it that is on the shelf. variables: of the question, beside those of the root. Raises as `Store.stat` for that
        cache, and `InvalidRequest` for messages that the template does not write."""
        chain, turns = self._chain(self._store.stat(cache_id, tenant=tenant))
        root, before = Identity.from_dict(chain[0].identity), [message for turn in turns for message in turn]
        form = self._engine.encoder.require_text("messages")
        options = TemplateOptions.behind(root, variables)
        dialogue = Dialogue(form, root.boundary, [*before, *messages], options, intro)
        end = self._read(dialogue, chain, turns)
        while (later := self._next(dialogue, *end[:2])) is not None:
            end = later
        manifest, read, known = end
        return Line(dialogue, chain[0].id, manifest.id, read, known)

    def _chain(self, manifest: Manifest) -> tuple[list[Manifest], list[list[Said]]]:
        """The caches from the root of a conversation to one of its turns, and the messages of each, which the root has
        none of. A cache whose messages are not known is a root."""
        chain: list[Manifest] = []
        turns: list[list[Said]] = []
        for member in lineage(self._store, manifest):
            chain.insert(0, member)
            messages = None if member.parent_id is None else self._messages(member)
            turns.insert(0, messages or [])
            if messages is None:
                break
        return chain, [[], *turns[1:]]  # without its parent a turn is all that there is, and stands for a root

    def _messages(self, manifest: Manifest) -> list[Said] | None:
        """The messages of a stored turn; None for any other cache."""
        if not manifest.has_source or manifest.identity["layout"] != "chat":
            return None
        try:
            source = self._store.source(manifest.id, tenant=manifest.tenant)
            messages = json.loads(source) if isinstance(source, str) else None
        except (SourceNotKept, CacheError, ValueError):
            return None
        is_ours = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
        return messages if is_ours else None

    @staticmethod
    def _read(
        dialogue: Dialogue, chain: Sequence[Manifest], turns: Sequence[Sequence[Said]]
    ) -> tuple[Manifest, int, int]:
        """The last cache of a chain that holds what the conversation says, and how many of its tokens and messages.
        turns: the messages of each cache."""
        at, read, known = chain[0], 0, 0
        for manifest, messages in zip(chain[1:], turns[1:], strict=True):
            identity, parent = Identity.from_dict(manifest.identity), Identity.from_dict(at.identity)
            end = identity.num_tokens - chain[0].num_tokens
            if end >= len(dialogue.prompt.token_ids) or not dialogue.reads(parent, identity, read, end):
                break
            at, read, known = manifest, end, known + len(messages)
        return at, read, known

    def _next(self, dialogue: Dialogue, manifest: Manifest, read: int) -> tuple[Manifest, int, int] | None:
        """The cache of the first turns that are stored behind one, and the tokens and messages up to them."""
        parent = Identity.from_dict(manifest.identity)
        later = [end for end in dialogue.turns if read < end.tokens < len(dialogue.prompt.token_ids)]
        for end in later[:_TRIES]:
            turn = whole_turn(parent.layout, dialogue.prompt.token_ids[read : end.tokens])
            identity = self._engine.turns.identity(parent, manifest.codec, manifest.kept_tokens, turn)
            cache_id = self._store.cache_id(identity, tenant=manifest.tenant, codec=manifest.codec)
            try:
                return self._store.stat(cache_id, tenant=manifest.tenant), end.tokens, end.messages
            except (CacheNotFound, CacheError):
                continue  # stored with the turns after it, perhaps
        return None

    def keep(
        self,
        cache_id: str,
        document: Attachment,
        query: Asking,
        line: Line | None,
        answer: Said,
        turn: Turn | KvshelfError | None,
        tenant: str,
        digest: str,
    ) -> tuple[Manifest, Attachment | None]:
        """Store the turn of an answer behind the cache that it was asked of, and before it the turns that the question
        has. Returns the manifest of the turn's cache, and that cache attached, if it is the one that was stored.

        The texts of a turn are its cache's source. document: that cache, attached, of a blob with this digest. line: of
        a conversation; None for a plain text. answer: as the next request has it. turn: of the answer. What
        was stored before an error stays.

        Raises as `Store.put` and `Turns.caches`, and the error that kept the turn from being whole.
        """
        if isinstance(turn, KvshelfError):
            raise turn
        assert turn is not None, "the question was asked with its turn to be kept"
        manifest = self._store.stat(cache_id, tenant=tenant)
        if manifest.blob_digest != digest:  # its identity would name a parent that it was not read behind
            raise StateConflict(f"cache {cache_id} was coded anew while it was asked; ask again", param="store")
        parent = document.stored(manifest.codec) or whole(self._engine, self._store, cache_id, tenant)
        lives = self._lifetime(query, manifest)
        for messages, cache in self._caches(parent, query, line, answer, turn):
            manifest = self._store.put(
                cache,
                codec=cache.codec,
                tenant=tenant,
                **lives,
                name=name_behind(manifest, "turn"),
                source=canonical_json(messages),
                parent_id=cache_id,
            )
            cache_id = manifest.id
        # An equal turn may have been stored before, by another batch, whose last bits are its own.
        is_ours = cache.pack().root.hex() == manifest.blob_digest
        return manifest, self._engine.attach(cache) if is_ours else None

    def _lifetime(self, query: Asking, manifest: Manifest) -> dict[str, Any]:
        """How long a turn behind a cache is kept: arguments of `Store.put`."""
        if query.ttl_s is not None:
            return {"ttl_s": query.ttl_s, "ttl_renew_s": query.ttl_renew_s}
        if manifest.expires_at is None and self._store.expiry(None, None) is None:
            return {"ttl_s": TURN_TTL_S}
        return {"expires_at": manifest.expires_at, "ttl_renew_s": manifest.ttl_renew_s}

    def _caches(
        self, parent: CompressedCache, query: Asking, line: Line | None, answer: Said, turn: Turn
    ) -> Iterator[tuple[Sequence[Said], CompressedCache]]:
        """Each turn, and the cache after it; all as one where states of the model are known behind the last alone."""
        layout = parent.identity.layout
        if line is None:
            turns = [([{"role": "user", "content": str(query.prompt)}, answer], list(turn.token_ids))]
        else:
            turns = self._turns(line, answer, turn)
        documents = [whole_turn(layout, token_ids) for _, token_ids in turns]
        caches = self._engine.turns.caches(parent, documents, turn)
        yield from ((messages, cache) for (messages, _), cache in zip(turns, caches, strict=True))

    def _turns(self, line: Line, answer: Said, turn: Turn) -> list[tuple[list[Said], list[int]]]:
        messages = [*line.dialogue.messages, answer]
        ends = [TurnEnd(len(messages), len(turn.token_ids))]
        if not any(kind.states for kind in self._engine.kinds):
            ids, ends_within = line.turn(answer, ())
            if ids == list(turn.token_ids):
                ends = ends_within
        turns, first = [], TurnEnd(line.known, 0)
        for end in ends:
            turns.append((messages[first.messages : end.messages], list(turn.token_ids[first.tokens : end.tokens])))
            first = end
        return turns
