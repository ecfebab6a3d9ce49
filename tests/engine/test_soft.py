"""What stands in the place of embeddings is of one pass: questions that run between its layers are as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.engine import Engine
from kvshelf.model.source import bundled_folder
from tests.images import OLDER, block, picture, save_image_model

TEXT = "The clerk kept a note of every parcel that came in by the night train. " * 4


def logits(engine: Engine, cache: CompressedCache, question: str) -> Tensor:
    """Of a question's tokens behind a cache, by the model's modules."""
    ids = torch.tensor([engine.encode_query(cache, question)])
    with torch.no_grad(), engine.attached(cache) as past:
        found: Tensor = engine.model(ids, **{CACHE_ARGUMENT: past}).logits
    return found


@pytest.mark.parametrize("what", ["images", "learned tokens"])
def test_questions_between_the_layers_of_a_prefill_are_as_without_it(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document: Any = TEXT
    folder, how = str(bundled_folder("kvshelf-tiny")), {"policy": "lookaheadkv", "compression_ratio": 0.5}
    if what == "images":
        if OLDER:
            pytest.skip("this transformers needs torchvision to see")
        save_image_model(tmp_path)
        document, folder, how = [block(picture(1)), {"text": TEXT}], str(tmp_path), {"policy": "full"}
    engine = Engine.load(folder, device="cpu", dtype="float32")
    monkeypatch.setattr(engine.passes, "program", None)  # as on a GPU
    other = engine.compress("The lamp is green. " * 4, policy="full")
    questions = ["Which lamp?", TEXT * 2]
    expected = [logits(engine, other, question) for question in questions]
    alone = engine.run(engine.prepare(document, **how)).cache
    answers: list[list[Tensor]] = []

    def ask() -> None:
        answers.append([logits(engine, other, question) for question in questions])

    job = engine.prepare(document, **how)
    assert (job.soft is None) == (what == "images")
    interrupted = engine.run(job, checkpoint=ask).cache
    assert len(answers) > 1
    for answer in answers:
        torch.testing.assert_close(answer, expected)
    assert interrupted.to_bytes() == alone.to_bytes(), "its own pass has them to its end"
