"""How keys and values are encoded: the codecs, and their one-line texts.

    none                     the model's dtype
    int8, int4, int2         codes in groups (`QuantizedRows`), after KIVI (arXiv 2402.02750)
    mixed                    the important entries in more bits than the rest, after MiKV (arXiv 2402.18096)

A text is a name and parameters: `int4`, `int4:group=64,residual=128`, `mixed:high=none,low=int4,share=0.25`. Its
canonical form leaves defaults out and keeps the parameters in order; cache ids and manifests hold that form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, Literal

import torch
from torch import Tensor

from kvshelf.errors import InvalidRequest
from kvshelf.kernels.quantize.rows import QuantizedRows
from kvshelf.store.artifact.packed import Packed
from kvshelf.store.artifact.records import LayerRecord, PackedRecord, Parts

Name = Literal["none", "int8", "int4", "int2", "mixed"]
Precision = Literal["none", "int8", "int4", "int2"]
"""How the rows of one record are stored."""

BITS: Final[Mapping[Precision, int]] = {"int8": 8, "int4": 4, "int2": 2}

_PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    "none": (),
    "int8": ("group", "residual"),
    "int4": ("group", "residual"),
    "int2": ("group", "residual"),
    "mixed": ("high", "low", "share", "group"),
}
_HIGH: Final = ("none", "int8")
_LOW: Final = ("int2", "int4")
_GROUPS: Final = tuple(8 << power for power in range(8))
_MAX_RESIDUAL: Final = 65_536
_TEXT_LIMIT: Final = 128


@dataclass(frozen=True)
class Codec:
    """One way to encode a cache. Made by `parse`; `str()` is its canonical text.

    group: rows of a channel (keys) or channels of a row (values) that share a scale and a zero. residual: the last
    entries of each head, by position, which stay in the model's dtype in a record of their own: they are few, and
    questions attend to them most. For mixed: `share` is the fraction of each head's entries, the most important ones,
    in `high`; the others are in `low`. Mixed has no residual: a policy protects the last entries by giving them
    importance.
    """

    name: Name = "none"
    group: int = 32
    residual: int = 32
    high: Literal["none", "int8"] = "int8"
    low: Literal["int2", "int4"] = "int2"
    share: float = 0.5

    @classmethod
    def parse(cls, text: str) -> Codec:
        """Read a codec's text. Raises `InvalidRequest` that names what is wrong and what is allowed."""
        if not isinstance(text, str) or len(text) > _TEXT_LIMIT:
            raise _refused(f"a codec is a text of at most {_TEXT_LIMIT} characters, not {text!r:.80}")
        name, colon, rest = text.partition(":")
        if name not in _PARAMETERS:
            raise _refused(f"unknown codec {name!r:.80}; this version has {', '.join(_PARAMETERS)}")
        values: dict[str, int | float | str] = {}
        for item in rest.split(",") if colon else ():
            key, _, value = item.partition("=")
            if key not in _PARAMETERS[name]:
                raise _refused(f"codec {name} has no parameter {key!r}; it has {_listed(_PARAMETERS[name]) or 'none'}")
            if key in values:
                raise _refused(f"codec {name} is given {key} twice")
            values[key] = _value(key, value)
        return cls(name, **values)  # type: ignore[arg-type]  # the keys and types are those of the table

    def __str__(self) -> str:
        defaults = {field.name: field.default for field in fields(self)}
        given = [(key, getattr(self, key)) for key in _PARAMETERS[self.name]]
        changed = ",".join(f"{key}={value}" for key, value in given if value != defaults[key])
        return f"{self.name}:{changed}" if changed else self.name

    @property
    def precisions(self) -> set[tuple[Precision, int]]:
        """Every precision that a record may have under this codec, with its group size (0 for none)."""
        if self.name == "none":
            return {("none", 0)}
        names: tuple[Precision, ...] = (self.high, self.low) if self.name == "mixed" else (self.name,)
        found: set[tuple[Precision, int]] = {("none", 0)}
        return found | {(name, self.group) for name in names if name != "none"}

    def encode(self, record: LayerRecord, where: str = "the layer") -> LayerRecord:
        """The record encoded under this codec, without `importance`; the input stays unchanged.

        Each part of `Parts` is encoded separately, with its own residual and share. `where` names the record in errors.
        Raises `InvalidRequest` for a record that is quantized already, holds NaN or infinity, or lacks the importance
        that mixed chooses by.
        """
        if self.name == "none":
            return record
        parts = record.parts if isinstance(record, Parts) else (record,)
        pieces = [piece for part in parts for piece in self._pieces(part, where)]
        if not pieces:  # the layer kept no entries
            return record
        return pieces[0] if len(pieces) == 1 else Parts(tuple(pieces))

    def _pieces(self, record: PackedRecord, where: str) -> list[PackedRecord]:
        _require_encodable(record, where)
        split: tuple[tuple[Precision, Tensor], ...]
        if self.name == "mixed":
            important = self._important(record, where)
            split = ((self.high, important), (self.low, ~important))
        else:
            last = _last(record, self.residual)
            split = ((self.name, ~last), ("none", last))
        return [self._quantized(record.select(chosen), precision, where) for precision, chosen in split if chosen.any()]

    def _important(self, record: PackedRecord, where: str) -> Tensor:
        """`[entries]` bool: the most important `share` of each head's entries; ties go to the earlier entry."""
        if record.importance is None:
            raise _refused(
                f"codec mixed chooses by importance, and {where} carries none any more; encode the cache when it is "
                "compressed, under a policy that scores entries"
            )
        chosen = torch.zeros(record.entries, dtype=torch.bool, device=record.importance.device)
        for start, length, head in zip(
            record.offsets, record.lengths, torch.split(record.importance, record.lengths), strict=False
        ):
            # The small term keeps 0.29 of 100 from rounding down to 28, as in budgets.
            count = int(length * self.share + 1e-9)
            chosen[start + head.argsort(descending=True, stable=True)[:count]] = True
        return chosen

    def _quantized(self, record: PackedRecord, precision: Precision, where: str) -> PackedRecord:
        if precision == "none":
            return replace(record, importance=None)
        assert isinstance(record.keys, Tensor)
        assert isinstance(record.values, Tensor)
        bits = BITS[precision]
        keys = QuantizedRows.quantize(record.keys, record.lengths, bits=bits, group=self.group, axis="tokens")
        values = QuantizedRows.quantize(record.values, record.lengths, bits=bits, group=self.group, axis="channels")
        if not (keys.finite and values.finite):
            raise _refused(f"{where} holds numbers too near the largest of {record.dtype} for codec {self.name}")
        return replace(record, keys=keys, values=values, importance=None)


