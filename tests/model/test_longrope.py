"""A LongRoPE takes other frequencies for all of a sequence once it is long: no cache may be asked across that place."""

from __future__ import annotations

import pytest
import torch

from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from tests.model.test_rope import LONG, random_model

PLACE = LONG["original_max_position_embeddings"]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(random_model("llama", rope_parameters=LONG), None, name="long")


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 60, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain(engine: Engine, sequence: list[int]) -> torch.Tensor:
    """Logits of the last token `[vocabulary]`, without any cache."""
    with torch.no_grad():
        return engine.model(input_ids=torch.tensor([sequence])).logits[0, -1].log_softmax(-1)


def attached(engine: Engine, document: list[int], question: list[int]) -> torch.Tensor:
    cache = engine.compress(document, policy="full")
    with torch.no_grad(), engine.attached(cache) as past:
        return engine.model(input_ids=torch.tensor([question]), **{CACHE_ARGUMENT: past}).logits[0, -1].log_softmax(-1)


@pytest.mark.parametrize(("document", "question"), [(40, 24), (PLACE - 2, 2), (PLACE + 1, 10), (100, 30)])
def test_on_one_side_of_the_place_answers_are_the_models_own(engine: Engine, document: int, question: int) -> None:
    both = ids(document + question)
    own = plain(engine, both)
    assert torch.allclose(attached(engine, both[:document], both[document:]), own, atol=1e-4)


def test_a_question_that_reaches_across_it_is_refused(engine: Engine) -> None:
    cache = engine.compress(ids(60), policy="full")
    with pytest.raises(InvalidRequest, match="within the 64 tokens"):
        engine.answer(cache, ids(10, seed=1))
    with pytest.raises(InvalidRequest, match="LongRoPE rotates sequences of more than 64"):
        attached(engine, ids(60), ids(10, seed=1))


def test_an_answer_ends_at_it_and_is_the_models_own_up_to_there(engine: Engine) -> None:
    document, question = ids(50), ids(8, seed=1)
    answer = engine.answer(engine.compress(document, policy="full"), question, max_new_tokens=32)
    assert answer.finish_reason == "length"
    assert len(answer.token_ids) == PLACE - 58
    sequence = document + question
    for token in answer.token_ids:
        assert int(plain(engine, sequence).argmax()) == token
        sequence = [*sequence, token]


@pytest.mark.parametrize("tokens", [62, 40])
def test_passes_behind_a_document_must_not_reach_across_it(engine: Engine, tokens: int) -> None:
    with pytest.raises(PolicyUnsupported, match="LongRoPE"):
        engine.compress(ids(tokens), policy="kvzip", compression_ratio=0.5)
    assert engine.compress(ids(tokens), policy="keydiff", compression_ratio=0.5).num_tokens == tokens


def test_a_document_is_not_read_in_chunks_across_it(engine: Engine) -> None:
    chunked = {"policy": "lagkv", "lag": 8, "sink": 2, "prefill": "chunked", "compression_ratio": 0.5}
    with pytest.raises(PolicyUnsupported, match="LongRoPE"):
        engine.compress(ids(200), **chunked)
    assert engine.compress(ids(60), **chunked).num_tokens == 60
