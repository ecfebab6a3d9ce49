"""The common base of policies, selectors and suffix policies. The engine asks a method for its needs, never its name.

A method is a frozen dataclass in a file of its own, here or in another package. Its fields are its parameters;
`parameter()` gives each one its default, range and help text, against which requests are checked.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from enum import Flag, auto
from typing import Any, ClassVar, Final, Self, get_args, get_type_hints

from kvshelf.errors import InvalidRequest, nearest

LARGEST: Final = 2**24
"""Largest legal number. No document has more tokens, and above it fp32 cannot represent every integer."""


@dataclass(frozen=True)
class Kind:
    """A kind of method. noun: in messages. folder: of its files, and the last part of its entry points' group. param,
    params: the fields of a request that name a method and its parameters."""

    noun: str
    folder: str
    param: str
    params: str

    @property
    def group(self) -> str:
        """The entry points under which other packages name their methods of this kind."""
        return f"kvshelf.{self.folder}"


POLICY: Final = Kind("policy", "policies", "policy", "policy_params")
SELECTOR: Final = Kind("selector", "selectors", "select.method", "select.params")
SUFFIX_POLICY: Final = Kind("suffix policy", "suffixes", "suffix.policy", "suffix.params")


class Needs(Flag):
    """What a method needs besides keys and values. The engine refuses the method before any work where the model or
    the cache cannot provide it.

    In a prefill: QUERIES. ROPE: to undo the rotation, also at the question. TEXT: the document's text; for a selector,
    the text of answers. WEIGHTS: the output projection's. CALIBRATION: the model's. GATES: trained ones, see
    `Policy.gate_file`. SUMS: `LayerView.column_sums` by the attention's own log-sum-exps; without it the last layer's
    attention is not computed. CALL: the arguments of the attention module's call, and the model. BEFORE: which tokens
    the layer before keeps. SURPRISALS: of the document's tokens, for which the model reads it once more. INPUTS: of
    each layer, which the policy stores in place of keys and values.

    At the question: SENTENCES: their ends, which the cache has. INDEX: the cache's. CHUNKS: the model's frequency
    chunks, and SKEWS: of its query heads, both measured by `kvshelf calibrate`. ATTENTION: the weights that tokens of
    the answer give. EARLY: the queries that a layer would make of the input of the layer before it.
    """

    NOTHING = 0
    QUERIES = auto()
    ROPE = auto()
    TEXT = auto()
    WEIGHTS = auto()
    CALIBRATION = auto()
    GATES = auto()
    SUMS = auto()
    CALL = auto()
    SENTENCES = auto()
    INDEX = auto()
    CHUNKS = auto()
    ATTENTION = auto()
    BEFORE = auto()
    SURPRISALS = auto()
    INPUTS = auto()
    SKEWS = auto()
    EARLY = auto()


def parameter(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[Any, ...] | None = None,
    odd: bool = False,
    added: bool = False,
) -> Any:
    """A parameter of a method: a dataclass field with its legal range, both ends included. added: later than the
    method; at its default it is in no identity, so that the ids of earlier caches stay."""
    rule = {"help": help, "minimum": minimum, "maximum": maximum, "choices": choices, "odd": odd, "added": added}
    return field(default=default, metadata=rule)


@dataclass(frozen=True)
class Method(ABC):
    """source: the paper. advice: when to choose the method. Its summary is the class docstring's first paragraph."""

    kind: ClassVar[Kind]
    name: ClassVar[str]
    formerly: ClassVar[str] = ""
    """A second name, under which requests and stored settings find it, too."""
    source: ClassVar[str]
    advice: ClassVar[str] = ""

    @property
    def needs(self) -> Needs:
        """A plain class attribute where the needs do not depend on parameters."""
        return Needs.NOTHING

    def parameters(self) -> dict[str, Any]:
        """The values of all parameters but of those that were `added` and have their default."""
        values = ((f, getattr(self, f.name)) for f in parameter_fields(type(self)))
        return {f.name: value for f, value in values if not (f.metadata["added"] and value == f.default)}

    @classmethod
    def build(cls, params: Mapping[str, Any], known: Mapping[str, type[Any]]) -> Self:  # noqa: ARG003
        """Make the method from a request's parameters. Raises `InvalidRequest` naming the parameter and its range.

        known: all methods of its kind by name, among which a method around another one looks its base up.
        """
        require_parameters(cls, f"{cls.kind.noun} {cls.name!r}", params, cls.kind.params)
        return cls(**params)


def require_parameters(cls: type, owner: str, params: Mapping[str, Any], param: str) -> None:
    """Raises `InvalidRequest`, which names the parameter and its range, unless `cls` has all these parameters and they
    are legal. owner: what has them, in words; param: the field of the request that they come from."""
    legal = {f.name: f for f in parameter_fields(cls)}
    for name, value in params.items():
        if name not in legal:
            raise InvalidRequest(
                f"{owner} has no parameter {name!r}{nearest(name, legal)}; it has {', '.join(legal) or 'none'}",
                param=f"{param}.{name}",
            )
        check(owner, name, value, parameter_types(cls)[name], legal[name].metadata, param)


def parameter_fields(cls: type) -> list[Field[Any]]:
    """The fields made by `parameter`. A class may have others, which requests cannot set."""
    return [f for f in fields(cls) if f.metadata]


def parameter_types(cls: type) -> dict[str, tuple[type, ...]]:
    """The types each parameter may have."""
    hints = get_type_hints(cls)
    return {f.name: get_args(hints[f.name]) or (hints[f.name],) for f in parameter_fields(cls)}


def unknown(kind: Kind, name: str, known: Iterable[str]) -> InvalidRequest:
    """The error for an unknown method."""
    names = list(known)
    text = f"unknown {kind.noun} {name!r}{nearest(name, names)}; this version has {', '.join(names)}"
    return InvalidRequest(text, param=kind.param)


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
    """Raises `InvalidRequest` for a value that is not legal. owner, param: as of `require_parameters`."""
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
