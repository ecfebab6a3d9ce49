"""What fails in one row of a batch is that row's alone: its neighbours say what they say without it, and say it once.

Each test runs where all rows share a forward, and where every row has its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import decoders
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from kvshelf.api.answers import Answer
from kvshelf.api.options import Ask
from kvshelf.artifact import blob
from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.opened.arriving import ArrivingCache
from kvshelf.engine.attention.attachment import Attachment
from kvshelf.engine.decode.batch import DecodeBatch
from kvshelf.engine.decode.generation import Generation, Sampling
from kvshelf.engine.engine import Engine
from kvshelf.errors import BlobError, Cancelled, DeadlineExceeded, InternalError
from kvshelf.workers.replica.calls import named_errors
from kvshelf.workers.replica.queues import AnswerOrder
from kvshelf.workers.replica.scheduler import Scheduler
from kvshelf.workers.replica.ticket import Ticket
from tests.byte_fallback import WORDS, byte_fallback_tokenizer

WAIT_S = 60.0
GREEDY = Sampling(12)
DRAWN = Sampling(12, Ask(temperature=2.0, seed=3))
DOCUMENT = list(range(3, 120))
QUESTIONS = ([270, 271], [272, 280, 281], [290], [275, 276], [299, 264])


@pytest.fixture(scope="module", params=["default", "dynamic"], ids=["one forward", "one by one"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """A random model of 2 layers, whose likeliest tokens are words. A RoPE that depends on the longest position of a
    call asks for a forward per row."""
    tokenizer = byte_fallback_tokenizer()
    rope = {"rope_type": request.param, "rope_theta": 1e4, "factor": 2.0}
    config = AutoConfig.for_model(
        "llama", hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=1024,
        initializer_range=0.5, bos_token_id=None, eos_token_id=None, rope_parameters=rope,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.lm_head.weight[: -len(WORDS)] = 0
    return Engine(model, PreTrainedTokenizerFast(tokenizer_object=tokenizer))


@pytest.fixture(scope="module")
def cache(engine: Engine) -> CompressedCache:
    return engine.compress(DOCUMENT, policy="full")


class Asked:
    """A question handed to a scheduler, and what came of it."""

    def __init__(
        self, scheduler: Scheduler, cache: CompressedCache | Attachment, query: Sequence[int],
        sampling: Sampling = GREEDY, deadline_s: float | None = None,
    ) -> None:  # fmt: skip
        self.pieces: list[str] = []
        self.ticket: Ticket[Answer] = scheduler.generate(
            cache, query, sampling, order=AnswerOrder(on_text=self.pieces.append, deadline_s=deadline_s)
        )

    def answer(self) -> Answer:
        """What a replica would reply; what was streamed is its text."""
        with named_errors():
            answer = self.ticket.future.result(WAIT_S)
        assert "".join(self.pieces) == answer.text
        return answer


@contextmanager
def together(engine: Engine) -> Iterator[Scheduler]:
    """A scheduler whose thread takes what is handed over inside the block in one step."""
    scheduler = Scheduler(engine)
    scheduler.start()
    try:
        with scheduler._queues.changed:
            yield scheduler
    finally:
        scheduler.stop(drain_s=WAIT_S)


def advance(batch: DecodeBatch, generation: Generation) -> None:
    (told,) = batch.step([generation])
    if isinstance(told, Exception):
        raise told


def alone(engine: Engine, cache: CompressedCache, query: Sequence[int], sampling: Sampling = GREEDY) -> Answer:
    """The answer without neighbours, and without a scheduler."""
    batch, generation = engine.batch(), engine.start(cache, query, sampling)
    while not generation.finished:
        advance(batch, generation)
    return generation.answer()


def test_answers_of_any_bytes_are_whole_and_end_no_other(engine: Engine, cache: CompressedCache) -> None:
    """Drawn from nearly all tokens alike, most of them bytes: the tokenizer's stream itself raises in most rows."""
    samplings = [Sampling(40, Ask(temperature=20.0, seed=seed)) for seed in range(6)]
    with together(engine) as scheduler:
        asked = [Asked(scheduler, cache, QUESTIONS[0], sampling) for sampling in samplings]
    answers = [each.answer() for each in asked]
    assert answers == [alone(engine, cache, QUESTIONS[0], sampling) for sampling in samplings]
    assert all(len(answer.token_ids) == 40 and "\ufffd" in answer.text for answer in answers)


class Refusing:
    """A decoder, as Python code may be one, that fails on one token and so on any text with it."""

    def __init__(self) -> None:
        self.refused = ""

    def decode_chain(self, tokens: list[str]) -> list[str]:
        if self.refused in tokens:
            raise ValueError(f"{self.refused} cannot be shown")
        return [f"{token} " for token in tokens]


@pytest.fixture
def refuse(engine: Engine) -> Iterator[Callable[[int], None]]:
    """Call it with the token that no answer may have from now on."""
    assert engine.text is not None
    tokenizer, custom = engine.text.decoder(), Refusing()
    kept = tokenizer.decoder
    tokenizer.decoder = decoders.Decoder.custom(custom)  # type: ignore[attr-defined]
    yield lambda token: setattr(custom, "refused", tokenizer.id_to_token(token))
    tokenizer.decoder = kept


