"""The header of a blob: what its segments hold and where, packed as msgpack and read back strictly.

Everything a reader allocates or slices follows from these fields, so nothing is taken on trust: sizes are capped before
they are parsed, every field has one type, and each refusal has one name (docs/format.md lists them).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgpack
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from kvshelf.errors import BlobError
from kvshelf.store import positions
from kvshelf.store.artifact import RopeMode
from kvshelf.store.identity import Boundary, Identity, Layout

ALIGNMENT = 64
"""Bytes. A cache line, and the widest vector register: every tensor and every segment begins at a multiple of it."""

HEADER_LIMIT = 256 * 1024
"""Bytes. 200 layers of 128 ragged KV heads need about 160 KiB; 256 KiB of msgpack unpack to at most 20 MB."""

_MAX_ARRAY = 4096
_MAX_MAP = 256
_INT32_MAX = 2**31 - 1

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Size = Annotated[int, Field(ge=1, le=_INT32_MAX)]
Text = Annotated[str, Field(max_length=HEADER_LIMIT)]
Digest = Annotated[bytes, Field(min_length=32, max_length=32)]
DtypeName = Literal["float32", "bfloat16", "float16"]
_ITEM_BYTES: dict[DtypeName, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


def aligned(size: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Part(_Record):
    """Where one tensor lies. Bytes, counted from the start of its segment; `nbytes` is without padding."""

    offset: Count
    nbytes: Count


class LayerHeader(_Record):
    """One layer and its segment.

    offset: bytes from the start of the body (the first aligned byte after the header), so that it does not depend on
    the header's own length. nbytes: the segment with its padding. digest: BLAKE3 of those bytes. lengths: entries of
    each KV head.
    """

    kind: Literal["kept"]
    rope_mode: RopeMode
    codec: Literal["none"]
    dtype: DtypeName
    key_dim: Size
    value_dim: Size
    lengths: Annotated[list[Annotated[int, Field(ge=0, le=_INT32_MAX)]], Field(min_length=1, max_length=_MAX_ARRAY)]
    position_encoding: positions.Encoding
    offset: Count
    nbytes: Count
    keys: Part
    values: Part
    positions: Part
    digest: Digest

    @property
    def entries(self) -> int:
        return sum(self.lengths)

    def parts(self) -> tuple[tuple[str, Part], ...]:
        """The parts in the order in which they lie in the segment."""
        return (("keys", self.keys), ("values", self.values), ("positions", self.positions))


class ModelHeader(_Record):
    """The fields of `ModelIdentity`."""

    name: Text
    weights: Text
    dtype: Text
    rope: Text
    attention: Text
    tokenizer: Text
    template: Text


class IdentityHeader(_Record):
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


class Header(_Record):
    """The whole header."""

    identity: IdentityHeader
    num_tokens: Size
    next_position: Size
    layers: Annotated[list[LayerHeader], Field(min_length=1, max_length=_MAX_ARRAY)]

    @property
    def body_bytes(self) -> int:
        """Bytes of all segments, when they follow each other without holes."""
        return sum(layer.nbytes for layer in self.layers)

    def to_identity(self) -> Identity:
        return Identity.from_dict(self.identity.model_dump())


def pack(header: Header) -> bytes:
    """The one msgpack text of a header: keys of every map sorted, shortest integers, 64-bit floats."""
    data: bytes = msgpack.packb(_sorted(header.model_dump()), use_bin_type=True)
    return data


def parse(data: bytes) -> Header:
    """Read a header and check all of it that needs no segment. Raises `BlobError`."""
    _refuse_foreign(fields := _unpack(data))
    try:
        header = Header.model_validate(fields)
    except ValidationError as error:
        raise _named(error) from error
    _check_identity(header)
    _check_layout(header)
    if pack(header) != data:
        raise BlobError(
            "the header is not written in the one canonical way (sorted keys, shortest integers, 64-bit floats)",
            reason="not_canonical",
        )
    return header


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list | tuple) else value


def _unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(
            data,
            strict_map_key=True,
            object_pairs_hook=_unique,
            max_array_len=_MAX_ARRAY,
            max_map_len=_MAX_MAP,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise BlobError(
            f"the header is not valid msgpack: {error or type(error).__name__}", reason="header_malformed"
        ) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        # msgpack itself keeps the last one in silence: two readers could then see two different caches.
        raise BlobError("the header has the same key twice in one map", reason="duplicate_key")
    return fields


def _refuse_foreign(value: Any) -> None:
    """Refuse values that msgpack can say and the header cannot: extension types, NaN and infinity."""
    pending = [value]
    while pending:  # a loop, because hostile nesting would exhaust the stack of a recursive walk
        item = pending.pop()
        if isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, float) and not math.isfinite(item):
            raise BlobError(f"the header holds the number {item}", reason="not_finite")
        elif not isinstance(item, str | bytes | int | float | None):
            raise BlobError(f"the header holds a msgpack extension ({type(item).__name__})", reason="ext_type")


def _named(error: ValidationError) -> BlobError:
    """One reason for what pydantic found first."""
    first = error.errors(include_url=False, include_input=True)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the header"
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
                reason=f"unknown_{name}",
            )
    return BlobError(f"header field {where}: {first['msg']}", reason="field_malformed")


def _check_identity(header: Header) -> None:
    if header.identity.num_tokens != header.num_tokens or header.next_position < header.num_tokens:
        raise BlobError(
            f"the header contradicts itself: {header.num_tokens} tokens, {header.identity.num_tokens} in the identity, "
            f"next position {header.next_position}",
            reason="inconsistent",
        )


def _check_layout(header: Header) -> None:
    end = 0
    for index, layer in enumerate(header.layers):
        _check_place(f"segment {index}", layer.offset, end)
        _check_parts(index, layer)
        end = layer.offset + layer.nbytes
        if any(length > header.num_tokens for length in layer.lengths):
            raise BlobError(
                f"layer {index} has {max(layer.lengths)} entries in a head, the document {header.num_tokens} tokens",
                reason="positions_count",
            )


def _check_parts(index: int, layer: LayerHeader) -> None:
    row = layer.entries * _ITEM_BYTES[layer.dtype]
    for name, part, expected in (
        ("keys", layer.keys, row * layer.key_dim),
        ("values", layer.values, row * layer.value_dim),
    ):
        if part.nbytes != expected:
            raise BlobError(
                f"layer {index} says {part.nbytes} bytes of {name}, its shape and dtype make {expected}",
                reason="size_mismatch",
            )
    end = 0
    for name, part in layer.parts():
        _check_place(f"{name} of layer {index}", part.offset, end)
        end = aligned(part.offset + part.nbytes)
    if layer.nbytes != end:
        raise BlobError(f"segment {index} says {layer.nbytes} bytes, its parts make {end}", reason="size_mismatch")


def _check_place(what: str, offset: int, expected: int) -> None:
    """Parts follow each other with no byte between them but the padding to the next multiple of 64."""
    if offset % ALIGNMENT:
        raise BlobError(f"{what} begins at byte {offset}, not a multiple of {ALIGNMENT}", reason="misaligned")
    if offset < expected:
        raise BlobError(f"{what} begins at byte {offset}, inside what ends at {expected}", reason="overlap")
    if offset > expected:
        raise BlobError(f"{what} begins at byte {offset}, leaving a hole after {expected}", reason="hole")
