"""export, import: move one cache between a file and a service or store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvshelf._extras import needs_extra
from kvshelf.atomic import partial_of
from kvshelf.cli import _forms, _options, _references
from kvshelf.cli.caches import Cache
from kvshelf.cli.calibrate import served_model
from kvshelf.cli.checks import stores
from kvshelf.cli.output import common, say, say_json
from kvshelf.errors import CacheCorrupt, InvalidRequest, nearest

if TYPE_CHECKING:
    from kvshelf.api import CacheObject
    from kvshelf.store.base import Store


_UNCHECKED = (
    "source_not_kept: the document's text was left out, because only a service that runs the model can check that it "
    "is the cache's document; import the file through one to keep it"
)


@dataclass(frozen=True)
class ExportFile:
    """The file that an export becomes."""

    to: Annotated[
        str | None,
        typer.Option(metavar="llama.cpp|mlx", help="Write a file of that engine instead, which then answers from it."),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of the numbers, with --to: float32, float16 or bfloat16.  [default: float16 for llama.cpp, the "
            "model's for mlx]"
        ),
    ] = None
    engine_model: Annotated[
        str | None,
        typer.Option(
            help="What that engine runs: a GGUF file, or a folder or name as mlx-lm is told it. A file or folder here "
            "is compared with the cache's model first."
        ),
    ] = None
    model: Annotated[
        str | None, typer.Option(help="The cache's model, with --to and --store: a bundled name, a folder or a hub id.")
    ] = None

    def require_sound(self, store: str | None) -> None:
        """Raises `InvalidRequest` for options that do not go together."""
        from kvshelf.api.caches import EXPORT_SUFFIXES

        if self.to is not None and self.to not in EXPORT_SUFFIXES:
            names = ", ".join(EXPORT_SUFFIXES)
            raise InvalidRequest(f"--to is {self.to!r}; one of {names}{nearest(self.to, EXPORT_SUFFIXES)}", param="to")
        if self.to is None and (self.dtype or self.engine_model or self.model):
            raise InvalidRequest("--dtype, --engine-model and --model say how --to is done; add --to", param="to")
        if self.to is not None and (store is None) != (self.model is None):
            raise InvalidRequest(
                "--model loads the cache's model here, to read it from a --store; a service has its own", param="model"
            )
        if self.to == "llama.cpp" and self.engine_model is not None and not Path(self.engine_model).is_file():
            raise InvalidRequest(f"there is no GGUF file {self.engine_model}", param="engine_model")

    @property
    def service_fields(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "engine_model": self.engine_model if self.to == "mlx" else None}

    def path(self, output: Path | None, id: str) -> Path:
        """Of the file: by default the id, in this folder."""
        from kvshelf.api.caches import EXPORT_SUFFIXES

        return output or Path(
            id + {str(to): suffix for to, suffix in EXPORT_SUFFIXES.items()}.get(str(self.to), ".kvshelf")
        )


def export_cache(
    cache: Cache,
    target: ExportFile,
    output: Annotated[
        Path | None, typer.Option(help="File to write.  [default: the cache's id, in this folder]")
    ] = None,
    store: _options.Store = None,
    encryption_key_file: _options.KeyFile = None,
    url: _options.Url = None,
    as_json: _options.AsJson = False,
) -> None:
    """Write a cache to a file, for `kvshelf import` elsewhere or `CompressedCache.from_bytes`; with --to for another
    engine. Prints the file name.

    The file also holds its name, labels, quality and, if it was kept, the document's text. It is not encrypted. Reads
    from a running service, or with --store directly from a store. With --to llama.cpp it is the state of a sequence
    (`llama_state_seq_load_file`, llama-server's slots), with --to mlx a prompt cache of mlx-lm 0.32 or newer.
    """
    target.require_sound(store)
    if store is None:
        with common.connected(url) as client, common.notes.status(f"fetching {cache} ..."):
            id = _references.id_at(client, cache)
            if target.to is None:
                blob = client.caches.download(id, about=True)
            else:
                blob = client.caches.export(id, target.to, **target.service_fields)  # type: ignore[arg-type]
            _write(target, path := target.path(output, id), [blob])
    else:
        with stores.opened(store, encryption_key_file) as shelf:
            id = _references.id_in(shelf, cache)
            _write(target, path := target.path(output, id), _stored(shelf, id, target))
    size = path.stat().st_size
    if as_json:
        say_json({"id": id, "file": str(path), "bytes": size})
    else:
        say(path)
        common.notes.print(common.megabytes(size), style="dim")


def _stored(shelf: Store, id: str, target: ExportFile) -> Iterator[bytes]:
    """The pieces of an export from a store."""
    manifest = shelf.stat(id)
    if target.to is None:
        from kvshelf.store.about import export_part

        with shelf.open_blob(id) as stored:
            yield from iter(partial(stored.file.read, 1 << 20), b"")
        yield export_part(shelf, manifest)
        return
    with needs_extra("serve", purpose="kvshelf export --to"):
        from kvshelf.engine.engine import Engine
        from kvshelf.workers.replica.reading import exported
    assert target.model is not None, "refused without"
    engine = Engine.load(served_model(target.model), dtype=manifest.identity["model"]["dtype"], shown=target.model)
    yield from exported(engine, shelf, id, target.to, tenant=manifest.tenant, **target.service_fields)  # type: ignore[arg-type]


def _write(target: ExportFile, path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file whole, or not at all where it is not for the weights that its engine runs."""
    weights = None if target.engine_model is None else Path(target.engine_model)
    with common.written(path) as file:
        for piece in pieces:
            file.write(piece)
        if weights is not None and weights.exists():
            with needs_extra("serve", purpose="kvshelf export --engine-model"):
                from kvshelf.engine.files import llamacpp, mlx
                from kvshelf.integrations.engine_weights import require_weights
            file.flush()
            about_file = llamacpp.about_file if target.to == "llama.cpp" else mlx.about_file
            require_weights(about_file(partial_of(path)), weights)


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
    from kvshelf.artifact.exported import MAGIC

    blob = _read(file)
    if fields["name"] is None and not blob.endswith(MAGIC):
        fields["name"] = file.name
    if store is None:
        with common.connected(url) as client, common.notes.status(f"sending {file} ..."), _of_input(file):
            cache = client.caches.import_blob(blob, **fields)
    else:
        with _of_input(file), stores.opened(store, encryption_key_file) as shelf:
            cache = put_export(shelf, blob, fields)
    say_json(cache) if as_json else say(cache.id)


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
