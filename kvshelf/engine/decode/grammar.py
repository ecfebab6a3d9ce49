"""The grammar of an answer that must have a shape: of a JSON schema, in Lark, or of several texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvshelf.api.shapes import SHAPES
from kvshelf.errors import InvalidRequest
from kvshelf.model.bounds import nbytes_of

WRITTEN: Final = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""Of a schema: one way to write JSON, as Python's `json.dumps` does and as templates show calls of tools, so that a
model cannot fill an answer with white space."""
MAX_COMPILED_BYTES: Final = 262_144
"""Of one grammar as it is compiled: a schema, Lark, choices, or the schemas of all tools that an answer may call."""

_SEPARATOR_BYTES: Final = 2
_DEEPEST: Final = 64


@dataclass(frozen=True)
class Grammar:
    """What an answer must be. text: as llguidance reads it. param: the field of the request that says so. least_bytes:
    a lower bound of the answer's UTF-8 bytes."""

    text: str
    param: str
    least_bytes: int = 0

    def __post_init__(self) -> None:
        """Raises `InvalidRequest` for more than `MAX_COMPILED_BYTES`."""
        if (size := len(self.text.encode())) > MAX_COMPILED_BYTES:
            raise InvalidRequest(
                f"{self.param} makes a grammar of {size} bytes, and at most {MAX_COMPILED_BYTES} are compiled; give "
                "less",
                param=self.param,
            )

    @classmethod
    def of(cls, shape: Mapping[str, Any], format_param: str = "response_format") -> Grammar | None:
        """The grammar of one of the fields `response_format` (as OpenAI's, `format_param` in the request), `grammar`
        (in llguidance's Lark) and `choices` (texts, of which the answer is one); None for response_format "text"."""
        fields = {name: value for name, value in shape.items() if value is not None}
        if len(fields) > 1 or not fields.keys() <= set(SHAPES):
            named = ", ".join(map(str, fields))
            raise InvalidRequest(f"a shape has one of {', '.join(SHAPES)}; found {named}", param="shape")
        match fields:
            case {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}:
                return cls._of_schema(schema, format_param)
            case {"response_format": {"type": "json_object"}}:
                return cls._of_schema({"type": "object"}, format_param)
            case {"response_format": {"type": "text"}}:
                return None
            case {"response_format": other}:
                kinds = "text, json_object, or json_schema with a json_schema.schema"
                raise InvalidRequest(f"response_format is {other!r}; its type is {kinds}", param="response_format")
            case {"grammar": lark}:
                return cls.of_lark(lark, "grammar")
            case {"choices": choices}:
                texts = isinstance(choices, Collection) and all(isinstance(text, str) and text for text in choices)
                if isinstance(choices, str) or not choices or not texts:
                    raise InvalidRequest("choices must be a list of texts that are not empty", param="choices")
                lark = "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
                shortest = min(map(nbytes_of, choices))
                return cls.of_lark(lark, "choices", shortest)
        return None

    @classmethod
    def of_lark(cls, lark: str, param: str, least_bytes: int = 0) -> Grammar:
        """A grammar in llguidance's Lark dialect."""
        return cls(json.dumps({"grammars": [{"lark_grammar": lark}]}), param, least_bytes)

    def behind(self, closing: str, lark: str) -> Grammar:
        """The same behind thoughts. closing: the text that ends them; lark: the same in Lark, where it has tokens."""
        (answer,) = json.loads(self.text)["grammars"]
        mark = json.dumps(closing, ensure_ascii=False)
        thought = f"thought[suffix={mark}]: /(?s:.*)/" if lark == mark else f"thought: any {lark}\nany: /(?s:.*)/"
        thoughts = f"start: thought gap @answer\n{thought}\ngap: /\\n{{0,2}}/\n"
        return replace(self, text=json.dumps({"grammars": [{"lark_grammar": thoughts}, answer | {"name": "answer"}]}))

    @classmethod
    def _of_schema(cls, schema: Any, param: str) -> Grammar:
        if not isinstance(schema, Mapping):
            raise InvalidRequest(f"the schema is {schema!r}; it must be an object", param=param)
        text = json.dumps({"grammars": [{"json_schema": {**schema, **WRITTEN}}]})
        return cls(text, param, least_json_bytes(schema))


def least_json_bytes(schema: Any) -> int:
    """A lower bound of the bytes of any JSON that fits a schema: 1 for what is no schema, or leads back to itself."""
    known: dict[int, int] = {}  # each part is looked at once: two references back to itself would double forever

    def least(part: Any, depth: int) -> int:
        if not isinstance(part, Mapping) or depth > _DEEPEST:
            return 1
        if id(part) not in known:
            known[id(part)] = 1
            known[id(part)] = _least_of(part, schema, lambda inner: least(inner, depth + 1))
        return known[id(part)]

    return least(schema, 0)


def _least_of(schema: Mapping[str, Any], root: Any, least: Callable[[Any], int]) -> int:
    match schema:
        case {"const": value}:
            return _size(value)
        case {"enum": [_, *_] as values}:
            return min(map(_size, values))
        case {"$ref": str(path)} if path.startswith("#/"):
            part = root
            for name in path[2:].split("/"):
                part = part.get(name) if isinstance(part, Mapping) else None
            return least(part)
        case {"anyOf": [_, *_] as ways} | {"oneOf": [_, *_] as ways}:
            return min(map(least, ways))
        case {"type": [_, *_] as kinds}:
            return min(_least_of({**schema, "type": kind}, root, least) for kind in kinds)
        case {"type": "object", "required": [*names]}:
            properties = schema.get("properties")
            fields = properties if isinstance(properties, Mapping) else {}
            once = set(map(str, names))
            return _listed(sum(_size(name) + _SEPARATOR_BYTES + least(fields.get(name)) for name in once), len(once))
        case {"type": "array", "minItems": int(fewest)}:
            return _listed(fewest * least(schema.get("items")), fewest)
        case {"type": "string", "minLength": int(fewest)}:
            return 2 + max(0, fewest)
        case {"type": "object" | "array" | "string"}:
            return 2
        case {"type": "boolean" | "null"}:
            return len("true")
    return 1


def _size(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode())


def _listed(parts: int, count: int) -> int:
    """Bytes of an array or an object. parts: of what is in it."""
    return 2 + max(0, parts) + _SEPARATOR_BYTES * max(0, count - 1)
