"""Legal values of parameters, in words and as checks. `method.parameter` makes the rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvshelf.errors import InvalidRequest, nearest

LARGEST: Final = 2**24
"""Largest legal number. No document has more tokens, and above it fp32 cannot represent every integer."""


def unknown(kind: str, name: str, known: Iterable[str], param: str) -> InvalidRequest:
    """The error for a method, of a kind in words, that is none of those known."""
    names = list(known)
    return InvalidRequest(
        f"unknown {kind} {name!r}{nearest(name, names)}; this version has {', '.join(names)}", param=param
    )


def legal_values(types: tuple[type, ...], rule: Mapping[str, Any]) -> str:
    """The legal values of a parameter, in words."""
    names = ["null" if kind is type(None) else kind.__name__ for kind in types]
    if rule["choices"]:
        return f"one of {', '.join(map(repr, rule['choices']))}"
    legal = ("an odd " if rule["odd"] else "") + " or ".join(names)
    match rule["minimum"], rule["maximum"]:
        case None, None:
            return legal
        case minimum, None:
            return f"{legal} from {minimum}"
        case None, maximum:
            return f"{legal} to {maximum}"
        case minimum, maximum:
            return f"{legal} from {minimum} to {maximum}"


def check(owner: str, name: str, value: Any, types: tuple[type, ...], rule: Mapping[str, Any], param: str) -> None:
    """Raises `InvalidRequest`, which names the parameter and its range, for a value that is not legal. owner: what has
    the parameter, in words; param: the field of the request that it comes from."""
    if isinstance(value, int | float) and abs(value) > LARGEST:  # its text may be too long to show
        raise InvalidRequest(
            f"parameter {name!r} of {owner} is beyond {LARGEST}, and no number may be",
            param=f"{param}.{name}",
        )
    numeric = float in types and isinstance(value, int) and not isinstance(value, bool)
    fits = type(value) in types or numeric
    if fits and value is not None:
        fits = rule["choices"] is None or value in rule["choices"]
        fits = fits and (rule["minimum"] is None or value >= rule["minimum"])  # false for NaN
        fits = fits and (rule["maximum"] is None or value <= rule["maximum"])
        fits = fits and (not rule["odd"] or value % 2 == 1)
    if not fits:
        raise InvalidRequest(
            f"parameter {name!r} of {owner} is {value!r}; it must be {legal_values(types, rule)}",
            param=f"{param}.{name}",
        )
