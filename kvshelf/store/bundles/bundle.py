"""Bundles written, and read with everything in them checked."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat

from kvshelf.artifact.blob import inspect
from kvshelf.artifact.blob.header import ModelHeader
from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.exported import split
from kvshelf.artifact.identity import ModelIdentity
from kvshelf.errors import InvalidRequest, KvshelfError, StoreUnavailable
from kvshelf.store.about import about_of
from kvshelf.store.bundles import layout
from kvshelf.store.bundles.layout import (
    BundleAbout,
    CacheAbout,
    Descriptor,
    ImageIndex,
    ImageManifest,
    IndexEntry,
    Signed,
    refused,
)
from kvshelf.store.bundles.places import BundlePlace
from kvshelf.store.bundles.trust import Trust
from kvshelf.store.erasure.signing import Signer, signed_by
from kvshelf.store.manifest import describe


def push(
    place: BundlePlace,
    name: str,
    exports: Iterable[bytes],
    signer: Signer,
    producer: str = "",
    software: str = "",
    *,
    signed_ids: Iterable[str] | None = None,
) -> IndexEntry:
    """Write exports as the bundle `name`, in place of an older one; other bundles at the place stay. Everything is
    written, read back and compared before the index names it. signed_ids: the ids of the exports on their shelf, for a
    bundle of signatures alone (`SignedCaches`). Raises `InvalidRequest`, `StoreUnavailable`."""
    if not layout.is_name(name):
        raise InvalidRequest(
            f"a bundle is called by up to 128 of a-z, 0-9 and ._- between letters or digits, not {name!r:.80}",
            param="--name",
        )
    index = _index(place)
    layers, caches, models = list[Descriptor](), list[CacheAbout](), list[ModelHeader]()
    ids: Iterable[str | None] = repeat(None) if signed_ids is None else signed_ids
    for export, id in zip(exports, ids):  # noqa: B905 one of them may have no end
        if len(layers) == layout.MOST_CACHES:
            raise InvalidRequest(f"a bundle has at most {layout.MOST_CACHES} caches; make several", param="CACHE")
        about, model = _described(export, id)
        if model not in models:
            models.append(model)
        caches.append(about.model_copy(update={"model": models.index(model)}))
        digest = _keep(place, export) if id is None else layout.digest_of(export)
        layers.append(_descriptor(export, digest, layout.EXPORT_TYPE))
    if not layers:
        raise InvalidRequest("no cache was named; a bundle has one at least", param="CACHE")
    about_bundle = BundleAbout(
        name=name,
        sequence=_next_sequence(place, index, name),
        made_at=time.time(),
        producer=producer,
        software=software,
        models=models,
        caches=caches,
    )
    about_file = layout.written(about_bundle)
    config = _descriptor(about_file, _keep(place, about_file), layout.ABOUT_TYPE)
    manifest = layout.written(ImageManifest(config=config, layers=layers))
    digest = _keep(place, manifest)
    signature = signer.signature(layout.signed_text(digest))
    annotations = Signed(name=name, key=signature["public_key"], signature=signature["signature"])
    entry = IndexEntry(digest=digest, size=len(manifest), annotations=annotations)
    others = [entry for entry in index.manifests if entry.annotations.name != name]
    place.write(layout.LAYOUT_FILE, layout.LAYOUT)
    place.write(layout.INDEX_FILE, layout.written(ImageIndex(manifests=[*others, entry])))
    return entry


@dataclass(frozen=True)
class Bundle:
    """A bundle signed with a trusted key, and not older than the newest that was taken. producer: the key's name."""

    entry: IndexEntry
    about: BundleAbout
    layers: tuple[Descriptor, ...]
    producer: str
    place: BundlePlace
    trust: Trust

    def exports(self) -> Iterator[bytes]:
        """Each cache, for an import, after its digest and all digests in it were checked against the bundle's
        description of it. Raises `InvalidRequest`."""
        for number, (layer, signed) in enumerate(zip(self.layers, self.about.caches, strict=True)):
            what = f"cache {number}"
            export = _blob(self.place, layer, what)
            try:
                about, model = _described(export)
                CompressedCache.from_bytes(export)
            except KvshelfError as error:
                raise refused("malformed", f"{what} is no sound export ({error.message})") from error
            if signed.model >= len(self.about.models) or model != self.about.models[signed.model]:
                raise refused("other_model", f"{what} was made under another model than the bundle says")
            if about.model_copy(update={"model": signed.model}) != signed:
                raise refused("malformed", f"the bundle says of {what} what its export does not")
            yield export

    def verify(self) -> None:
        """Read everything once. Raises `InvalidRequest`."""
        for _ in self.exports():
            pass

    def require_models(self, fingerprints: Iterable[str]) -> None:
        """Raise `InvalidRequest` for a cache of a model that has none of these `ModelIdentity.fingerprint`s."""
        served = set(fingerprints)
        for header in self.about.models:
            model = ModelIdentity(**header.model_dump())
            if (fingerprint := model.fingerprint()) not in served:
                problem = (
                    f"it has caches of {model.name!r} with the fingerprint {fingerprint[:16]}, which is not served"
                )
                raise refused("other_model", f"{problem} here")

    def require_takeable(self) -> None:
        """Raise `InvalidRequest` before any work if the bundle could not be remembered."""
        self.trust.require_takeable(*self._mark)

    def taken(self) -> None:
        """Remember it as the newest, once its caches are on the shelf."""
        self.trust.take(*self._mark)

    @property
    def _mark(self) -> tuple[str, str, int, str]:
        return self.entry.annotations.key, self.about.name, self.about.sequence, self.entry.digest


