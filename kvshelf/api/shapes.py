"""The shape that an answer must have: a JSON schema, a grammar, or one of several texts. How likely its tokens were."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema

from kvshelf.api.strict import AnyFields, RequestBody, ResponseBody, misuse, type_tag

MAX_GRAMMAR_BYTES = 65_536
MAX_CHOICES = 1024
MAX_ANSWERS = 16
MAX_TOP_LOGPROBS = 20

SHAPES = ("response_format", "grammar", "choices")
"""The fields that give an answer a shape; a request has one of them at most."""


class JsonSchema(RequestBody):
    """A schema as OpenAI wraps it. Only `schema` has an effect: an answer always fits it exactly."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: AnyFields = Field(alias="schema")
    strict: bool | None = None


class Format(RequestBody):
    """Base of the formats. PARAM: the field that has it; of `text.format` there are subclasses."""

    PARAM: ClassVar[str] = "response_format"


class AnyText(Format):
    type: Literal["text"]


class AnyObject(Format):
    type: Literal["json_object"]


class OfSchema(Format):
    type: Literal["json_schema"]
    json_schema: JsonSchema


def kind_of(value: Any) -> str:
    """The tag of a format. Anything else is checked as a schema, whose errors say what is missing."""
    tag = type_tag(value)
    return tag if tag in ("(text)", "(json_object)") else "(json_schema)"


ResponseFormat = Annotated[
    Annotated[AnyText, Tag("(text)")]
    | Annotated[AnyObject, Tag("(json_object)")]
    | Annotated[OfSchema, Tag("(json_schema)")],
    Discriminator(kind_of),
]


def _different(choices: list[str]) -> list[str]:
    for place, choice in enumerate(choices):
        if choice in choices[:place]:
            raise misuse("choices", f"{choice[:80]!r} is there twice; give each choice once")
    return choices


Grammar = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_BYTES)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1024)]],
    Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True),
    AfterValidator(_different),
]
Answers = Annotated[int, Field(ge=1, le=MAX_ANSWERS)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
_LONGEST_VALUE = 8192


def _scalar(value: Any) -> Any:
    if isinstance(value, str) and len(value) <= _LONGEST_VALUE:
        return value
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    shown = f"a text of {len(value)} characters" if isinstance(value, str) else f"{value!r:.80}"
    raise misuse(
        "chat_template_kwargs",
        f"it is {shown}; a variable of a chat template is a text of at most {_LONGEST_VALUE} characters, a finite "
        "number, true, false or null",
    )


_SCALAR = {
    "anyOf": [
        {"type": "string", "maxLength": _LONGEST_VALUE},
        *({"type": name} for name in ("number", "boolean", "null")),
    ]
}
TemplateKwargs = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")],
        Annotated[Any, AfterValidator(_scalar), WithJsonSchema(_SCALAR)],
    ],
    Field(max_length=16),
]


def param_of(body: Any, name: str) -> str:
    """The name that a caller knows a field of `SHAPES` by."""
    return str(getattr(getattr(body, name), "PARAM", name))


def require_one_shape(body: Any) -> None:
    """For a validator: `SHAPES` exclude each other, and a schema is not too large."""
    shapes = [param_of(body, name) for name in SHAPES if getattr(body, name) is not None]
    if len(shapes) > 1:
        raise misuse(shapes[1], f"{' and '.join(shapes)} were given; an answer has one shape")
    if isinstance(body.response_format, OfSchema):
        size = len(json.dumps(body.response_format.json_schema.schema_).encode())
        if size > MAX_GRAMMAR_BYTES:
            param = body.response_format.PARAM
            raise misuse(param, f"the schema has {size} bytes; at most {MAX_GRAMMAR_BYTES} are accepted")


def require_logprobs(body: Any) -> None:
    """For a validator: `top_logprobs` needs `logprobs`."""
    if body.top_logprobs and not body.logprobs:
        raise misuse("top_logprobs", "top_logprobs is only allowed with logprobs: true")


class TokenLogprob(ResponseBody):
    """`logprob`: the natural logarithm of the probability that the model gave the token, before temperature, top_p and
    any shape; -9999 stands for less than any number. `bytes`: its UTF-8 bytes, of which one token may have a part."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class Logprob(TokenLogprob):
    """One token of an answer. `top_logprobs`: the likeliest tokens at its place, as many as were asked for."""

    top_logprobs: list[TokenLogprob] = Field(default_factory=list)
