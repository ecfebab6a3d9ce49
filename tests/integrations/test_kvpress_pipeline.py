"""kvpress's pipeline answers from a stored cache: the example, and what kvpress and kvshelf answer themselves."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvshelf import CompressedCache, Engine
from kvshelf.errors import PolicyUnsupported
from kvshelf.model.source import bundled_folder

kvpress = pytest.importorskip(
    "kvpress", reason="kvpress is not installed: it takes transformers below 5.3; .ci/run has both"
)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "kvpress_pipeline.py"
DOCUMENT = "The access code of the amber falcon is 482913. " + "The tide turns and the boats wait. " * 40
QUESTIONS = ["What is the access code of the amber falcon?", "Which code has the falcon?"]


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Engine]:
    """The pipeline and an engine around one model."""
    folder = bundled_folder("kvshelf-tiny")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    pipeline = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    return pipeline, Engine(model, tokenizer, name=folder)


@pytest.mark.parametrize("options", [{"policy": "full"}, {"policy": "keydiff", "compression_ratio": 0.5}])
def test_the_pipeline_answers_what_the_engine_answers(
    example: dict[str, Any], parts: tuple[Any, Engine], options: dict[str, Any]
) -> None:
    pipeline, engine = parts
    cache = CompressedCache.from_bytes(engine.compress(DOCUMENT, **options).to_bytes())
    theirs = example["answers"](pipeline, engine, cache, QUESTIONS, max_new_tokens=12)
    ours = [engine.answer(cache, question, max_new_tokens=12).text for question in QUESTIONS]
    assert theirs == ours
    assert theirs[0].strip() == "482913"


def test_a_full_cache_answers_as_the_pipeline_from_its_own_prefill(
    example: dict[str, Any], parts: tuple[Any, Engine]
) -> None:
    pipeline, engine = parts
    (question, _), cache = QUESTIONS, engine.compress(DOCUMENT, policy="full")
    ids = torch.tensor([engine.encode_document(DOCUMENT).token_ids])
    prefilled = pipeline.forward(
        {"context_ids": ids, "questions_ids": [torch.tensor([engine.encode_query(cache, question)])]}, max_new_tokens=12
    )
    assert example["answers"](pipeline, engine, cache, [question], max_new_tokens=12) == prefilled


def test_heads_of_different_lengths_are_no_such_cache(example: dict[str, Any], parts: tuple[Any, Engine]) -> None:
    pipeline, engine = parts
    cache = engine.compress(DOCUMENT, policy="ada", base="keydiff", compression_ratio=0.5)
    with pytest.raises(PolicyUnsupported, match="keep different numbers of entries"):
        example["answers"](pipeline, engine, cache, QUESTIONS)