@pytest.mark.parametrize(("bad", "sampling"), [(0, GREEDY), (1, DRAWN), (2, GREEDY)], ids=["0", "1 drawn", "2"])
def test_a_token_that_cannot_be_taken_ends_its_own_row(
    engine: Engine, cache: CompressedCache, refuse: Callable[[int], None], sampling: Sampling, bad: int
) -> None:
    questions = QUESTIONS[:3]
    expected = [alone(engine, cache, question, sampling) for question in questions]
    ids = expected[bad].token_ids
    free = {ids[0]}.union(*(answer.token_ids for answer in expected[:bad] + expected[bad + 1 :]))
    at = next(i for i, token in enumerate(ids) if token not in free)
    refuse(ids[at])
    with together(engine) as scheduler:
        asked = [Asked(scheduler, cache, question, sampling) for question in questions]
    with pytest.raises(InternalError, match="unexpectedly"):
        asked[bad].answer()
    assert engine.text is not None
    assert "".join(asked[bad].pieces) == engine.text.decoder().decode(ids[:at])
    assert [each.answer() for i, each in enumerate(asked) if i != bad] == expected[:bad] + expected[bad + 1 :]
    assert scheduler.batch.nbytes == 0


def test_an_answer_that_had_an_error_is_never_whole_and_goes_on_no_further(
    engine: Engine, cache: CompressedCache, refuse: Callable[[int], None]
) -> None:
    """Also where the token would have been its last one."""
    expected = alone(engine, cache, QUESTIONS[0])
    refuse(expected.token_ids[0])
    batch, generation = engine.batch(), engine.start(cache, QUESTIONS[0], Sampling(1))
    for error in ("cannot be shown", "is over"):
        with pytest.raises(Exception, match=error):
            advance(batch, generation)
        assert not generation.finished
        with pytest.raises(AssertionError):
            generation.answer()


def corrupt(engine: Engine, cache: CompressedCache, path: Path) -> Attachment:
    """The cache as it arrives from a file of which one byte, of its last layer, is another one."""
    data = bytearray(cache.to_bytes())
    data[-50] ^= 1
    path.write_bytes(data)
    with FileIO(path) as file:
        arriving = ArrivingCache(blob.open_file(file, len(data)), file, nullcontext)
        arriving.read()
    return engine.attach(arriving)


@pytest.mark.parametrize("bad", range(3))
def test_a_document_that_is_corrupt_ends_its_own_row(
    engine: Engine, cache: CompressedCache, tmp_path: Path, bad: int
) -> None:
    documents: list[CompressedCache | Attachment] = [cache, cache]
    documents.insert(bad, corrupt(engine, cache, tmp_path / "corrupt"))
    with together(engine) as scheduler:
        asked = [Asked(scheduler, *each) for each in zip(documents, QUESTIONS, strict=False)]
    with pytest.raises(BlobError):
        asked[bad].answer()
    assert asked[bad].pieces == []
    for i in {0, 1, 2} - {bad}:
        assert asked[i].answer() == alone(engine, cache, QUESTIONS[i])
    assert scheduler.batch.nbytes == 0


def test_a_corrupt_document_that_joins_late_takes_no_piece_of_the_others(
    engine: Engine, cache: CompressedCache, tmp_path: Path
) -> None:
    document, late = corrupt(engine, cache, tmp_path / "corrupt"), []
    scheduler = Scheduler(engine)
    scheduler.start()
    pieces: list[str] = []

    def on_text(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            late.append(scheduler.generate(document, QUESTIONS[1], GREEDY))

    try:
        answer = scheduler.generate(
            cache, QUESTIONS[0], Sampling(60), order=AnswerOrder(on_text=on_text)
        ).future.result(WAIT_S)
        with pytest.raises(BlobError):
            late[0].future.result(WAIT_S)
    finally:
        scheduler.stop()
    assert "".join(pieces) == answer.text
    assert answer == alone(engine, cache, QUESTIONS[0], Sampling(60))


def test_who_leaves_inside_a_step_is_told_why_he_himself_left(engine: Engine, cache: CompressedCache) -> None:
    """One is cancelled and one is late while the model computes: the step is nobody's any more."""
    asked: list[Asked] = []

    def leave(*_: Any) -> None:
        asked[1].ticket.cancel()
        time.sleep(0.3)

    handle = engine.model.model.layers[0].register_forward_hook(leave)
    try:
        with together(engine) as scheduler:
            asked += [Asked(scheduler, cache, QUESTIONS[0], deadline_s=0.25), Asked(scheduler, cache, QUESTIONS[1])]
        with pytest.raises(DeadlineExceeded):
            asked[0].answer()
        with pytest.raises(Cancelled):
            asked[1].answer()
    finally:
        handle.remove()


def test_logits_that_cannot_be_read_leave_every_answer_as_it_was(engine: Engine, cache: CompressedCache) -> None:
    """As a fault of the device does, which shows where its result is first looked at."""
    batch = engine.batch()
    rows = [engine.start(cache, question, GREEDY) for question in QUESTIONS[:3]]
    batch.step(rows)
    handle = engine.model.lm_head.register_forward_hook(lambda *call: call[2].to(torch.complex64))
    try:
        told = batch.step(rows)
    except RuntimeError as exc:
        told = [exc] * 3
    finally:
        handle.remove()
    assert all(isinstance(each, RuntimeError) for each in told)
    for _ in range(GREEDY.max_tokens - 1):
        assert all(isinstance(each, str) for each in batch.step(rows))
    assert [row.answer() for row in rows] == [alone(engine, cache, question) for question in QUESTIONS[:3]]
