"""Validation of requests: strict base classes, shared types, errors on the wire and the error for a failed check."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

import pydantic_core
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_serializer,
)
from pydantic_core import ErrorDetails, PydanticCustomError, PydanticKnownError

from kvshelf.errors import InvalidRequest, as_share, nearest

MAX_PROMPTS = 256
MAX_MESSAGES = 4096
MAX_STOPS = 16
MAX_LABELS = 64
MAX_JOINT = 64
"""Caches that one question asks together."""
MAX_EPISODES = MAX_JOINT
"""Of one creation: one question can be sent to the nearest of all of them."""
MAX_LEVELS = 16
MAX_TTL_S = 10 * 365 * 86400.0
MAX_FIELDS = 16_384
"""Fields of a whole body, with those of its messages and labels."""
MAX_ELEMENTS = 1 << 20
"""Elements of all lists of a body: more tokens than any model reads."""
MAX_DEPTH = 32
MAX_DIGITS = 1024
"""Of one number: Python takes the square of the digits' time to read an integer."""

LayoutName = Literal["chat", "plain"]
Role = Literal["system", "user", "assistant"]
FinishReason = Literal["stop", "length"]
MissReason = Literal["model_changed", "expired", "evicted", "corrupt", "version"]
RequestState = Literal["queued", "running", "done", "failed"]

Text = Annotated[str, Field(min_length=1)]
ModelName = Annotated[str, Field(min_length=1, max_length=512)]
LabelKey = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-/]{1,64}$")]
LabelValue = Annotated[str, Field(max_length=512)]
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=MAX_LABELS)]
CacheIds = Annotated[list[Text], Field(min_length=1, max_length=MAX_JOINT, fail_fast=True)]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")]
CONVERSATION: Final = r"^[A-Za-z0-9_.:\-]{1,64}$"
Conversation = Annotated[str, Field(pattern=CONVERSATION)]
NextUse = Annotated[float, Field(ge=0, le=86400)]
CacheName = Annotated[str, Field(max_length=256)]
Ttl = Annotated[float, Field(gt=0, le=MAX_TTL_S)]
ExpiresAt = Annotated[float, Field(gt=0)]
Guarantee = Annotated[float, Field(gt=0, lt=1e12)]

_CODECS = ("none", "int8", "int4", "int2", "mixed", "klt", "lossless")
_CODEC = rf"^({'|'.join(_CODECS)})(:[a-z]+=[a-z0-9./]+(,[a-z]+=[a-z0-9./]+)*)?$"


def _codec_text(text: str) -> str:
    name = text.partition(":")[0]
    if name not in _CODECS:
        message = f"unknown codec{nearest(name, _CODECS)}; one of {', '.join(_CODECS)}"
    elif re.fullmatch(_CODEC, text) is None:
        message = f"what follows {name} is not of the form name=value,name=value"
    else:
        return text
    raise PydanticCustomError("codec", "{message}", {"message": message})


CodecText = Annotated[
    str,
    Field(max_length=128),  # before the pattern reads it
    AfterValidator(_codec_text),
    Field(
        json_schema_extra={"pattern": _CODEC},  # a refusal that shows it would be hard to read
        description="none, int8, int4, int2, mixed, klt or lossless, with parameters if any: int4:group=64, "
        "klt:step=2,steps=kl",
    ),
]
"""The pattern covers the syntax only; the store checks parameters and their ranges."""
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
Ratio = Annotated[float, Field(ge=0, lt=1)]
MAX_TOKENS = 1_000_000
MaxTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Temperature = Annotated[float, Field(ge=0, le=100)]
TopP = Annotated[float, Field(gt=0, le=1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]


def by_form(forms: type | UnionType, tag: str, otherwise: str) -> Discriminator:
    """Selects the variant of a union by the Python type of its value: trying all would report errors of the wrong one.
    Tags are in parentheses, so that `refusal` can drop them from the field's name."""
    return Discriminator(lambda value: tag if isinstance(value, forms) else otherwise)


def type_tag(value: Any, default: str | None = None) -> str:
    """The tag of a variant that its field `type` names. default: of a value without that field."""
    kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)
    return f"({kind})"


