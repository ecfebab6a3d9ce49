"""A service's own limit on a document with images."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from kvshelf.api import CreateCache
from kvshelf.engine.engine import Engine
from kvshelf.errors import DocumentTooLong
from kvshelf.workers.replica.create.spec import encode
from tests.images import OLDER, block, picture, save_image_model


@pytest.mark.skipif(OLDER, reason="this transformers needs torchvision to see")
def test_a_document_above_the_services_limit_is_refused_by_the_headers_of_its_images(tmp_path: Path) -> None:
    save_image_model(tmp_path)
    engine = Engine.load(str(tmp_path), device="cpu", dtype="float32")
    data = block(picture(1))["data"]
    begun = base64.b64encode(base64.b64decode(data)[:60]).decode()  # has no pixels to read
    spec = CreateCache.model_validate({"document": [{"type": "image", "data": begun}]})
    with pytest.raises(DocumentTooLong, match="has at least 33 tokens, and this service takes 32"):
        encode(engine, spec, 32)
    whole = CreateCache.model_validate({"document": [{"type": "image", "data": data}], "layout": "plain"})
    assert len(encode(engine, whole, 33).token_ids) == 33
