"""push, pull, trust: several caches as one signed bundle, in a folder or in object storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import kvshelf
from kvshelf._extras import needs_extra
from kvshelf.cli import _forms, _options, _references
from kvshelf.cli.checks import stores
from kvshelf.cli.output import common, say, say_json
from kvshelf.cli.transfer import put_export
from kvshelf.errors import InvalidRequest

if TYPE_CHECKING:
    from kvshelf.api import CacheObject
    from kvshelf.client import Client
    from kvshelf.store.bundles.bundle import Bundle

Place = Annotated[
    str, typer.Argument(metavar="PLACE", help="A folder, or s3://bucket/prefix. It has the layout of OCI images.")
]
TrustFile = Annotated[
    Path, typer.Option("--trust", envvar="KVSHELF_TRUST_FILE", help="Keys whose bundles are taken: `kvshelf trust`.")
]


@dataclass(frozen=True, kw_only=True)
class Signing:
    name: Annotated[str, typer.Option(help="Of the bundle; one of this name at the place is replaced.")] = "bundle"
    key: Annotated[
        Path | None,
        typer.Option(help="Private key of Ed25519 in PEM: openssl genpkey -algorithm ed25519 -out bundles.pem"),
    ] = None
    producer: Annotated[str, typer.Option(help="Who makes it, in your own words.")] = ""


@dataclass(frozen=True, kw_only=True)
class BundledShelf:
    """The shelf of caches: that of a service, or a store."""

    store: _options.Store = None
    encryption_key_file: _options.KeyFile = None
    url: _options.Url = None


def push(
    place: Place,
    signing: Signing,
    shelf: BundledShelf,
    caches: Annotated[list[str] | None, typer.Argument(metavar="[CACHE]...", help="Ids or names of caches.")] = None,
    label: _options.Labels = None,
    signature_only: Annotated[
        bool,
        typer.Option(
            "--signature-only", help="Sign without copying: for shelves that lie over this one (signed=PLACE)."
        ),
    ] = False,
    as_json: _options.AsJson = False,
) -> None:
    """Write caches as a signed bundle, for `kvshelf pull` elsewhere. Prints its digest.

    The caches that are named, and those with every --label. Everything is written and read back before the bundle
    appears; a reader finds the one before it or this one. It is signed and not encrypted.
    """
    with needs_extra("serve", purpose="kvshelf push"):
        from kvshelf.store.bundles.bundle import push as push_bundle
        from kvshelf.store.bundles.places import place_at
        from kvshelf.store.erasure.signing import Signer

    if signing.key is None:
        raise InvalidRequest("a bundle is signed; name the private key with --key", param="--key")
    labels = common.pairs(label, "--label")
    if not caches and not labels:
        raise InvalidRequest("no cache was named; give some, or --label", param="CACHE")
    signer = Signer.read(signing.key, param="--key")
    with ExitStack() as stack:
        ids, export = _exported(stack, shelf, caches or [], labels)
        software = f"kvshelf {kvshelf.__version__}"
        signed_ids = ids if signature_only else None
        entry = push_bundle(
            place_at(place), signing.name, map(export, ids), signer, signing.producer, software, signed_ids=signed_ids
        )
    if as_json:
        say_json({"name": signing.name, "digest": entry.digest, "key": entry.annotations.key})
    else:
        say(entry.digest)


def pull(
    place: Place,
    trust: TrustFile,
    fields: Annotated[dict[str, Any], _forms.IMPORTED],
    shelf: BundledShelf,
    bundle: Annotated[str | None, typer.Option(help="Which bundle, where the place has several.")] = None,
    as_json: _options.AsJson = False,
) -> None:
    """Put the caches of a bundle on a shelf, once all of it is checked. Prints their ids.

    Refused, before any is stored: a bundle whose key is not trusted, one that was changed, one of a newer format, one
    with caches of a model that the service does not run, and one older than another of the same name that was pulled.
    """
    with needs_extra("serve", purpose="kvshelf pull"):
        from kvshelf.store.bundles.bundle import opened
        from kvshelf.store.bundles.places import place_at
        from kvshelf.store.bundles.trust import Trust

    signed = opened(place_at(place), Trust(trust), bundle)
    signed.require_takeable()
    with _importing(signed, shelf) as put:
        signed.verify()
        for export in signed.exports():
            cache = put(export, fields)
            say_json(cache) if as_json else say(cache.id)
    signed.taken()
    summary = f"{signed.about.name} number {signed.about.sequence}, signed by {signed.producer}"
    common.notes.print(summary, style="dim", soft_wrap=True)


def trust(
    name: Annotated[str, typer.Argument(help="What the key is called here.")],
    public_key: Annotated[
        Path, typer.Argument(metavar="KEY", help="Public key in PEM: openssl pkey -in bundles.pem -pubout")
    ],
    file: TrustFile,
) -> None:
    """Trust bundles that are signed with a key. The file is made if it is missing; only its owner may change it."""
    with needs_extra("serve", purpose="kvshelf trust"):
        from kvshelf.store.bundles.trust import Trust
        from kvshelf.store.erasure.signing import public_key as read_key

    key = read_key(public_key, param="KEY")
    Trust(file).add(name, key)
    say(key)


def _exported(
    stack: ExitStack, shelf: BundledShelf, references: Sequence[str], labels: Mapping[str, str]
) -> tuple[list[str], Callable[[str], bytes]]:
    """The ids of caches, each once, and what exports one."""
    if shelf.store is None:
        client = stack.enter_context(_client(shelf))
        ids = [_references.id_at(client, reference) for reference in references]
        ids += [cache.id for cache in client.caches.list(labels=labels, limit=1000)] if labels else []
        return list(dict.fromkeys(ids)), partial(client.caches.download, about=True)
    store = stack.enter_context(stores.opened(shelf.store, shelf.encryption_key_file))
    from kvshelf.store.about import export_part

    def export(id: str) -> bytes:
        with store.open_blob(id) as stored:
            return stored.file.read() + export_part(store, store.stat(id))

    ids = [_references.id_in(store, reference) for reference in references]
    page = store.list(labels=labels, limit=1000) if labels else None
    while page is not None:
        ids += [manifest.id for manifest in page.data]
        page = store.list(labels=labels, limit=1000, after=page.data[-1].id) if page.has_more else None
    return list(dict.fromkeys(ids)), export


@contextmanager
def _importing(signed: Bundle, shelf: BundledShelf) -> Iterator[Callable[[bytes, Mapping[str, Any]], CacheObject]]:
    if shelf.store is not None:
        with stores.opened(shelf.store, shelf.encryption_key_file) as store:
            yield partial(put_export, store)
        return
    with _client(shelf) as client:
        signed.require_models(name for model in client.models.list() for name in model.read_fingerprints)
        yield lambda export, fields: client.caches.import_blob(export, **fields)


def _client(shelf: BundledShelf) -> Client:
    from kvshelf.client import Client

    return Client(shelf.url)