def require_type(*kinds: str, what: str, default: str | None = None) -> BeforeValidator:
    """Refuses objects of other types by name. what: the message, with {} for what is wrong. default: the type of an
    object that names none."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and value.get("type", default) not in kinds:
            problem = what.format(f"of type {str(value.get('type'))!r:.40} is not supported")
            raise misuse("", f"{problem}; send {' or '.join(kinds)}")
        return value

    return BeforeValidator(check)


ONE_OR_LIST: Final = by_form(list | tuple, "(list)", "(one)")

_PromptList = Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("(list)")]
Prompts = Annotated[Annotated[Text, Tag("(one)")] | _PromptList, ONE_OR_LIST]
_StopList = Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True), Tag("(list)")]
Stops = Annotated[Annotated[StopText, Tag("(one)")] | _StopList, ONE_OR_LIST]


def one_of(**types: str | list[str]) -> dict[str, Any]:
    """JSON schema that requires exactly one of these fields, with a value of its JSON type."""
    return {"oneOf": [{"properties": {name: {"type": kind}}, "required": [name]} for name, kind in types.items()]}


def misuse(param: str, message: str, **details: Any) -> PydanticCustomError:
    """An error of the request as a whole that still names one field. details: of the refusal."""
    return PydanticCustomError("misuse", "{message}", {"param": param, "message": message, "details": details})


def without_unsupported(data: Any, neutral: Mapping[str, tuple[Any, ...]]) -> Any:
    """For a validator: a body without the fields of another API that kvshelf does not support. neutral: these, each
    with the values besides null that change nothing; any other is refused by the field's name."""
    if not isinstance(data, dict):
        return data
    for name in neutral.keys() & data.keys():
        value = data[name]
        # 0.0 is how some clients write 0; False equals 0, too, and says something else.
        if value is not None and not any(
            value == v and isinstance(value, bool) is isinstance(v, bool) for v in neutral[name]
        ):
            raise misuse(name, f"{name} is not supported by this version of kvshelf")
    return {name: value for name, value in data.items() if name not in neutral}


class Renewable:
    """Base of bodies with a lifetime that uses may renew."""

    if TYPE_CHECKING:  # else pydantic would take them for the first fields of each body
        ttl_s: float | None
        ttl_renew: bool

    @property
    def ttl_renew_s(self) -> float | None:
        """Seconds from each use to the end of the cache; None: uses do not move its end."""
        return self.ttl_s if self.ttl_renew else None


def require_one_expiry(ttl_s: float | None, expires_at: float | None, *, ttl_renew: bool) -> None:
    """For a validator: `ttl_s` and `expires_at` exclude each other, and `ttl_renew` goes with `ttl_s` alone."""
    if ttl_renew and ttl_s is None:
        raise misuse("ttl_renew", "with ttl_renew each use prolongs the cache by ttl_s; give ttl_s, not expires_at")
    if ttl_s is not None and expires_at is not None:
        raise misuse("expires_at", "give ttl_s or expires_at, not both")


def require_each_once(names: list[str], param: str = "cache_ids") -> None:
    """For a validator: the names of a field are different."""
    for name, count in Counter(names).items():
        if count > 1:
            raise misuse(param, f"{name[:80]!r} is there twice; give each once")


def require_one_document(body: BaseModel) -> None:
    """For a validator: exactly one of `document`, `messages` and `token_ids` must be given."""
    forms = [name for name in ("document", "messages", "token_ids") if getattr(body, name) is not None]
    if len(forms) != 1:
        problem = f"{' and '.join(forms)} were given" if forms else "none was given"
        raise misuse("document", f"exactly one of document, messages and token_ids is needed; {problem}")


class RequestBody(BaseModel):
    """Base of all request bodies. Their lists fail at the first bad element: millions of errors would take a minute."""

    model_config = ConfigDict(
        defer_build=True, strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


class QueryString(BaseModel):
    """Base of query strings. Not strict, because every value in a query string is text.

    Each label is one parameter, `label.<key>=<value>`.
    """

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True, allow_inf_nan=False)

    labels: Labels = Field(default_factory=dict)


