"""The options that several requests and `Engine` share: a class for the values, `...Fields` for their keywords, which a
type checker cannot read out of the class."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Self, TypedDict, cast

from pydantic import BeforeValidator, Field, WithJsonSchema

from kvshelf.api.strict import RequestBody, Seed, Stops, Temperature, TopP, misuse
from kvshelf.errors import InvalidRequest


class Ask(RequestBody):
    """How the tokens of an answer are chosen, wherever a question is asked."""

    temperature: Temperature = Field(0.0, description="sampling temperature; 0 takes the most likely token")
    top_p: TopP = Field(1.0, description="sample from the most likely tokens with this total probability")
    seed: Seed | None = Field(None, description="makes sampling repeatable")
    stop: Stops | None = Field(None, description="text that ends the answer")

    @classmethod
    def of(cls, fields: Mapping[str, object]) -> Self:
        """From keyword arguments, of which None means absent. Raises `TypeError` for other names, as a call does. The
        values are not checked here, but where they are used."""
        if unknown := fields.keys() - cls.model_fields.keys():
            raise TypeError(f"got an unexpected keyword argument {min(unknown)!r}")
        values: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
        return cast(Self, cls.model_construct(**values))

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts of `stop`."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class AskFields(TypedDict, total=False):
    """How the tokens of an answer are chosen, see `Ask`. Temperature 0 is greedy. None means absent."""

    temperature: float | None
    top_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None


MAX_RULE: Final = 4096
"""Characters of a rule of `protect`."""

Rules = Sequence[str | Mapping[str, Any]]
"""Rules of `protect`, as texts or as objects; see `written_rule`."""

_RULE_OBJECTS: Final[Mapping[str, tuple[str, type]]] = {
    "first": ("first", int),
    "text": ("text", str),
    "regex": ("lines", str),
}
"""The rules of `protect` that may be objects: by their field, the rule's name and the type of the field's value."""


def written_rule(rule: Any) -> Any:
    """A rule of `protect` as a text: {"first": 64} as first:64, {"text": "..."} likewise, and {"regex": "..."} as
    lines:...; any other value stays as it is."""
    if isinstance(rule, Mapping) and len(rule) == 1:
        ((field, value),) = rule.items()
        name, kind = _RULE_OBJECTS.get(field, ("", object))
        if name and type(value) is kind:
            return f"{name}:{value}"
    return rule


_RULE_TEXT: Final = {"type": "string", "minLength": 1, "maxLength": MAX_RULE}
_RULE_SCHEMA: Final = {
    "anyOf": [
        _RULE_TEXT,
        *(
            {
                "type": "object",
                "properties": {field: {"type": "integer", "minimum": 1} if kind is int else _RULE_TEXT},
                "required": [field],
                "additionalProperties": False,
            }
            for field, (_, kind) in _RULE_OBJECTS.items()
        ),
    ]
}

ProtectRules = Annotated[
    list[
        Annotated[
            str, Field(min_length=1, max_length=MAX_RULE), BeforeValidator(written_rule), WithJsonSchema(_RULE_SCHEMA)
        ]
    ],
    Field(max_length=256),
]


class Protecting(RequestBody):
    """Which tokens of a document every policy keeps, and every codec stores as the model makes them."""

    protect: ProtectRules = Field(
        default_factory=list,
        description="what every policy keeps and no codec rounds: system (the system message), first:64 (tokens), "
        "headings (of Markdown), text:... (each time it occurs), lines:... (those that a regular expression finds), "
        'chars:10-90, message:2, message:2:10-90 or tokens:0-64; also {"first": 64}, {"text": ...} and '
        '{"regex": ...}, which is lines:...; budgets count it',
    )


class ProtectFields(TypedDict, total=False):
    """What every policy keeps and no codec rounds, see `Protecting`."""

    protect: Rules | None


MAX_IMAGES: Final = 32
"""Of a document."""

MAX_IMAGE_PIXELS: Final = 1 << 24
"""Of one image: a page of A4 at 400 dots an inch has a few less. To make such a one smaller takes seconds."""

MAX_PIXELS: Final = 1 << 26
"""Of all images of a document together. They are decoded one after another, before the prefill and at its beginning."""


class ImagePart(RequestBody):
    """An image of a document: a PNG or JPEG file in base64, before the character `at` of the text."""

    at: Annotated[int, Field(ge=0, lt=2**31)]
    data: Annotated[str, Field(min_length=1)]

    def file(self, param: str) -> bytes:
        """The file. Raises `InvalidRequest` about `param`."""
        try:
            return base64.b64decode(self.data, validate=True)
        except ValueError as error:
            raise InvalidRequest(f"{param}.data is no base64: {error}", param=f"{param}.data") from error


ImageParts = Annotated[list[ImagePart], Field(max_length=MAX_IMAGES, fail_fast=True)]


def without_images(document: Any) -> tuple[Any, list[dict[str, Any]]]:
    """A document without its blocks `{"type": "image", "data": "..."}`, and each of them as an `ImagePart`. A document
    without images stays as it is. Raises as `misuse`."""
    if not has_images(document):
        return document, []
    texts, images, at = [], [], 0
    for number, block in enumerate(document):
        if not _is_image(block):
            texts.append(block)
            text = block.get("text") if isinstance(block, Mapping) else None
            at += len(text) if isinstance(text, str) else 0
        elif set(block) == {"type", "data"} and isinstance(block["data"], str):
            images.append({"at": at, "data": block["data"]})
        else:
            raise misuse(f"document[{number}]", 'an image is {"type": "image", "data": "..."}, a file in base64')
    return texts or "", images


def has_images(document: Any) -> bool:
    """Whether a document is blocks, and some of them are images."""
    return _of_blocks(document) and any(_is_image(block) for block in document)


def _is_image(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("type") == "image"


def with_images(text: str, images: Sequence[ImagePart]) -> Any:
    """The blocks of which `without_images` makes this text and these images."""
    ends = [image.at for image in images]
    blocks: list[dict[str, str]] = [{"text": text[: ends[0]]}]
    for image, end in zip(images, [*ends[1:], len(text)], strict=True):
        blocks += [{"type": "image", "data": image.data}, {"text": text[image.at : end]}]
    return blocks


def unmarked(document: Any, messages: Any) -> tuple[Any, Any, list[str]]:
    """A document and messages whose blocks `{"text": ..., "protect": true}` are plain text, and the rules of `protect`
    that say the same. A document or message without blocks stays as it is. Raises as `misuse`."""
    rules: list[str] = []
    if _of_blocks(document):
        document, spans = _joined(document, "document")
        rules += [f"chars:{first}-{end}" for first, end in spans]
    if isinstance(messages, list | tuple):
        plain = []
        for at, message in enumerate(messages):
            if isinstance(message, Mapping) and _of_blocks(message.get("content")):
                text, spans = _joined(message["content"], f"messages[{at}].content")
                rules += [f"message:{at}:{first}-{end}" for first, end in spans]
                message = {**message, "content": text}
            plain.append(message)
        messages = plain
    return document, messages, rules


def _of_blocks(content: Any) -> bool:
    first = content[0] if isinstance(content, list | tuple) and content else None
    return isinstance(first, Mapping) and "role" not in first


def _joined(blocks: Sequence[Any], where: str) -> tuple[str, list[tuple[int, int]]]:
    """The text of blocks, and the spans of the protected ones in it."""
    texts: list[str] = []
    spans: list[tuple[int, int]] = []
    at = 0
    for number, block in enumerate(blocks):
        known = isinstance(block, Mapping) and set(block) <= {"type", "text", "protect"}
        text, protect = (block.get("text"), block.get("protect", False)) if known else (None, None)
        if not isinstance(text, str) or not isinstance(protect, bool) or block.get("type", "text") != "text":
            raise misuse(
                f"{where}[{number}]",
                'a block is {"text": "..."}, with "protect": true where every policy keeps it; of images only a '
                "document has some",
            )
        if protect and text:
            spans.append((at, at + len(text)))
        texts.append(text)
        at += len(text)
    return "".join(texts), spans