def resolve(current: str, wanted: str) -> Codec:
    """The codec of a cache under codec `current` after encoding it under `wanted`.

    "none" adds no encoding. Otherwise a quantized cache keeps its codec, and another one raises `InvalidRequest`:
    encoding twice would add up the errors of both codecs unseen.
    """
    codec, present = Codec.parse(wanted), Codec.parse(current)
    if present.name == "none":
        return codec
    if codec.name != "none" and codec != present:
        raise _refused(
            f"the cache is encoded under {current} and is not encoded again under {codec}; compress its document again"
        )
    return present


def _value(key: str, text: str) -> int | float | str:
    """A parameter's value. Refuses signs and exponents: each value has one form, leading and trailing zeros aside."""
    if key in ("high", "low"):
        names = _HIGH if key == "high" else _LOW
        if text not in names:
            raise _refused(f"{key} must be one of {_listed(names)}, not {text!r}")
        return text
    if key == "share":
        if not re.fullmatch(r"0?\.[0-9]{1,4}", text) or float(text) == 0:
            raise _refused(f"share must be from 0.0001 to 0.9999, with at most four decimals, not {text!r}")
        return float(text)
    number = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else -1
    if key == "group" and number not in _GROUPS:
        raise _refused(f"group must be a power of two from {_GROUPS[0]} to {_GROUPS[-1]}, not {text!r}")
    if key == "residual" and not 0 <= number <= _MAX_RESIDUAL:
        raise _refused(f"residual must be a number from 0 to {_MAX_RESIDUAL}, not {text!r}")
    return number


def _last(record: Packed, count: int) -> Tensor:
    """`[entries]` bool: the last `count` entries of each head."""
    last = torch.zeros(record.entries, dtype=torch.bool, device=record.entry_positions.device)
    for start, stop in zip(record.offsets, record.offsets[1:], strict=False):
        last[max(start, stop - count) : stop] = True
    return last


def _require_encodable(record: PackedRecord, where: str) -> None:
    for name, rows in (("keys", record.keys), ("values", record.values)):
        if isinstance(rows, QuantizedRows):
            raise _refused(f"the {name} of {where} are quantized already and are not encoded again")
        if not bool(torch.isfinite(rows).all()):
            raise _refused(f"the {name} of {where} hold NaN or infinity, which no quantizing codec can store")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="codec")