class ResponseBody(BaseModel):
    """Base of all responses. Drops unknown fields of a newer service."""

    model_config = ConfigDict(defer_build=True, extra="ignore", frozen=True, protected_namespaces=())


class ListBody(ResponseBody):
    """Base of lists, as OpenAI marks them."""

    object: Literal["list"] = "list"


class ErrorBody(ResponseBody):
    """`code` is for programs, `type` groups codes, `param` names the wrong field, `message` is for people.

    `miss_reason` says why a stored cache could not be used. `details` holds machine-readable facts, such as both
    fingerprints of a model_mismatch. Both are present only if they apply.
    """

    message: str
    type: str
    param: str | None = None
    code: str
    miss_reason: MissReason | None = None
    details: dict[str, Any] | None = None


class ErrorEnvelope(ResponseBody):
    error: ErrorBody


class Message(RequestBody):
    """One turn of a conversation. `reasoning_content`: thoughts of an assistant, for the model's chat template."""

    role: Role
    content: str
    reasoning_content: str | None = None

    @model_serializer(mode="wrap")
    def _without_none(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without thoughts there is no such field: a message is its role and content."""
        message: dict[str, Any] = fields(self)
        if self.reasoning_content is None:
            message.pop("reasoning_content", None)
        return message


MessageList = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]

RequestT = TypeVar("RequestT", bound=RequestBody)


def parse_request(model: type[RequestT], body: bytes | bytearray | dict[str, Any]) -> RequestT:
    """Validates a request body, as JSON text or as Python values. Raises `InvalidRequest` that names the field."""
    bounds = JsonBounds()
    try:
        if isinstance(body, bytes | bytearray):
            bounds.take(body)
            return model.model_validate_json(body, context=bounds)
        return model.model_validate(body, context=bounds)
    except ValidationError as exc:
        raise refusal(exc) from exc


# The closing quote is optional: else the search in a text that has none would begin again at each escaped quote.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_LONG_NUMBER = re.compile(rb"(?<![0-9])[0-9]{%d}" % (MAX_DIGITS + 1))
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))


class JsonBounds:
    """Counts the JSON of one request, in its body and in texts of the body. The body is validated in this context.

    It counts in one scan, without objects: a field or element takes a hundred times its bytes as an object or error.
    """

    def __init__(self) -> None:
        self._fields = self._elements = self._brackets = 0

    def take(self, text: bytes | bytearray) -> None:
        """Counts JSON before it is parsed. Raises `InvalidRequest` for too many fields, elements, digits or levels."""
        structure = _STRING.sub(b"", text)
        brackets = structure.translate(None, _NO_BRACKET)
        self._fields += structure.count(b":")
        self._elements += structure.count(b",")
        self._brackets += len(brackets)
        for what, count, most in (
            ("fields", self._fields, MAX_FIELDS),
            ("elements and fields", self._elements, MAX_ELEMENTS),
            ("lists and objects", self._brackets // 2, MAX_FIELDS),
        ):
            if count > most:
                raise InvalidRequest(f"this JSON has {count} {what}; at most {most} are accepted")
        if _LONG_NUMBER.search(structure):
            raise InvalidRequest(f"a number in this JSON has more than {MAX_DIGITS} digits")
        for _ in range(MAX_DEPTH):
            brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if b"[]" in brackets or b"{}" in brackets:
            raise InvalidRequest(f"this JSON is nested deeper than {MAX_DEPTH} levels")


_SHOWN: Final = 60
"""Characters of a name or value that a refusal shows."""

CHECKED: Final = "checked"
"""The context for values that another process has validated: JSON in texts is not parsed a second time."""


def parse_json(text: str | bytes | bytearray, bounds: JsonBounds | None = None) -> Any:
    """The values of JSON that comes from outside; the one way to read it where no type describes it.

    bounds: of the request that it belongs to, None for one of its own. Raises `InvalidRequest` beyond a bound,
    `ValueError` for what is no JSON; infinite numbers and NaN are none.
    """
    data = text.encode() if isinstance(text, str) else text
    (bounds or JsonBounds()).take(data)
    values = pydantic_core.from_json(data, allow_inf_nan=False)
    json.dumps(values, allow_nan=False)  # 1e999 was read as infinite
    return values


def _finite_json(values: Any) -> str:
    try:
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise PydanticCustomError("finite", "a number in it is not finite") from error


def _finite(values: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    if info.context is not CHECKED:
        _finite_json(values)
    return values


AnyFields = Annotated[dict[str, Any], AfterValidator(_finite)]
"""An object whose fields no type names."""


def _is_object(text: str, info: ValidationInfo) -> str:
    if info.context is CHECKED:
        return text
    bounds = info.context if isinstance(info.context, JsonBounds) else JsonBounds()
    try:
        bounds.take(text.encode(errors="surrogatepass"))
        values = json.loads(text, parse_constant=int)  # which refuses NaN and Infinity; half characters may stand there
        json.dumps(values, allow_nan=False)
    except InvalidRequest as error:
        raise misuse("", error.message) from error
    except (ValueError, RecursionError):  # the latter of brackets without an end
        values = None
    if not isinstance(values, dict):
        raise misuse("", f"the arguments of a call are {text[:80]!r}; they must be a JSON object as text")
    return text


ObjectText = Annotated[str, AfterValidator(_is_object)]
"""A JSON object as text: the arguments of a call."""


def _written(values: Any, info: ValidationInfo) -> Any:
    if info.context is CHECKED:
        return values
    if not isinstance(values, dict):
        raise PydanticKnownError("dict_type")
    return _finite_json(values)


WrittenObject = Annotated[
    str, BeforeValidator(_written), WithJsonSchema({"type": "object", "additionalProperties": True})
]
"""An object of a body that becomes an `ObjectText`."""


def refusal(exc: ValidationError) -> InvalidRequest:
    """The error for a failed validation: the first problem, and the number of others."""
    errors = exc.errors(include_url=False)
    param, message = described(errors[0])
    more = f" ({len(errors) - 1} more problem(s) in this request)" if len(errors) > 1 else ""
    details = errors[0].get("ctx", {}).get("details", {})
    return InvalidRequest((f"{param}: " if param else "") + message + more, param=param, **details)


def described(error: ErrorDetails) -> tuple[str | None, str]:
    """The path of the field at fault, and what is wrong with which value."""
    param = str(error.get("ctx", {}).get("param") or _path(error["loc"])) or None
    if error["type"] == "extra_forbidden":
        return param, "unknown field. The fields of each request are listed in /openapi.json"
    if error["type"] == "union_tag_invalid":  # pydantic's message names the function that reads the type
        return param, "Input should be an object with a type" + _value_text(error)
    return param, error["msg"] + _value_text(error)


def _path(loc: tuple[int | str, ...]) -> str:
    """The path of a field as people write it: messages[0].role."""
    parts = [part for part in loc if isinstance(part, int) or not part.startswith(("(", "[key]"))]  # but for tags
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{_shorten(part)}" for part in parts)
    return path.removeprefix(".")


def _value_text(error: ErrorDetails) -> str:
    """What a refusal says of the value at fault."""
    value = error.get("input")
    scalar = value is None or isinstance(value, bool | int | float | str)
    if error["type"] in ("missing", "misuse", "json_invalid") or not scalar:
        return ""
    limits = error.get("ctx", {})
    is_share = 1 in (limits.get("lt"), limits.get("le"))
    if isinstance(value, int) and abs(value) >= 10**_SHOWN:
        text = f"an integer of more than {_SHOWN} digits"
    else:
        text = _shorten(repr(value[: _SHOWN + 1] if isinstance(value, str) else value))
    return f"; found {text}{as_share(value) if is_share else ''}"


def _shorten(text: str) -> str:
    """The beginning of a text, of which a caller may send megabytes."""
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
