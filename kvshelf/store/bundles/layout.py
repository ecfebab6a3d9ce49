"""The files of a bundle: OCI's image layout 1.0, whose manifest names the exports and what is said about them."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer
from pydantic.alias_generators import to_camel

from kvshelf.api import Quality
from kvshelf.api.strict import CacheName, Labels, parse_json
from kvshelf.artifact.blob.header import ModelHeader
from kvshelf.artifact.identity import canonical_json
from kvshelf.errors import InvalidRequest

FORMAT: Final = 1
MOST_CACHES: Final = 1024
MAX_JSON: Final = 8 << 20
"""Bytes of a file that is no export."""

NAME: Final = r"^[a-z0-9]([a-z0-9._-]{0,126}[a-z0-9])?$"

LAYOUT_FILE: Final = "oci-layout"
INDEX_FILE: Final = "index.json"
LAYOUT: Final = b'{"imageLayoutVersion":"1.0.0"}'

_ARTIFACT: Final = "application/vnd.kvshelf.bundle.v{}+json"
ABOUT_TYPE: Final = "application/vnd.kvshelf.bundle.about.v1+json"
EXPORT_TYPE: Final = "application/vnd.kvshelf.export.v1"
_NEWER: Final = re.compile(_ARTIFACT.replace(".", r"\.").replace("+", r"\+").format(r"(\d{1,9})"))

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=0, le=2**53)]


class _Part(BaseModel):
    """A part of a bundle's file. Nothing is converted, nothing unknown passes."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        alias_generator=to_camel,
        populate_by_name=True,
        hide_input_in_errors=True,
    )


class Descriptor(_Part):
    media_type: Literal["application/vnd.kvshelf.bundle.about.v1+json", "application/vnd.kvshelf.export.v1"]
    digest: Digest
    size: Size


class ImageManifest(_Part):
    """An OCI image manifest. config: the `BundleAbout`. layers: the exports, in its order."""

    schema_version: Literal[2] = 2
    media_type: Literal["application/vnd.oci.image.manifest.v1+json"] = "application/vnd.oci.image.manifest.v1+json"
    artifact_type: Literal["application/vnd.kvshelf.bundle.v1+json"] = "application/vnd.kvshelf.bundle.v1+json"
    config: Descriptor
    layers: Annotated[list[Descriptor], Field(min_length=1, max_length=MOST_CACHES)]


class Signed(_Part):
    """The annotations of a bundle in an index. key: the public key, signature: see `signed_text`, both of Ed25519."""

    name: Annotated[str, Field(alias="org.opencontainers.image.ref.name", pattern=NAME)]
    key: Annotated[str, Field(alias="org.kvshelf.key", pattern="^[0-9a-f]{64}$")]
    signature: Annotated[str, Field(alias="org.kvshelf.signature", pattern="^[0-9a-f]{128}$")]


class IndexEntry(_Part):
    media_type: Literal["application/vnd.oci.image.manifest.v1+json"] = "application/vnd.oci.image.manifest.v1+json"
    artifact_type: Literal["application/vnd.kvshelf.bundle.v1+json"] = "application/vnd.kvshelf.bundle.v1+json"
    digest: Digest
    size: Size
    annotations: Signed


class ImageIndex(_Part):
    schema_version: Literal[2] = 2
    media_type: Literal["application/vnd.oci.image.index.v1+json"] = "application/vnd.oci.image.index.v1+json"
    manifests: Annotated[list[IndexEntry], Field(max_length=MOST_CACHES)]


class CacheAbout(_Part):
    """One cache. root: the root digest of its blob, in hex. model: its place among `BundleAbout.models`. quality: as
    measured when the cache was made, None if it was not. id, content: only in a bundle of signatures alone, the cache's
    id on the shelf, which includes its tenant, and `Manifest.content_digest`."""

    root: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    model: Annotated[int, Field(ge=0)]
    policy: str
    codec: str
    compression_ratio: float
    num_tokens: int
    name: CacheName
    labels: Labels
    quality: Quality | None
    id: Annotated[str, Field(pattern="^kvs_[0-9a-f]{40}$")] | None = None
    content: Annotated[str, Field(pattern="^[0-9a-f]{40}$")] | None = None

    @model_serializer(mode="wrap")
    def _of_a_shelf(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        absent = [name for name in ("id", "content") if fields[name] is None]
        return {name: value for name, value in fields.items() if name not in absent}


class BundleAbout(_Part):
    """The description of a bundle. sequence: a later bundle of the same name and key has a higher one. made_at: Unix
    seconds. producer: free text."""

    format: Literal[1] = FORMAT
    name: Annotated[str, Field(pattern=NAME)]
    sequence: Annotated[int, Field(ge=1, lt=2**53)]
    made_at: float
    producer: Annotated[str, Field(max_length=256)]
    software: Annotated[str, Field(max_length=256)]
    models: list[ModelHeader]
    caches: Annotated[list[CacheAbout], Field(min_length=1, max_length=MOST_CACHES)]


PartT = TypeVar("PartT", bound=_Part)


def written(part: _Part) -> bytes:
    """The one form that a reader takes."""
    return canonical_json(part.model_dump(mode="json", by_alias=True)).encode()


def read(kind: type[PartT], data: bytes, what: str) -> PartT:
    """Raises `InvalidRequest`, with reason `newer_format` for a file of a later version of kvshelf."""
    try:
        values = parse_json(data)
    except ValueError as error:
        raise refused("malformed", f"{what} is no JSON") from error
    _require_known(values, what)
    try:
        part = kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))[:200]
        raise refused("malformed", f"{what} has {where or 'no object'}: {first['msg']}") from error
    if written(part) != data:
        raise refused("malformed", f"{what} is not written in the one canonical way")
    return part


def _require_known(values: Any, what: str) -> None:
    """Checked first: fields of a later version are unknown here."""
    manifests = values.get("manifests") if isinstance(values, dict) else None
    for part in [values, *(manifests if isinstance(manifests, list) else ())]:
        if not isinstance(part, dict):
            continue
        newer = _NEWER.fullmatch(str(part.get("artifactType", "")))
        version = int(newer[1]) if newer else part.get("format", FORMAT)
        if isinstance(version, int) and version > FORMAT:
            raise refused(
                "newer_format", f"{what} has format {version}; this version of kvshelf reads {FORMAT}. Upgrade kvshelf"
            )


def digest_of(data: bytes | memoryview) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def blob_name(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def signed_text(manifest: str) -> str:
    """The text that a signature signs. manifest: its digest, which covers the digests of all other files."""
    return f"kvshelf.bundle {manifest}"


def is_name(text: str) -> bool:
    return re.fullmatch(NAME, text) is not None


def entry_of(index: ImageIndex, name: str | None) -> IndexEntry:
    """The bundle of a name, or the only one. Raises `InvalidRequest`."""
    entries = [entry for entry in index.manifests if name in (None, entry.annotations.name)]
    if len(entries) != 1:
        names = ", ".join(sorted(entry.annotations.name for entry in index.manifests)[:20]) or "none"
        problem = "it is not said which" if name is None else f"not {name!r} once"
        raise InvalidRequest(f"the place has the bundles {names}, and {problem}; name one of them", param="--name")
    return entries[0]


def refused(reason: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"the bundle is refused: {problem}", param="SOURCE", reason=reason)
