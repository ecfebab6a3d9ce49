"""The codecs: how keys and values are encoded, as one-line texts. `encoding` applies them; this module needs no torch.

none                     the model's dtype
int8, int4, int2         codes in groups (`QuantizedRows`), after KIVI (arXiv 2402.02750)
mixed                    the important entries in more bits than the rest, which may have three (int3), after MiKV
                         (arXiv 2402.18096)
klt                      entropy-coded coefficients of a transform of the model, after KVTC (arXiv 2511.01815)
lossless                 the model's dtype, bit by bit, in entropy-coded byte planes (`planes`)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from kvshelf.errors import InvalidRequest, nearest

Name = Literal["none", "int8", "int4", "int2", "mixed", "klt", "lossless"]
Precision = Literal["none", "int8", "int4", "int3", "int2", "klt", "lossless"]
"""How the rows of one record are stored."""

BITS: Final[Mapping[Precision, int]] = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}

CODED: Final = frozenset({"klt", "lossless"})
"""Those of which rows are streams of bytes: they are decoded before attention reads them, and are not cut into runs."""

_PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    "none": (),
    "int8": ("group", "residual"),
    "int4": ("group", "residual"),
    "int2": ("group", "residual"),
    "mixed": ("high", "low", "share", "group"),
    "klt": ("step", "heads", "steps", "classes", "shares"),
    "lossless": (),
}
_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "high": ("none", "int8"),
    "low": ("int2", "int3", "int4"),
    "heads": ("joint", "each"),
    "steps": ("even", "kl"),
}
RUN_ROWS: Final = 1024
"""Rows of one stream of klt."""
STEPS: Final = (0.05, 16.0)
"""The smallest and the largest step of klt."""
SPLIT_BLOCKS: Final = (
    "codec {codec} stores some entries of a block apart from the others, and an index needs them together; take none, "
    "lossless, int8, int4, int2 or klt without classes"
)
CUT_BLOCKS: Final = (
    "under codec {codec} {group} entries share a scale, and blocks of an index have {block}; take blocks of a multiple"
)
WHOLE_KEYS: Final = (
    "codec {codec} transforms whole keys without their rotation, and policy think removes channels of keys with it; "
    "take int8, int4, int2 or mixed"
)
WHOLE_ENTRIES: Final = (
    "codec {codec} transforms keys and values, and policy kvdirect stores residuals in their place; take none, "
    "lossless, int8, int4, int2 or mixed"
)
_MOST_CLASSES: Final = 4
_GROUPS: Final = tuple(8 << power for power in range(8))
_MAX_RESIDUAL: Final = 65_536
_TEXT_LIMIT: Final = 128


@dataclass(frozen=True)
class Codec:
    """One way to encode a cache. Made by `parse`; `str()` is its canonical text, as `klt:classes=1.5/4,shares=25/25`,
    without defaults and in a fixed order: cache ids and manifests hold it.

    group: rows of a channel (keys) or channels of a row (values) that share a scale and a zero. residual: the last
    entries of each head, by position, which stay in the model's dtype in a record of their own: they are few, and
    questions attend to them most. For mixed: `share` is the fraction of each head's entries, the most important ones,
    in `high`; the others are in `low`. "policy": the policy says how many of each head (mikv, arkv). Mixed has no
    residual: a policy protects the last entries by giving them importance.

    For klt: `step` is the distance of two codes, in units of the model's transforms; `heads` says whether the heads of
    a layer are transformed together (joint) or each alone. "" is joint where all heads keep the same tokens, else each.
    `steps`: whether all keys and values have this step (even), or each layer's a multiple of it that the transforms
    name (kl). `classes`: steps by importance, the finest first, in place of `step`; `shares`: the percentages of the
    document's entries that they are for. The last class also takes what a policy keeps beyond the shares.
    """

    name: Name = "none"
    group: int = 32
    residual: int = 32
    high: Literal["none", "int8"] = "int8"
    low: Literal["int2", "int3", "int4"] = "int2"
    share: float | Literal["policy"] = 0.5
    step: float = 1.5
    heads: Literal["", "joint", "each"] = ""
    steps: Literal["even", "kl"] = "even"
    classes: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Codec:
        """Read a codec's text. Raises `InvalidRequest` that names what is wrong and what is allowed."""
        if not isinstance(text, str) or len(text) > _TEXT_LIMIT:
            raise refused(f"a codec is a text of at most {_TEXT_LIMIT} characters, not {text!r:.80}")
        name, colon, rest = text.partition(":")
        if name not in _PARAMETERS:
            raise refused(
                f"unknown codec {name!r:.80}{nearest(name, _PARAMETERS)}; this version has {', '.join(_PARAMETERS)}"
            )
        allowed = _PARAMETERS[name]
        values: dict[str, Any] = {}
        for item in rest.split(",") if colon else ():
            key, _, value = item.partition("=")
            if key not in allowed:
                has = ", ".join(allowed) or "none"
                raise refused(f"codec {name} has no parameter {key!r}{nearest(key, allowed)}; it has {has}")
            if key in values:
                raise refused(f"codec {name} is given {key} twice")
            values[key] = _value(key, value)
        _require_fitting(values)
        return cls(name, **values)  # type: ignore[arg-type]  # the names are those of the table

    def __str__(self) -> str:
        defaults = {field.name: field.default for field in fields(self)}
        values = [(key, getattr(self, key)) for key in _PARAMETERS[self.name]]
        changed = ",".join(f"{key}={_text(value)}" for key, value in values if value != defaults[key])
        return f"{self.name}:{changed}" if changed else self.name

    @property
    def coded(self) -> bool:
        """Whether its rows have to be decoded before attention reads them."""
        return self.name in CODED

    def require_kept(self, kept: int, num_tokens: int) -> None:
        """Raise `InvalidRequest` for shares of more entries than a policy keeps of a document. kept: of each head."""
        total = sum(self.shares)
        if kept < int(num_tokens * total / 100):
            raise refused(
                f"the shares of {self} add up to {total:g} % of the document's entries, and the policy keeps {kept} of "
                f"{num_tokens} tokens; lower compression_ratio or the shares"
            )

    @property
    def splits(self) -> bool:
        """Whether it stores some entries of a head apart from others, by importance."""
        return self.name == "mixed" or bool(self.classes)

    def cuts(self, block: int) -> bool:
        """Whether entries of different blocks of an index would share a scale."""
        return self.name in BITS and block % self.group != 0

    def require_blocks(self, block: int) -> None:
        """Raise `InvalidRequest` unless the entries of each block of an index stay together."""
        for wrong, message in ((self.splits, SPLIT_BLOCKS), (self.cuts(block), CUT_BLOCKS)):
            if wrong:
                raise refused(message.format(codec=self, group=self.group, block=block))

    def require_pruned(self) -> None:
        """Raise `InvalidRequest` unless keys without some of their channels can be encoded."""
        if self.name == "klt":
            raise refused(WHOLE_KEYS.format(codec=self))

    def require_residuals(self) -> None:
        """Raise `InvalidRequest` unless residuals can be encoded in place of keys and values."""
        if self.name == "klt":
            raise refused(WHOLE_ENTRIES.format(codec=self))

    @property
    def precisions(self) -> set[tuple[Precision, int]]:
        """Every precision that a record may have under this codec, with its group size (0 for none)."""
        if self.name == "none":
            return {("none", 0)}
        if self.coded:
            return {("none", 0), (self.name, 0)}  # type: ignore[arg-type]  # names of `CODED` are precisions
        names: tuple[Precision, ...] = (self.high, self.low) if self.name == "mixed" else (self.name,)
        return {("none", 0), *((name, self.group) for name in names if name != "none")}


