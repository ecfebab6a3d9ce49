"""Images among the blocks of a document: what a creation makes of them, and what it refuses by name."""

from __future__ import annotations

from typing import Any

import pytest

from kvshelf.api import AppendCache, CreateCache, Estimate
from kvshelf.api.options import with_images, without_images
from kvshelf.api.strict import parse_request
from kvshelf.errors import InvalidRequest
from kvshelf.workers.replica.create.spec import document_of

IMAGE = {"type": "image", "data": "QUJD"}
BLOCKS: list[Any] = [{"text": "one "}, IMAGE, IMAGE, {"text": "two", "protect": True}, {"type": "text", "text": " end"}]


def test_images_stand_at_characters_of_the_text() -> None:
    body = parse_request(CreateCache, {"document": BLOCKS})
    assert body.document == "one two end"
    assert [(image.at, image.data) for image in body.images] == [(4, "QUJD"), (4, "QUJD")]
    assert body.protect == ["chars:4-7"]
    again = parse_request(CreateCache, body.model_dump(exclude_unset=True))
    assert (again.document, again.images, again.protect) == (body.document, body.images, body.protect)
    rebuilt = with_images("one two end", body.images)
    assert without_images(rebuilt)[1] == [{"at": 4, "data": "QUJD"}] * 2
    assert "".join(block.get("text", "") for block in rebuilt) == "one two end"
    assert document_of(body) == rebuilt


def test_a_document_may_be_images_alone() -> None:
    for model in (CreateCache, Estimate):
        body = parse_request(model, {"document": [IMAGE]})
        assert body.document == ""
        assert document_of(body) == [{"text": ""}, IMAGE, {"text": ""}]
    assert parse_request(CreateCache, {"document": "text"}).images == []


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "an address": ({"document": [{"type": "image", "url": "http://a/b.png"}]}, "document[0]", "an image is"),
    "another field": ({"document": [{**IMAGE, "protect": True}]}, "document[0]", "an image is"),
    "in messages": ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]", "only a document"),
    "with messages": (
        {"messages": [{"role": "user", "content": "a"}], "images": [{"at": 0, "data": "QUJD"}]}, "images", "in a text",
    ),
    "twice": ({"document": [IMAGE], "images": [{"at": 0, "data": "QUJD"}]}, "images", "in one way"),
    "many": ({"document": [IMAGE] * 33}, "images", "32"),
    "split": ({"document": [IMAGE], "split": True}, "split", "no place in"),
    "episodes": ({"document": [IMAGE], "episodes": {"count": 2}}, "episodes", "no place in"),
    "a source": ({"document": [IMAGE], "keep_source": "tokens"}, "keep_source", "kept source"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_images_says_so(what: str) -> None:
    body, param, said = REFUSED[what]
    with pytest.raises(InvalidRequest) as refusal:
        parse_request(CreateCache, body)
    assert refusal.value.param == param
    assert said in refusal.value.message


def test_images_are_not_appended() -> None:
    with pytest.raises(InvalidRequest, match="append text") as refusal:
        parse_request(AppendCache, {"document": BLOCKS})
    assert refusal.value.param == "document"
