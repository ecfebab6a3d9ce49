"""export, import: move one cache between a file and a service or store."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvshelf.cli import _forms, _options, _references
from kvshelf.cli.caches import Cache
from kvshelf.cli.checks import stores
from kvshelf.cli.output import common, say, say_json
from kvshelf.errors import CacheCorrupt, InvalidRequest

if TYPE_CHECKING:
    from kvshelf.api import CacheObject
    from kvshelf.store.base import Store


_UNCHECKED = (
    "source_not_kept: the document's text was left out, because only a service that runs the model can check that it "
    "is the cache's document; import the file through one to keep it"
)


def export_cache(
    cache: Cache,
    output: Annotated[Path, typer.Option(help="File to write.")],
    store: _options.Store = None,
    encryption_key_file: _options.KeyFile = None,
    url: _options.Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """Write a cache to a file, for `kvshelf import` elsewhere or `CompressedCache.from_bytes`. Prints the file name.

    The file also holds its name, labels, quality and, if it was kept, the document's text. It is not encrypted. Reads
    from a running service, or with --store directly from a store.
    """
    if store is None:
        with common.connected(url, as_json=as_json) as client, common.notes.status(f"fetching {cache} ..."):
            id = _references.id_at(client, cache)
            blob = client.caches.download(id, about=True)
            with common.written(output) as file:
                file.write(blob)
    else:
        with (
            common.named_errors(as_json=as_json),
            stores.opened(store, encryption_key_file) as shelf,
            shelf.open_blob(id := _references.id_in(shelf, cache)) as stored,
            common.written(output) as file,
        ):
            from kvshelf.store.about import export_part

            shutil.copyfileobj(stored.file, file, 1 << 20)
            file.write(export_part(shelf, shelf.stat(id)))
    size = output.stat().st_size
    if as_json:
        say_json({"id": id, "file": str(output), "bytes": size})
    else:
        say(output)
        common.notes.print(common.megabytes(size), style="dim")


def import_cache(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file written by `kvshelf export`.")],
    fields: Annotated[dict[str, Any], _forms.IMPORTED],
    store: _options.Store = None,
    encryption_key_file: _options.KeyFile = None,
    url: _options.Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """Put an exported cache on a shelf and print its id. Every digest is checked first.

    It keeps its name, labels and quality, which are what the exporter claims; --name and --label have precedence.
    Writes through a running service, or with --store directly into a store. A service also refuses caches of models
    that it does not run, and keeps the document's text, after checking it against the cache.
    """
    with common.named_errors(as_json=as_json):
        from kvshelf.artifact.exported import MAGIC

        blob = _read(file)
        if fields["name"] is None and not blob.endswith(MAGIC):
            fields["name"] = file.name
        if store is None:
            with (
                common.connected(url, as_json=as_json) as client,
                common.notes.status(f"sending {file} ..."),
                _of_input(file),
            ):
                cache = client.caches.import_blob(blob, **fields)
        else:
            with _of_input(file), stores.opened(store, encryption_key_file) as shelf:
                cache = put_export(shelf, blob, fields)
    if as_json:
        common.print_object(cache)
    else:
        say(cache.id)


@contextmanager
def _of_input(file: Path) -> Iterator[None]:
    """Damage to the file is a fault of the input, and none of the shelf's."""
    try:
        yield
    except CacheCorrupt as error:
        raise InvalidRequest(f"{file} is no sound cache: {error.message}", param="FILE", **error.details) from error


def put_export(shelf: Store, blob: bytes, fields: Mapping[str, Any]) -> CacheObject:
    """Import a blob or an export directly into a store."""
    from kvshelf.artifact.blob import inspect
    from kvshelf.artifact.cache import CompressedCache
    from kvshelf.artifact.exported import split
    from kvshelf.service.service import cache_object
    from kvshelf.store.about import about_of
    from kvshelf.store.manifest import Judgement

    exported = split(blob)
    about = about_of(exported)
    header = inspect(exported.blob).header
    header.shape.require_bounds(header.to_identity().model)
    cache = CompressedCache.from_bytes(exported.blob)
    if exported.source:
        common.notes.print(_UNCHECKED, style="yellow", soft_wrap=True)
    stored = shelf.put(
        cache,
        ttl_s=fields["ttl_s"],
        ttl_renew_s=fields["ttl_s"] if fields["ttl_renew"] else None,
        name=about.name if fields["name"] is None else fields["name"],
        labels=about.labels | dict(fields["labels"] or {}),
        judged=Judgement(quality=about.quality),
    )
    return cache_object(stored)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"cannot read {file}: {error.strerror}", param="FILE") from error