def _text(value: float | str | tuple[float, ...]) -> str:
    if isinstance(value, tuple):
        return "/".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def resolve(current: str, target: str) -> Codec:
    """The codec of a cache under codec `current` after encoding it under `target`.

    "none" adds no encoding. Otherwise a quantized cache keeps its codec, and another one raises `InvalidRequest`:
    encoding twice would add up the errors of both codecs unseen.
    """
    codec, present = Codec.parse(target), Codec.parse(current)
    if present.name == "none":
        return codec
    if codec.name != "none" and codec != present:
        raise refused(
            f"the cache is encoded under {current} and is not encoded again under {codec}; compress its document again"
        )
    return present


def _require_fitting(values: Mapping[str, Any]) -> None:
    """Refuse parameters of klt that contradict each other."""
    classes, shares = values.get("classes", ()), values.get("shares", ())
    if classes and "step" in values:
        raise refused("step is one step for all entries, and classes are several; give one of them")
    if len(classes) != len(shares):
        raise refused(f"{len(classes)} classes and {len(shares)} shares were given; each class needs its share")
    if classes and values.get("heads") == "joint":
        raise refused(
            "heads=joint transforms the same tokens of all heads, and a class has those that score best in each"
        )
    if sum(shares) > 100:
        raise refused(f"shares are percentages of the document's entries, and these add up to {sum(shares):g}")


def _value(key: str, text: str) -> int | float | str | tuple[float, ...]:
    """A parameter's value. Refuses signs and exponents: each value has one form, leading and trailing zeros aside."""
    if key in _CHOICES:
        names = _CHOICES[key]
        if text not in names:
            raise refused(f"{key} must be one of {', '.join(names)}, not {text!r}")
        return text
    if key == "share" and text == "policy":
        return text
    if key == "share":
        if not re.fullmatch(r"0?\.[0-9]{1,4}", text) or float(text) == 0:
            raise refused(f"share must be policy, or from 0.0001 to 0.9999 with at most four decimals, not {text!r}")
        return float(text)
    if key == "step":
        return _step(text)
    if key == "classes":
        steps = tuple(map(_step, text.split("/")))
        if not 2 <= len(steps) <= _MOST_CLASSES or list(steps) != sorted(set(steps)):
            raise refused(f"classes must be 2 to {_MOST_CLASSES} steps, each larger than the one before, not {text!r}")
        return steps
    if key == "shares":
        shares = [float(x) if re.fullmatch(r"[0-9]{1,2}(\.[0-9]{1,2})?", x) else 0.0 for x in text.split("/")]
        if not all(shares):
            raise refused(f"shares must be from 0.01 to 99.99 %, with at most two decimals: 25/12.5, not {text!r}")
        return tuple(shares)
    number = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else -1
    if key == "group" and number not in _GROUPS:
        raise refused(f"group must be a power of two from {_GROUPS[0]} to {_GROUPS[-1]}, not {text!r}")
    if key == "residual" and not 0 <= number <= _MAX_RESIDUAL:
        raise refused(f"residual must be a number from 0 to {_MAX_RESIDUAL}, not {text!r}")
    return number


def _step(text: str) -> float:
    step = float(text) if re.fullmatch(r"[0-9]{1,2}(\.[0-9]{1,4})?", text) else -1.0
    if not STEPS[0] <= step <= STEPS[1]:
        raise refused(f"step must be from {STEPS[0]:g} to {STEPS[1]:g}, with at most four decimals, not {text!r}")
    return step


def refused(message: str) -> InvalidRequest:
    """The error of a codec that cannot be used."""
    return InvalidRequest(message, param="codec")
