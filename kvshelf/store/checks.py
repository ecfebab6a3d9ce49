"""Checks of a store's arguments, and the one message of each error about a cache."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final, Literal

from kvshelf.errors import CacheCorrupt, CacheHasChildren, CacheNotFound, EtagMismatch, InvalidRequest
from kvshelf.store.manifest import Manifest
from kvshelf.store.types import ChangeFields, Source, TokenIds

PAGE_LIMIT: Final = 1000
LABEL_LIMIT: Final = 64
TEXT_LIMIT: Final = 512
SOURCE_LIMIT: Final = 256 << 20
"""Characters of a kept source: far above any model's context, and below what would exhaust a reader's memory."""

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)([KMGT]i?)?B?")
_UNITS: Final = {"": 1} | {
    prefix + suffix: base**power for power, prefix in enumerate("KMGT", 1) for suffix, base in (("", 1000), ("i", 1024))
}
_CACHE_ID = re.compile(r"kvs_[0-9a-f]{40}")
_ID_PREFIX = re.compile(r"kvs_[0-9a-f]{4,40}")


def not_found(cache_id: str) -> CacheNotFound:
    """The one message for ids that are unknown, deleted, malformed, or another tenant's."""
    return CacheNotFound(
        f"there is no cache {cache_id[:80]!r}; `kvshelf ls` shows what is on the shelf", param="cache_id"
    )


def require_id(cache_id: str) -> str:
    """Refuse a malformed id before it reaches a file name or a query."""
    if not isinstance(cache_id, str) or not _CACHE_ID.fullmatch(cache_id):
        raise not_found(str(cache_id))
    return cache_id


def require_id_prefix(prefix: str) -> None:
    if not isinstance(prefix, str) or not _ID_PREFIX.fullmatch(prefix):
        raise InvalidRequest(
            f"id_prefix must be the beginning of an id, kvs_ and 4 to 40 of its digits, not {prefix!r:.80}",
            param="id_prefix",
        )


def corrupt(cache_id: str, problem: str, reason: str) -> CacheCorrupt:
    """`reason` is one word: a reason of docs/internals/format.md, `missing`, `wrong_identity` or `quarantined`."""
    return CacheCorrupt(
        f"cache {cache_id} is corrupt ({problem}); it is never used. Compress its document again.",
        param="cache_id",
        reason=reason,
    )


def has_children(cache_id: str, children: int) -> CacheHasChildren:
    """children: how many stored caches descend from it."""
    caches = "cache extends" if children == 1 else "caches extend"
    return CacheHasChildren(
        f"{children} {caches} {cache_id}, whose bytes would live on there; delete those first, or all at once with "
        "?cascade=true (cascade=True, kvshelf rm --cascade)",
        param="cache_id",
        children=children,
    )


def require_revision(manifest: Manifest, if_revision: Collection[str] | None) -> None:
    """Raises `EtagMismatch` if the caller names revisions and the cache has another one now."""
    if if_revision is not None and manifest.revision not in if_revision:
        raise EtagMismatch(
            f'cache {manifest.id} was changed since: it has the ETag "{manifest.revision}" now; fetch it and decide '
            "again",
            param="if-match",
        )


def changes(fields: ChangeFields) -> dict[str, Any]:
    """Check the arguments of `update` except the expiry; returns the manifest's fields that change. Raises `TypeError`
    for other names, as a call does."""
    require_names("update", fields, ChangeFields)
    changed: dict[str, Any] = {name: value for name, value in fields.items() if name in ("guaranteed_until", "quality")}
    if "labels" in fields:
        changed["labels"] = require_labels(fields["labels"])
    if "name" in fields:
        changed["name"] = require_text(fields["name"], "name")
    if "pinned" in fields:
        changed["pinned"] = require_flag(fields["pinned"], "pinned")
    return changed


