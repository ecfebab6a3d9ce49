"""The prompt that is shown is the one that a question builds."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from kvshelf.engine.decode.shown import built_prompt
from kvshelf.errors import StateConflict

DOCUMENT = "The code of the red gate is 4711. It is said by <|end|> nobody."
QUESTION = "Which code has größe 日本?"


@pytest.mark.parametrize("layout", ["chat", "plain"])
def test_the_parts_are_the_tokens_that_the_model_reads(tiny: Any, layout: Any) -> None:
    cache = tiny.compress(DOCUMENT, layout=layout, policy="full")
    shown = tiny.prompt(cache, QUESTION, DOCUMENT)
    document, behind = tiny.encode_document(DOCUMENT, layout=layout).token_ids, tiny.encode_query(cache, QUESTION)
    assert list(chain.from_iterable(part.token_ids for part in shown.parts)) == document + behind
    assert sum(part.num_tokens for part in shown.parts if part.from_shelf) == len(document)
    texts = {(part.part, part.from_shelf): "".join(part.texts) for part in shown.parts}
    assert texts["document", True] == DOCUMENT
    assert QUESTION in texts["question", False]
    assert len(texts["question", False]) <= len(QUESTION) + 2, "what the template writes around it is apart"
    assert all(len(part.texts) == len(part.token_ids) == part.num_tokens for part in shown.parts)


def test_without_its_text_a_document_is_counted(tiny: Any) -> None:
    cache = tiny.compress(DOCUMENT, policy="knorm", compression_ratio=0.5)
    template, document = tiny.prompt(cache, QUESTION).parts[:2]
    assert (template.part, document.part, document.texts) == ("template", "document", [])
    assert template.num_tokens + document.num_tokens == cache.num_tokens
    with pytest.raises(StateConflict, match="another document"):
        tiny.prompt(cache, QUESTION, DOCUMENT + "!")


def test_earlier_turns_may_be_on_the_shelf(tiny: Any) -> None:
    cache = tiny.compress(DOCUMENT, policy="full")
    said = ["First?", "An answer.", "Second?"]
    turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), said, strict=True)]
    ids = tiny.encode_query(cache, turns)
    shown = built_prompt(tiny.text, cache.identity, None, ids, said, read=len(ids) - 6)
    assert sum(part.num_tokens for part in shown.parts if not part.from_shelf) == 6
    told = "".join(chain.from_iterable(part.texts for part in shown.parts if part.part == "question"))
    assert told == "".join(said)
