"""What all kinds of records have in a blob."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from kvshelf.artifact.codecs import BITS, CODED, Codec, Precision
from kvshelf.artifact.identity import RopeMode
from kvshelf.artifact.positions import Encoding
from kvshelf.artifact.shape import ITEM_BYTES
from kvshelf.errors import BlobError

if TYPE_CHECKING:
    from torch import Tensor

RUN_ROWS: Final = 1024
"""Rows of each head in a run: a multiple of every codec's group, so that runs share no scale."""

MAX_ARRAY: Final = 4096
INT32_MAX: Final = 2**31 - 1


def _names(names: list[str]) -> list[str]:
    if names != sorted(set(names)):
        raise ValueError("the names of columns are not in order, or one is there twice")
    return names


Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Size = Annotated[int, Field(ge=1, le=INT32_MAX)]
Sizes = Annotated[list[Count], Field(max_length=MAX_ARRAY)]
Lengths = Annotated[list[Annotated[int, Field(ge=0, le=INT32_MAX)]], Field(min_length=1, max_length=MAX_ARRAY)]
DtypeName = Literal["float32", "bfloat16", "float16"]
Columns = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=64)]], Field(min_length=1, max_length=8), AfterValidator(_names)
]

Ints = npt.NDArray[np.int64]
Arrays = dict[str, memoryview]
"""The bytes of a record's arrays, in the order of `RecordHeader.array_sizes`."""


