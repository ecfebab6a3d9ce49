"""What policies, selectors and suffix policies have in common: a `Method` says its name, its source, its parameters and
what it needs, and is built from a request. The engine asks for the needs, never which method it has before it.

A method is a frozen dataclass in a file of its own, here or in another package. Its fields are its parameters;
`parameter()` gives each one its default, range and help text, against which requests are checked.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from enum import Flag, auto
from typing import Any, ClassVar, Final, Self, get_args, get_type_hints

from kvshelf.errors import InvalidRequest, nearest
from kvshelf.methods.parameters import check


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

    Of a prefill: QUERIES. ROPE: to undo the rotation, also at the question. TEXT: of the document; of a selector, that
    of answers. WEIGHTS: of the output projection. CALIBRATION: of the heads. GATES: trained ones, see
    `Policy.gate_file`. SUMS: that `LayerView.column_sums` uses the attention's own log-sum-exps; without it the last
    layer's attention is not computed. CALL: the arguments of the attention module's call, and the model. BEFORE: which
    tokens the layer before keeps. SURPRISALS: of the document's tokens, for which the model reads it once more. INPUTS:
    of each layer, which the policy stores in place of keys and values.

    At the question: SENTENCES, of which the cache says where they end. INDEX: that the cache has one. CHUNKS: of the
    model's frequencies, measured by `kvshelf calibrate`. ATTENTION: the weights that tokens of the answer give.
    SKEWS: of the model's query heads, found likewise. EARLY: the queries that a layer would make of what the layer
    before it was given.
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
    """A parameter of a method: a dataclass field with its legal range, both ends included. added: to a method that had
    been released without it; at its default it is in no identity, so that the ids of earlier caches stay."""
    rule = {"help": help, "minimum": minimum, "maximum": maximum, "choices": choices, "odd": odd, "added": added}
    return field(default=default, metadata=rule)


@dataclass(frozen=True)
class Method(ABC):
    """`source` names the paper, `advice` says when to choose the method. Users see the class docstring's first
    paragraph as its summary."""

    kind: ClassVar[Kind]
    name: ClassVar[str]
    formerly: ClassVar[str] = ""
    """The name that it once had, under which requests and stored settings still find it."""
    source: ClassVar[str]
    advice: ClassVar[str] = ""

    @property
    def needs(self) -> Needs:
        """What it needs. A plain class attribute if it does not depend on parameters."""
        return Needs.NOTHING

    def parameters(self) -> dict[str, Any]:
        """The parameters as used, without those that were `added` and have their default."""
        values = ((f, getattr(self, f.name)) for f in parameter_fields(type(self)))
        return {f.name: value for f, value in values if not (f.metadata["added"] and value == f.default)}

    @classmethod
    def build(cls, given: Mapping[str, Any], known: Mapping[str, type[Any]]) -> Self:  # noqa: ARG003
        """Make the method from a request's parameters. Raises `InvalidRequest` naming the parameter and its range.

        known: all methods of its kind by name. One that is built around another one looks its base up here.
        """
        require_parameters(cls, f"{cls.kind.noun} {cls.name!r}", given, cls.kind.params)
        return cls(**given)


def require_parameters(cls: type, owner: str, given: Mapping[str, Any], param: str) -> None:
    """Raises `InvalidRequest`, which names the parameter and its range, unless `cls` has all these parameters and they
    are legal. owner: what has them, in words; param: the field of the request that they come from."""
    own = {f.name: f for f in parameter_fields(cls)}
    for name, value in given.items():
        if name not in own:
            raise InvalidRequest(
                f"{owner} has no parameter {name!r}{nearest(name, own)}; it has {', '.join(own) or 'none'}",
                param=f"{param}.{name}",
            )
        check(owner, name, value, parameter_types(cls)[name], own[name].metadata, param)


def parameter_fields(cls: type) -> list[Field[Any]]:
    """The fields made by `parameter`. A class may have others, which requests cannot set."""
    return [f for f in fields(cls) if f.metadata]


def parameter_types(cls: type) -> dict[str, tuple[type, ...]]:
    """The types each parameter may have."""
    hints = get_type_hints(cls)
    return {f.name: get_args(hints[f.name]) or (hints[f.name],) for f in parameter_fields(cls)}
