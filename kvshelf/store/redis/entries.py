"""Arguments and replies of `index.lua` as kvshelf's types.

Foreign values under our keys are a named error: another program may have written to this server.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Final

from pydantic import TypeAdapter

from kvshelf.artifact.identity import digest
from kvshelf.errors import StoreUnavailable
from kvshelf.store.blobs import cache_of
from kvshelf.store.index import ID_PREFIX, KEEP_ENDED_S, Entry, Filters, Writing
from kvshelf.store.manifest import Manifest
from kvshelf.store.redis.script import Value

_ENTRY: Final = TypeAdapter(Entry)


def writing_fields(writing: Writing) -> dict[str, Value]:
    """A write as the script registers it."""
    return {
        "name": writing.name,
        "tenant": writing.tenant,
        "nbytes": writing.nbytes,
        "of_cache": writing.of_cache,
        "bases": ",".join(f"{name}:{nbytes}" for name, nbytes in writing.bases) or None,
    }


def manifest_fields(manifest: Manifest) -> dict[str, Value]:
    """A manifest as the script stores and lists it."""
    columns = (manifest.tenant, manifest.document_id, manifest.model, manifest.policy, manifest.name, manifest.id)
    own = Filters(*columns, manifest.labels, manifest.parent_id)
    return {
        "id": manifest.id,
        "text": manifest.model_dump_json(),
        "expires_at": manifest.expires_at,
        "pinned": manifest.pinned,
        "listings": ",".join([_listing(manifest.tenant), *listings_of(own)]),
        "keep_ended_s": KEEP_ENDED_S,
    }


def listings_of(query: Filters) -> list[str]:
    """The listings whose common members answer a query, but for the rest of a longer `id_prefix`."""
    columns = {
        "document": query.document_id,
        "model": query.model,
        "policy": query.policy,
        "name": query.name,
        "parent": query.parent_id,
        "id": query.id_prefix and query.id_prefix[:ID_PREFIX],
    }
    listings = [_listing(query.tenant, name, value) for name, value in columns.items() if value is not None]
    listings += [_listing(query.tenant, "label", name, value) for name, value in query.labels.items()]
    return listings or [_listing(query.tenant)]


def _listing(tenant: str, *which: str) -> str:
    return digest("kvshelf.listing", tenant, *which)


def read_writing(name: bytes, record: bytes) -> Writing:
    """The inverse of `writing_fields`, from a name and the record that the script keeps under it."""
    try:
        nbytes, of_cache, tenant = record.decode().split(" ", 2)
        return Writing(
            name=name.decode(),
            cache_id=cache_of(name.decode()),
            tenant=tenant,
            nbytes=int(nbytes),
            of_cache=bool(int(of_cache)),
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
        fields = json.loads(shown[0]) | {"text": shown[1]}
        fields["bases"] = [base.split(":") for base in filter(None, fields.get("bases", "").split(","))]
        entry = _ENTRY.validate_python(fields)
        if entry.state != "ready" or entry.text is not None or as_kept:
            return entry
        if entry.expired(float(fields["server_s"])):
            return replace(entry, state="expired")
        return replace(entry, state="corrupt", problem="its manifest is gone from the server")
    except (KeyError, TypeError, ValueError) as error:
        raise StoreUnavailable(
            f"an entry of the shelf in Redis is not what kvshelf wrote there: {error!r:.200}"
        ) from error