class Strict(BaseModel):
    """A part of the header: no conversions, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Dims(NamedTuple):
    """What the records of a layer have in common."""

    dtype: DtypeName
    key_dim: int
    value_dim: int


class RowArray(NamedTuple):
    """An array of a record's rows, packed by head: an item of `item_bytes` for every `rows` rows of a head."""

    name: str
    rows: int
    item_bytes: int

    def nbytes(self, rows: int) -> int:
        """Bytes of the first `rows` rows of a head or of a run."""
        return -(-rows // self.rows) * self.item_bytes

    def total(self, lengths: Sequence[int]) -> int:
        """Bytes of heads with these numbers of rows."""
        rows = self.rows  # read once, and one row apart: a header may have 200 layers of 128 heads
        items = sum(lengths) if rows == 1 else sum(-(-length // rows) for length in lengths)
        return items * self.item_bytes


class RecordArrays(Protocol):
    """The arrays of one record in a segment, by name, which have the sizes that its header says."""

    @property
    def dims(self) -> Dims: ...

    def tensor(self, name: str, dtype: str, *shape: int) -> Tensor: ...

    def positions(self, name: str, encoding: Encoding, lengths: list[int]) -> Callable[[], Tensor]:
        """Checks the positions; returns a function that expands them."""
        ...


class Target(Protocol):
    """Makes arrays of what a record in memory has."""

    def raw(self, tensor: Tensor) -> memoryview: ...

    def positions(self, positions: Tensor, lengths: list[int]) -> tuple[Encoding, memoryview]: ...


class RecordHeader(Strict):
    """One record. lengths: entries of each KV head. group: that of the cache's codec, 0 under "none".

    sizes: bytes of each array without padding, in segment order. columns: the names of its columns, if it has any.

    Each kind is a class below this one: a `Literal` as `kind`, fields of its own, and what differs of the methods.
    """

    in_runs: ClassVar[bool] = False
    """Whether its rows are cut into runs. Other kinds are read whole at any length."""
    verbatim: ClassVar[bool] = False
    """Whether it is stored as it is under any codec, alone in its layer."""
    latent: ClassVar[bool] = False
    transformable: ClassVar[bool] = True
    """Whether codec klt can store it. Its transforms are those of whole keys without their rotation."""
    row_names: ClassVar[tuple[str, ...]] = ("keys", "values")

    kind: str
    rope_mode: RopeMode
    codec: Precision
    group: Count
    lengths: Lengths
    position_encoding: Encoding
    sizes: Sizes
    columns: Columns = Field(default_factory=list)

    @model_serializer(mode="wrap")
    def _without_empty(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in fields(self).items() if name != "columns" or value}

    @property
    def sees(self) -> tuple[int | None, int | None]:
        """The window and the chunk of a `LayerShape`."""
        return None, None

    @property
    def residual_width(self) -> int | None:
        """Numbers of a residual, of which the model makes its keys and values; None where they are stored."""
        return None

    @property
    def row_lengths(self) -> list[int]:
        return self.lengths

    @property
    def column_lengths(self) -> list[int]:
        """Numbers of each head in a column."""
        return self.lengths

    @property
    def run_rows(self) -> int:
        return RUN_ROWS

    @property
    def run_count(self) -> int:
        """How many runs it has: none if one would hold all of its rows, or if it is read whole."""
        if self.codec in CODED or not self.in_runs:
            return 0
        runs = -(-max(self.lengths) // self.run_rows)
        return runs if runs > 1 else 0

    def key_dim(self, dims: Dims) -> int:
        return dims.key_dim

    def precisions(self, codec: Codec) -> Collection[tuple[Precision, int]]:
        """The precisions that a codec may give a record of this kind."""
        if self.verbatim:
            return {("none", 0)}
        return codec.precisions if self.transformable or codec.name != "klt" else ()

    def row_arrays(self, dims: Dims) -> list[RowArray]:
        """The arrays with its rows, in segment order; none under codecs of `CODED`, whose streams are not cut."""
        if self.codec in CODED:
            return []
        key_dim = self.key_dim(dims)
        dims_of = {"keys": key_dim, "values": dims.value_dim}
        if self.codec == "none":
            return [RowArray(name, 1, dims_of[name] * ITEM_BYTES[dims.dtype]) for name in self.row_names]
        bits, group, item = BITS[self.codec], self.group, ITEM_BYTES["bfloat16"]
        scales = {"keys": (group, key_dim * item), "values": (1, -(-dims.value_dim // group) * item)}
        arrays: list[RowArray] = []
        for name in self.row_names:
            arrays.append(RowArray(f"{name}_codes", 1, -(-dims_of[name] * bits // 8)))
            arrays += [RowArray(f"{name}_{what}", *scales[name]) for what in ("scales", "zeros")]
        return arrays

    def array_sizes(self, dims: Dims) -> dict[str, int | None]:
        """Bytes that each array must have, in segment order; None for positions and coded rows, where it depends on the
        data. Python's integers are unbounded: no product of dimensions overflows."""
        sizes: dict[str, int | None] = {array.name: array.total(self.row_lengths) for array in self.row_arrays(dims)}
        if self.codec in CODED:
            sizes |= dict.fromkeys(f"{name}_coded" for name in self.row_names)
        columns = {"columns": 4 * len(self.columns) * sum(self.column_lengths)} if self.columns else {}
        return sizes | {"positions": None} | self.own_sizes() | columns

    def unpacked_bytes(self, dims: Dims) -> int:
        """As `Packed.unpacked_bytes`."""
        if self.codec not in CODED:
            return 0
        rows = sum(self.lengths) * (self.key_dim(dims) + dims.value_dim) * ITEM_BYTES[dims.dtype]
        return rows - sum(self.sizes[: len(self.row_names)])

    def made_bytes(self, dims: Dims) -> tuple[int, int]:  # noqa: ARG002
        """As `Packed.made_bytes`."""
        return 0, 0

    def own_sizes(self) -> dict[str, int | None]:
        """As `array_sizes`, of the arrays that only this kind has."""
        return {}

    def check(self, where: str, dims: Dims, num_tokens: int) -> None:
        """Raise `BlobError` for fields that contradict each other, the layer's or the document's."""
        expected = self.array_sizes(dims)
        if len(self.sizes) != len(expected):
            raise BlobError(
                f"{where} says {len(self.sizes)} sizes for the arrays {', '.join(expected)}", reason="size_mismatch"
            )
        for (name, size), stated in zip(expected.items(), self.sizes, strict=True):
            if size is not None and stated != size:
                raise BlobError(
                    f"{where} says {stated} bytes of {name}, its shape and dtype make {size}", reason="size_mismatch"
                )
        check_lengths(where, "entries", self.lengths, num_tokens)

    def read(self, source: RecordArrays) -> dict[str, Any]:  # noqa: ARG002
        """The fields of the record in memory that only this kind has."""
        return {}

    @staticmethod
    def write(record: Any, target: Target) -> tuple[dict[str, Any], Arrays]:  # noqa: ARG004
        """The fields and arrays that only this kind has, of a record in memory."""
        return {}, {}

    @staticmethod
    def require_sound(where: str, record: Any, num_tokens: int) -> None:
        """Raise `BlobError` for numbers of a record in memory that attention would misread."""


def check_lengths(where: str, what: str, lengths: list[int], num_tokens: int) -> None:
    """Raise `BlobError` for a head with more of these than the document has tokens."""
    if max(lengths) > num_tokens:
        raise BlobError(
            f"{where} has {max(lengths)} {what} in a head, the document {num_tokens} tokens", reason="positions_count"
        )


def inconsistent(message: str) -> BlobError:
    """The refusal of fields that contradict each other."""
    return BlobError(message, reason="inconsistent")


def ints(tensor: Tensor) -> Ints:
    return tensor.cpu().numpy().astype(np.int64)