def require_names(call: str, fields: Mapping[str, object], arguments: type) -> None:
    """Raises `TypeError`, as a call does, for keyword arguments that the typed dictionary `arguments` has not."""
    if unknown := fields.keys() - arguments.__annotations__.keys():
        raise TypeError(f"{call}() got an unexpected keyword argument {min(unknown)!r}")


def require_text(value: str, param: str, *, limit: int = TEXT_LIMIT, empty: bool = True) -> str:
    """A string within the limit that any store can hold as UTF-8."""
    if not isinstance(value, str) or len(value) > limit or (not value and not empty):
        least = 0 if empty else 1
        raise InvalidRequest(f"{param} must be text of {least} to {limit} characters, not {value!r:.80}", param=param)
    if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidRequest(f"{param} holds a zero byte or half a surrogate pair: {value!r:.80}", param=param)
    return value


def require_flag(value: object, param: str) -> bool:
    """None is false. Any text would be true, "false" among them."""
    if value not in (None, False, True):
        raise InvalidRequest(f"{param} must be true or false, not {value!r:.80}", param=param)
    return bool(value)


def require_source(source: Source) -> Source:
    """A document's text, at least one character, all encodable as UTF-8; or token ids, at least one."""
    if isinstance(source, TokenIds):
        if not 0 <= source.protected_prefix <= len(source.ids) or not source.ids:
            raise InvalidRequest("source must have token ids, at least those of its protected prefix", param="source")
        return source
    if not isinstance(source, str) or not 0 < len(source) <= SOURCE_LIMIT:
        raise InvalidRequest(f"source must be text of 1 to {SOURCE_LIMIT} characters", param="source")
    if any("\ud800" <= char <= "\udfff" for char in source):
        raise InvalidRequest("source holds half a surrogate pair, which is no text", param="source")
    return source


def require_limit(limit: int) -> None:
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= PAGE_LIMIT:
        raise InvalidRequest(f"limit must be a number from 1 to {PAGE_LIMIT}, not {limit!r}", param="limit")


def require_labels(labels: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(labels, Mapping) or len(labels) > LABEL_LIMIT:
        raise InvalidRequest(f"labels must be a mapping of at most {LABEL_LIMIT} names to texts", param="labels")
    return {
        require_text(key, "labels", limit=64, empty=False): require_text(value, f"labels.{key}")
        for key, value in labels.items()
    }


def require_expiry(ttl_s: float | None, expires_at: float | None, now: float) -> float | None:
    """When a cache expires (Unix seconds, None: never), from a lifetime or a time."""
    if ttl_s is not None and expires_at is not None:
        raise InvalidRequest("give ttl_s or expires_at, not both", param="ttl_s")
    if ttl_s is not None:
        return now + _positive(ttl_s, "ttl_s", 0.0)
    return None if expires_at is None else _positive(expires_at, "expires_at", now)


def require_promise(guaranteed_until: float | None, expires_at: float | None, now: float) -> float | None:
    """Until when a cache is promised to stay (Unix seconds), which must not be after its end."""
    if guaranteed_until is None:
        return None
    until = _positive(guaranteed_until, "guaranteed_until", now)
    if expires_at is not None and until > expires_at:
        raise InvalidRequest(
            f"guaranteed_until: the cache ends {until - expires_at:g} s before {until:g}, until which it is to be "
            "guaranteed; give it a longer life (ttl_s, expires_at), or a shorter guarantee",
            param="guaranteed_until",
        )
    return until


def _positive(value: float, param: Literal["ttl_s", "expires_at", "guaranteed_until"], least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least < value < 1e12:
        meaning = "seconds from now" if param == "ttl_s" else "a time in the future, in Unix seconds"
        raise InvalidRequest(f"{param} must be {meaning}, not {value!r}", param=param)
    return float(value)


def parsed_size(text: str) -> int:
    """`200GiB`, `1.5GB` or `1000` in bytes; 0 for what is no size."""
    match = _SIZE.fullmatch(text)
    return int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
