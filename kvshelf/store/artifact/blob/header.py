"""The header of a blob: what its segments hold and where, packed as msgpack and read back strictly.

Everything a reader allocates or slices follows from these fields, so nothing is taken on trust: sizes are capped before
they are parsed, every field has one type, and each refusal has one name (docs/format.md lists them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final

import msgpack
from pydantic import FailFast, Field, JsonValue, ValidationError

from kvshelf.errors import BlobError, InvalidRequest
from kvshelf.store.artifact.blob.layer import (
    MAX_ARRAY,
    Count,
    KeptLayer,
    Layer,
    RecordsLayer,
    Size,
    Strict,
    check_place,
)
from kvshelf.store.artifact.codecs import Codec
from kvshelf.store.artifact.identity import Boundary, Identity, Layout

HEADER_LIMIT: Final = 256 * 1024
"""Bytes. 200 layers of 128 ragged KV heads need about 160 KiB; reading 256 KiB takes at most 80 MB."""

_MAX_MAP = 256
_MAX_DEPTH = 32
_DIGEST_BYTES = 32
_STRINGS: Final = frozenset({str})
_SHOWN = 200  # characters of a name that a message repeats

Text = Annotated[str, Field(max_length=HEADER_LIMIT)]


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


class _Header(Strict):
    """What the header of every minor version has."""

    identity: IdentityHeader
    num_tokens: Size
    next_position: Size

    def to_identity(self) -> Identity:
        return Identity.from_dict(self.identity.model_dump())


class Header0(_Header):
    """The whole header of format 1.0."""

    minor: ClassVar[int] = 0
    codec: ClassVar[str] = "none"

    layers: Annotated[list[KeptLayer], Field(min_length=1, max_length=MAX_ARRAY), FailFast()]


class Header1(_Header):
    """The whole header of format 1.1. codec: the canonical text of the codec that the cache is under.

    The first layer and the first record at fault end the reading: a list of all errors would take hundreds of times the
    header's bytes.
    """

    minor: ClassVar[int] = 1

    codec: Text
    layers: Annotated[
        list[Annotated[Layer, Field(discriminator="kind")]], Field(min_length=1, max_length=MAX_ARRAY), FailFast()
    ]


Header = Header0 | Header1


def describe(identity: Identity, num_tokens: int, next_position: int, codec: str, layers: Sequence[Layer]) -> Header:
    """The header of a cache, of the lowest minor version that can express it. Raises `ValueError`."""
    fields: dict[str, Any] = {
        "identity": IdentityHeader.model_validate(identity.to_dict()),
        "num_tokens": num_tokens,
        "next_position": next_position,
        "layers": list(layers),
    }
    if _needs_1_1(num_tokens, next_position, codec, layers):
        return Header1(codec=codec, **fields)
    return Header0(**fields)


def body_bytes(header: Header) -> int:
    """Bytes of all segments, when they follow each other without holes."""
    return sum(layer.nbytes for layer in header.layers)


def pack(header: Header) -> bytes:
    """The one msgpack text of a header: keys of every map sorted, shortest integers, 64-bit floats."""
    data: bytes = msgpack.packb(_sorted(header.model_dump()), use_bin_type=True)
    return data


def parse(data: bytes, minor: int) -> Header:
    """Read a header of format 1.`minor` and check all of it that needs no segment. Raises `BlobError`."""
    _refuse_foreign(fields := _unpack(data))
    try:
        header: Header = (Header1 if minor else Header0).model_validate(fields)
    except ValidationError as error:
        raise _named(error) from error
    _check_identity(header)
    _check_codec(header)  # before the layout, which divides by the groups
    _check_layout(header)
    # What was read and not the model, whose fields would have to be sorted first: `_unique` has seen that they are. But
    # the model takes a whole number for a float.
    is_float = isinstance(fields["identity"]["compression_ratio"], float)
    if not is_float or msgpack.packb(fields, use_bin_type=True) != data:
        raise _not_canonical()
    return header


def _not_canonical() -> BlobError:
    return BlobError(
        "the header is not written in the one canonical way (sorted keys, shortest integers, 64-bit floats)",
        reason="not_canonical",
    )


def _needs_1_1(num_tokens: int, next_position: int, codec: str, layers: Sequence[Layer]) -> bool:
    plain = all(isinstance(layer, KeptLayer) for layer in layers)
    return codec != "none" or next_position < num_tokens or not plain


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [item if type(item) is int else _sorted(item) for item in value]  # most of a header: entries of heads
    return value


def _unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(
            data,
            strict_map_key=True,
            object_pairs_hook=_unique,
            max_array_len=MAX_ARRAY,
            max_map_len=_MAX_MAP,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise BlobError(
            f"the header is not valid msgpack: {error or type(error).__name__}", reason="header_malformed"
        ) from error


def _unique(pairs: list[tuple[str | bytes, Any]]) -> dict[str | bytes, Any]:
    fields = dict(pairs)
    if not _STRINGS.issuperset(map(type, fields)):  # msgpack itself takes bytes for a key too
        raise BlobError("the header has a key that is no string", reason="header_malformed")
    if len(fields) != len(pairs):
        # msgpack itself keeps the last one in silence: two readers could then see two different caches.
        raise BlobError("the header has the same key twice in one map", reason="duplicate_key")
    if list(fields) != sorted(fields):
        raise _not_canonical()
    return fields


def _refuse_foreign(value: Any) -> None:
    """Refuse values that msgpack can say and the header cannot, and nesting that no header needs.

    Level by level, because hostile nesting would exhaust the stack of a recursive walk. What could be wrong many times
    over is refused here at its first place: the models would list every one, at hundreds of times its bytes.
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
    if isinstance(item, bytes) and len(item) != _DIGEST_BYTES:
        raise BlobError(
            f"the header holds a run of {len(item)} bytes; only digests are, of {_DIGEST_BYTES}",
            reason="field_malformed",
        )
    if not isinstance(item, bytes | int | float | None):
        raise BlobError(f"the header holds a msgpack extension ({type(item).__name__})", reason="ext_type")


