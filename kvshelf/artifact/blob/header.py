"""The header of a blob: what its segments hold and where, packed as msgpack and read back strictly."""

from __future__ import annotations

import math
import re
from collections.abc import Set
from itertools import pairwise
from typing import Annotated, Any, Final

import msgpack
from pydantic import (
    AfterValidator,
    FailFast,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from kvshelf.artifact import positions
from kvshelf.artifact.blob.kinds.record import MAX_ARRAY, Count, Size, Strict, inconsistent
from kvshelf.artifact.blob.layer import ALIGNMENT, DIGEST_BYTES, Layer
from kvshelf.artifact.codecs import Codec
from kvshelf.artifact.identity import MAX_IMAGES, MAX_PROTECTED_SPANS, Boundary, Identity, Layout, canonical_msgpack
from kvshelf.artifact.shape import CODE_BYTES, MAX_CODES, Shape
from kvshelf.errors import BlobError, InvalidRequest

HEADER_LIMIT: Final = 256 * 1024
"""Bytes. 200 layers of 128 ragged KV heads need about 160 KiB; reading 256 KiB takes at most 80 MB."""

SENTENCE_BYTES: Final = 32 * 1024
"""Most bytes of the ends of sentences: with a summary of 64 KiB and the layers of the largest models they fit."""

_MAX_MAP = 256
_MAX_DEPTH = 32
_SHA256: Final = re.compile("[0-9a-f]{64}")
_STRINGS: Final = frozenset({str})
_SHOWN = 200  # characters of a name that a message repeats

Text = Annotated[str, Field(max_length=HEADER_LIMIT)]


def _whole(codes: bytes) -> bytes:
    if len(codes) % CODE_BYTES:
        raise ValueError(f"{len(codes)} bytes are no whole number of codes, of {CODE_BYTES} bytes")
    return codes


Codes = Annotated[bytes, Field(min_length=CODE_BYTES, max_length=MAX_CODES * CODE_BYTES), AfterValidator(_whole)]


def _apart(spans: list[list[int]]) -> list[list[int]]:
    edges = [edge for span in spans for edge in span]
    if any(first >= end for first, end in pairwise(edges)):
        raise ValueError("the spans do not ascend, or touch")
    return spans


Span = Annotated[list[Count], Field(min_length=2, max_length=2)]
Spans = Annotated[
    list[Span], Field(min_length=1, max_length=MAX_PROTECTED_SPANS, fail_fast=True), AfterValidator(_apart)
]


def _images(images: list[list[int | str]]) -> list[list[int | str]]:
    previous_end = 0
    for first, end, pixels in images:
        if not (isinstance(first, int) and isinstance(end, int) and isinstance(pixels, str)):
            raise ValueError("an image is its first token, the one behind its last, and a digest")
        if not previous_end <= first < end or not _SHA256.fullmatch(pixels):
            raise ValueError("the images do not ascend, or a digest is no SHA-256")
        previous_end = end
    return images


Images = Annotated[
    list[Annotated[list[Count | str], Field(min_length=3, max_length=3)]],
    Field(min_length=1, max_length=MAX_IMAGES, fail_fast=True),
    AfterValidator(_images),
]


class ModelHeader(Strict):
    """The fields of `ModelIdentity`."""

    name: Text
    weights: Text
    dtype: Text
    rope: Text
    attention: Text
    tokenizer: Text
    template: Text


class IdentityHeader(Strict):
    """The fields of `Identity`, written out again on purpose: a new field there changes the format."""

    model: ModelHeader
    document: Text
    num_tokens: Size
    layout: Layout
    boundary: Boundary
    prefill: Text
    policy: Text
    policy_version: Count
    policy_params: dict[str, JsonValue]
    budget_tokens: Count
    compression_ratio: float
    probe: Text
    expected_questions: list[str]
    transforms: Text
    parent: Text
    date: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")] | None = None
    variables: Annotated[dict[str, JsonValue], Field(min_length=1, max_length=16)] | None = None
    protect: Spans | None = None
    images: Images | None = None
    image_encoder: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = None

    @model_validator(mode="after")
    def _check_images(self) -> IdentityHeader:
        if (self.images is None) != (self.image_encoder is None):
            raise ValueError("images and image_encoder are there together, or neither is")
        if self.images is not None and int(self.images[-1][1]) > self.num_tokens:
            raise ValueError(f"the last image ends behind the {self.num_tokens} tokens")
        return self

    @model_serializer(mode="wrap")
    def _without_none(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A document without a date has no such field, rather than an empty one; so with all optional fields."""
        return {name: value for name, value in fields(self).items() if value is not None}


class Header(Strict):
    """The whole header. codec: the canonical text of the cache's codec. sentence_ends: the positions of
    `CompressedCache.sentence_ends` in the encoding `delta`. summary: as of a `CompressedCache`.

    Reading stops at the first fault: a list of all errors would take hundreds of times the header's bytes.
    """

    identity: IdentityHeader
    num_tokens: Size
    next_position: Size
    codec: Text
    sentence_ends: Annotated[bytes, Field(max_length=SENTENCE_BYTES)]
    layers: Annotated[list[Layer], Field(min_length=1, max_length=MAX_ARRAY), FailFast()]
    summary: Annotated[list[Codes], Field(max_length=MAX_ARRAY), FailFast()]

    @property
    def body_bytes(self) -> int:
        """Bytes of all segments, which follow each other without holes."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def attached_bytes(self) -> int:
        """As `CompressedCache.attached_bytes`."""
        read = self.body_bytes + sum(layer.joined_bytes + layer.unpacked_bytes for layer in self.layers)
        sizes = [record.made_bytes(layer.dims) for layer in self.layers for record in layer.records]
        return read + (max(sizes)[0] if self.made_at_steps else sum(made - rows for made, rows in sizes))

    @property
    def made_at_steps(self) -> bool:
        """As `CompressedCache.made_at_steps`."""
        return self.projected and self.identity.policy_params.get("made") == "step"

    @property
    def coded(self) -> bool:
        """As `CompressedCache.coded`."""
        return Codec.parse(self.codec).coded or self.projected

    @property
    def projected(self) -> bool:
        """As `CompressedCache.projected`."""
        return bool(self.residual_widths)

    @property
    def residual_widths(self) -> Set[int]:
        """As `CompressedCache.residual_widths`."""
        widths = {record.residual_width for layer in self.layers for record in layer.records}
        return {width for width in widths if width is not None}

    @property
    def shape(self) -> Shape:
        return Shape(tuple(layer.shape for layer in self.layers), self.num_tokens, self.next_position)

    @property
    def sentences(self) -> tuple[int, ...]:
        """As `CompressedCache.sentence_ends`. Raises `BlobError` for bytes that are no such positions."""
        return positions.from_deltas(self.sentence_ends, self.num_tokens)

    def to_identity(self) -> Identity:
        return Identity.from_dict(self.identity.model_dump())

    def pack(self) -> bytes:
        """The one msgpack text of the header."""
        return canonical_msgpack(self.model_dump())


def parse_header(data: bytes) -> Header:
    """Read a header and check everything in it that needs no segment. Raises `BlobError`."""
    fields = _unpack(data)
    others = fields  # without the runs of bytes that are no digests, which the model checks
    if isinstance(fields, dict):
        others = {name: value for name, value in fields.items() if name not in ("sentence_ends", "summary")}
    _refuse_foreign(others)
    try:
        header = Header.model_validate(fields)
    except ValidationError as error:
        raise _named(error) from error
    if header.identity.num_tokens != header.num_tokens:
        raise inconsistent(
            f"the header contradicts itself: {header.num_tokens} tokens, {header.identity.num_tokens} in the identity"
        )
    ends = header.sentences
    if ends and ends[-1] != header.num_tokens - 1:
        raise BlobError(
            f"the last sentence ends with token {ends[-1]}, and the document with token {header.num_tokens - 1}",
            reason="positions_malformed",
        )
    _check_codec(header)  # before the layout, which divides by the groups
    _check_layout(header)
    # Packs the fields as they were read, not the model's: `_unique` has checked that the former are sorted. The check
    # for a float is separate because the model also accepts an integer.
    is_float = isinstance(fields["identity"]["compression_ratio"], float)
    if not is_float or msgpack.packb(fields, use_bin_type=True) != data:
        raise _not_canonical()
    return header


def _not_canonical() -> BlobError:
    return BlobError(
        "the header is not written in the one canonical way (sorted keys, shortest integers, 64-bit floats)",
        reason="not_canonical",
    )


def _unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(
            data, strict_map_key=True, object_pairs_hook=_unique, max_array_len=MAX_ARRAY, max_map_len=_MAX_MAP
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise BlobError(
            f"the header is not valid msgpack: {error or type(error).__name__}", reason="header_malformed"
        ) from error


def _unique(pairs: list[tuple[str | bytes, Any]]) -> dict[str | bytes, Any]:
    fields = dict(pairs)
    if not _STRINGS.issuperset(map(type, fields)):  # msgpack also accepts bytes as a key
        raise BlobError("the header has a key that is no string", reason="header_malformed")
    if len(fields) != len(pairs):
        # msgpack itself keeps the last one silently: two readers could then see two different caches.
        raise BlobError("the header has the same key twice in one map", reason="duplicate_key")
    if list(fields) != sorted(fields):
        raise _not_canonical()
    return fields


def _refuse_foreign(value: Any) -> None:
    """Refuse values that msgpack can express and a header cannot, and nesting that no header needs.

    Walks level by level, because hostile nesting would exhaust the stack of a recursive walk.
    """
    level = [value]
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if type(item) is int or type(item) is str:  # most of a header: before the checks that take longer
                continue
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            else:
                _refuse_foreign_scalar(item)
        level = below
    if level:
        raise BlobError(f"the header is more than {_MAX_DEPTH} levels deep", reason="header_malformed")


def _refuse_foreign_scalar(item: Any) -> None:
    if isinstance(item, float) and not math.isfinite(item):
        raise BlobError(f"the header holds the number {item}", reason="not_finite")
    if isinstance(item, bytes) and len(item) != DIGEST_BYTES:
        raise BlobError(
            f"the header holds a run of {len(item)} bytes; a digest has {DIGEST_BYTES}", reason="field_malformed"
        )
    if not isinstance(item, bytes | int | float | None):
        raise BlobError(f"the header holds a msgpack extension ({type(item).__name__})", reason="ext_type")


def _named(error: ValidationError) -> BlobError:
    """The first error that pydantic found, as a `BlobError`."""
    first = error.errors(include_url=False, include_input=True)[0]
    where = ".".join(str(part) for part in first["loc"])[:_SHOWN] or "the header"
    name = str(first["loc"][-1]) if first["loc"] else ""
    match first["type"]:
        case "missing":
            return BlobError(f"the header has no field {where!r}", reason="missing_field")
        case "extra_forbidden":
            return BlobError(
                f"the header has a field {where!r} that this version does not know", reason="unknown_field"
            )
        case "literal_error" if isinstance(first["input"], str):
            return BlobError(
                f"the header says {where} = {first['input'][:40]!r}; this version knows {first['ctx']['expected']}",
                reason=f"unknown_{name.removeprefix('slot_')}",
            )
        case "union_tag_not_found":
            return BlobError(f"the header has no field '{where}.kind'", reason="missing_field")
        case "union_tag_invalid" if isinstance(first["input"]["kind"], str):
            return BlobError(
                f"the header says {where}.kind = {first['input']['kind'][:40]!r}; this version knows "
                f"{first['ctx']['expected_tags']}",
                reason="unknown_kind",
            )
    return BlobError(f"header field {where}: {first['msg']}", reason="field_malformed")


def _check_codec(header: Header) -> None:
    try:
        codec = Codec.parse(header.codec)
    except InvalidRequest as error:
        raise BlobError(f"the header's codec: {error}", reason="unknown_codec") from error
    if str(codec) != header.codec:
        raise BlobError(f"the header says codec {header.codec!r} for {str(codec)!r}", reason="not_canonical")
    if bool(header.identity.transforms) != (codec.name == "klt"):
        raise inconsistent(
            f"the header names codec {codec} and the transforms {header.identity.transforms[:16]!r}; codec klt has "
            "some, and no other codec has"
        )
    for index, layer in enumerate(header.layers):
        for record in layer.records:
            if (record.codec, record.group) not in record.precisions(codec):
                raise inconsistent(
                    f"layer {index} is under {record.codec} in groups of {record.group}; codec {codec} makes no such "
                    "layer"
                )


def _check_layout(header: Header) -> None:
    """Check that segments follow each other without gaps, each with the size of its records."""
    end = 0
    for index, layer in enumerate(header.layers):
        begins = f"segment {index} begins at byte {layer.offset}"
        if layer.offset % ALIGNMENT:
            raise BlobError(f"{begins}, not a multiple of {ALIGNMENT}", reason="misaligned")
        if layer.offset < end:
            raise BlobError(f"{begins}, inside what ends at {end}", reason="overlap")
        if layer.offset > end:
            raise BlobError(f"{begins}, leaving a hole after {end}", reason="hole")
        layer.check(index, header.num_tokens)
        end = layer.offset + layer.nbytes