def opened(place: BundlePlace, trust: Trust, name: str | None = None) -> Bundle:
    """The bundle of a name at a place, or the only one there. Raises `InvalidRequest` with a reason: `malformed`,
    `digest_mismatch`, `bad_signature`, `untrusted_key`, `newer_format` or `rollback`."""
    return _opened(place, trust, layout.entry_of(_known_index(place), name))


def bundles_at(place: BundlePlace, trust: Trust) -> list[Bundle]:
    """All bundles at a place. Raises as `opened`, for any of them."""
    return [_opened(place, trust, entry) for entry in _known_index(place).manifests]


def _known_index(place: BundlePlace) -> ImageIndex:
    version = place.read(layout.LAYOUT_FILE, layout.MAX_JSON)
    if version is None:
        raise refused("malformed", f"there is none: the place has no {layout.LAYOUT_FILE}")
    if version != layout.LAYOUT:
        raise refused("malformed", f"{layout.LAYOUT_FILE} is not that of version 1.0.0")
    return _index(place)


def _opened(place: BundlePlace, trust: Trust, entry: IndexEntry) -> Bundle:
    signed = entry.annotations
    producer = trust.require(signed.key)
    if not signed_by(signed.key, signed.signature, layout.signed_text(entry.digest)):
        raise refused("bad_signature", f"the signature is not that of {producer}")
    manifest = _manifest(place, entry)
    about = _about(place, manifest)
    if about.name != signed.name:
        raise refused("malformed", f"it is called {signed.name!r}, and signed as {about.name!r}")
    if len(about.caches) != len(manifest.layers):
        raise refused("malformed", f"{len(about.caches)} caches are said, and {len(manifest.layers)} are there")
    trust.require_newer(signed.key, about.name, about.sequence, entry.digest)
    return Bundle(entry, about, tuple(manifest.layers), producer, place, trust)


def _index(place: BundlePlace) -> ImageIndex:
    data = place.read(layout.INDEX_FILE, layout.MAX_JSON)
    return ImageIndex(manifests=[]) if data is None else layout.read(ImageIndex, data, layout.INDEX_FILE)


def _next_sequence(place: BundlePlace, index: ImageIndex, name: str) -> int:
    """Seconds since 1970, so that a bundle at a new place is newer than one at an old place; above the number of the
    bundle that it replaces."""
    before = 0
    for entry in index.manifests:
        if entry.annotations.name == name:
            before = _about(place, _manifest(place, entry)).sequence
    return max(before + 1, int(time.time()))


def _manifest(place: BundlePlace, entry: IndexEntry) -> ImageManifest:
    return layout.read(ImageManifest, _checked(place, entry.digest, entry.size, "the manifest"), "the manifest")


def _about(place: BundlePlace, manifest: ImageManifest) -> BundleAbout:
    return layout.read(BundleAbout, _blob(place, manifest.config, "what is said"), "what is said of it")


def _described(export: bytes, id: str | None = None) -> tuple[CacheAbout, ModelHeader]:
    """The description of a cache, by its export and its id on a shelf. Raises `BlobError`, `InvalidRequest`."""
    exported = split(export)
    summary, about = inspect(exported.blob), about_of(exported)
    identity, content = summary.header.identity, None
    if id is not None:
        cache = CompressedCache.from_bytes(export)
        content = describe(cache, cache.pack(), id=id, document_id="", tenant="", created_at=0).content_digest
    described = CacheAbout(
        root=summary.root.hex(),
        model=0,
        policy=identity.policy,
        codec=summary.header.codec,
        compression_ratio=identity.compression_ratio,
        num_tokens=summary.header.num_tokens,
        name=about.name,
        labels=about.labels,
        quality=about.quality,
        id=id,
        content=content,
    )
    return described, identity.model


def _descriptor(data: bytes, digest: str, media_type: str) -> Descriptor:
    return Descriptor.model_validate({"mediaType": media_type, "digest": digest, "size": len(data)})


def _keep(place: BundlePlace, data: bytes) -> str:
    """Write a file under its digest unless it is there, and read it back."""
    digest = layout.digest_of(data)
    name = layout.blob_name(digest)
    if not _holds(place, name, data):
        place.write(name, data)
        if not _holds(place, name, data):
            raise StoreUnavailable(f"{name} does not hold what was written; check the disk or the storage")
    return digest


def _holds(place: BundlePlace, name: str, data: bytes) -> bool:
    try:
        return place.read(name, len(data)) == data
    except InvalidRequest:  # it is longer
        return False


def _blob(place: BundlePlace, descriptor: Descriptor, what: str) -> bytes:
    return _checked(place, descriptor.digest, descriptor.size, what)


def _checked(place: BundlePlace, digest: str, size: int, what: str) -> bytes:
    data = place.read(layout.blob_name(digest), size)
    if data is None:
        raise refused("malformed", f"{what} is missing, {digest}")
    if layout.digest_of(data) != digest or len(data) != size:
        raise refused("digest_mismatch", f"{what} is not what was signed: its digest differs")
    return data