def _named(error: ValidationError) -> BlobError:
    """One reason for what pydantic found first."""
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


def _check_identity(header: Header) -> None:
    inside = header.next_position < header.num_tokens and not header.minor
    if header.identity.num_tokens != header.num_tokens or inside:
        raise BlobError(
            f"the header contradicts itself: {header.num_tokens} tokens, {header.identity.num_tokens} in the identity, "
            f"next position {header.next_position}",
            reason="inconsistent",
        )


def _check_codec(header: Header) -> None:
    if not isinstance(header, Header1):
        return
    try:
        codec = Codec.parse(header.codec)
    except InvalidRequest as error:
        raise BlobError(f"the header's codec: {error}", reason="unknown_codec") from error
    if str(codec) != header.codec:
        raise BlobError(f"the header says codec {header.codec!r} for {str(codec)!r}", reason="not_canonical")
    for index, layer in enumerate(header.layers):
        records = layer.records if isinstance(layer, RecordsLayer) else ()
        for record in records:
            if (record.codec, record.group) not in codec.precisions:
                raise BlobError(
                    f"layer {index} is under {record.codec} in groups of {record.group}; codec {codec} makes no such "
                    "layer",
                    reason="inconsistent",
                )
    if not _needs_1_1(header.num_tokens, header.next_position, header.codec, header.layers):
        raise BlobError("the blob says format 1.1 though 1.0 can hold it", reason="not_canonical")


def _check_layout(header: Header) -> None:
    end = 0
    for index, layer in enumerate(header.layers):
        check_place(f"segment {index}", layer.offset, end)
        layer.check(index, header.num_tokens)
        end = layer.offset + layer.nbytes
