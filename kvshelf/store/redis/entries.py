"""Arguments and replies of `index.lua` as kvshelf's types.

Foreign values under our keys are a named error: another program may have written to this server.
"""

from __future__ import annotations

import json
from typing import cast

from kvshelf.errors import StoreUnavailable
from kvshelf.store.artifact.identity import digest
from kvshelf.store.index import KEEP_ENDED_S, Entry, EntryState, Query, Writing
from kvshelf.store.manifest import Manifest
from kvshelf.store.redis.script import Value


def writing_fields(writing: Writing) -> dict[str, Value]:
    """A write as the script registers it."""
    return {
        "name": writing.name,
        "tenant": writing.tenant,
        "nbytes": writing.nbytes,
        "source": writing.source,
        "source_bytes": writing.source_bytes,
    }


def manifest_fields(manifest: Manifest) -> dict[str, Value]:
    """A manifest as the script stores and lists it."""
    return {
        "id": manifest.id,
        "text": manifest.model_dump_json(),
        "expires_at": manifest.expires_at,
        "pinned": manifest.pinned,
        "listings": ",".join(_listings(manifest)),
        "keep_ended_s": KEEP_ENDED_S,
    }


def _listings(manifest: Manifest) -> list[str]:
    """Every listing that a cache is in."""
    own = Query(manifest.tenant, manifest.document_id, manifest.model, manifest.policy, manifest.labels)
    return [_listing(manifest.tenant), *listings_of(own)]


def listings_of(query: Query) -> list[str]:
    """The listings whose common members answer a query."""
    columns = {"document": query.document_id, "model": query.model, "policy": query.policy}
    found = [_listing(query.tenant, name, value) for name, value in columns.items() if value is not None]
    found += [_listing(query.tenant, "label", name, value) for name, value in query.labels.items()]
    return found or [_listing(query.tenant)]


def _listing(tenant: str, *which: str) -> str:
    return digest("kvshelf.listing", tenant, *which)


def read_writing(name: bytes, record: bytes) -> Writing:
    """The inverse of `writing_fields`, from a name and the record that the script keeps under it."""
    try:
        nbytes, source_bytes, source, tenant = record.decode().split(" ", 3)
        return Writing(
            name=name.decode(),
            cache_id=f"kvs_{name.decode()[:40]}",
            tenant=tenant,
            nbytes=int(nbytes),
            source=None if source == "-" else source,
            source_bytes=int(source_bytes),
        )
    except ValueError as error:
        raise StoreUnavailable(
            f"a write in Redis, {name!r}, is not what kvshelf wrote there: {record!r:.200}"
        ) from error


def read_entry(shown: tuple[bytes, bytes | None], *, as_kept: bool = False) -> Entry:
    """An entry from the reply of `show` in `index.lua`: the fields, and the manifest if there is one.

    A ready entry without a manifest is expired if its expiry has passed, else corrupt. as_kept: it stays ready, as
    sweeps need it.
    """
    try:
        return _parsed(json.loads(shown[0]), shown[1], as_kept)
    except (KeyError, ValueError) as error:
        raise StoreUnavailable(
            f"an entry of the shelf in Redis is not what kvshelf wrote there: {error!r:.200}"
        ) from error


def _parsed(fields: dict[str, str], text: bytes | None, as_kept: bool) -> Entry:
    expires_at, problem, state = _float(fields.get("expires_at")), fields.get("problem"), fields["state"]
    if state == "ready" and text is None and not as_kept:
        ended = expires_at is not None and expires_at <= float(fields["server_s"])
        state, problem = ("expired", None) if ended else ("corrupt", "its manifest is gone from the server")
    return Entry(
        seq=int(fields["seq"]),
        id=fields["id"],
        tenant=fields["tenant"],
        state=cast(EntryState, state),
        version=int(fields["version"]),
        name=fields.get("name"),
        nbytes=int(fields.get("nbytes", 0)),
        source=fields.get("source"),
        source_bytes=int(fields.get("source_bytes", 0)),
        expires_at=expires_at,
        last_used_at=_float(fields.get("last_used_at")),
        uses=int(fields.get("uses", 0)),
        cost_s=float(fields.get("cost_s", 0)),
        priority=float(fields.get("priority", 0)),
        pinned=fields.get("pinned") == "1",
        ended_at=_float(fields.get("ended_at")),
        problem=problem,
        text=None if text is None else text.decode(),
    )


def _float(text: str | None) -> float | None:
    return None if text is None else float(text)
