"""Documents with images: a stored one answers as the whole model with its pixels, and pixels are in its identity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from tests.images import block, picture, processor, save_image_model

ROWS = "The harbour of Brask has forty berths. The wheel is under the kettle and the code is 482913. "
PICTURES = [picture(1), picture(2, 33, 70)]
DOCUMENT: list[Any] = [
    {"text": ROWS}, block(PICTURES[0]), {"text": " The tide is on the other page.\n"}, block(PICTURES[1]), {"text": ROWS},
]  # fmt: skip
WRITTEN = ROWS + "<image>" + " The tide is on the other page.\n" + "<image>" + ROWS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sees")
    save_image_model(made)
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.load(str(folder), device="cpu", dtype="float32")


def document_id(engine: Engine, document: Any, **more: Any) -> str:
    return engine.prepare(document, policy="full", **more).identity.content()


@pytest.mark.parametrize(("family", "split"), [("smolvlm", True), ("smolvlm", False), ("idefics3", True)])
def test_a_stored_document_says_what_the_whole_model_says_of_its_pixels(
    family: str, split: bool, tmp_path: Path
) -> None:
    whole = save_image_model(tmp_path, family, split=split, seed=3)
    given = processor(tmp_path)(text=WRITTEN, images=[PICTURES], return_tensors="pt", add_special_tokens=False)
    engine = Engine.load(str(tmp_path), device="cpu", dtype="float32")
    job = engine.prepare(DOCUMENT, policy="full", layout="plain")
    assert list(job.document.token_ids) == given["input_ids"][0].tolist(), "transformers' own tokens"
    cache = CompressedCache.from_bytes(engine.run(job).cache.to_bytes())
    question = torch.tensor([engine.encode_query(cache, "Where is the wheel?")])
    del given["attention_mask"]
    given["input_ids"] = torch.cat([given["input_ids"], question], dim=1)
    with torch.no_grad():
        expected = whole(**given).logits[0, -question.shape[1] :]
        blind = whole(input_ids=given["input_ids"]).logits[0, -question.shape[1] :]
        with engine.attached(cache) as past:
            found = engine.model(question, **{CACHE_ARGUMENT: past}).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (found - blind).abs().max() > 0.01, "the pixels count"
