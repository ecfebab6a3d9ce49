"""Answering step by step: what is run, what is returned when, and how the next token is chosen."""

from __future__ import annotations

import pytest

from kvshelf.api.options import Ask
from kvshelf.engine.decode.generation import Sampling, _TextStream
from kvshelf.engine.options import AnswerOptions
from kvshelf.errors import Cancelled, InvalidRequest

DOCUMENT = "The gate code is 482913. " * 40


@pytest.fixture(scope="module")
def cache(tiny):
    return tiny.compress(DOCUMENT, policy="keydiff", compression_ratio=0.5)


@pytest.fixture
def by_modules(tiny, monkeypatch):
    """The model runs by its modules, whose hooks are called and between whose layers a step can end."""
    monkeypatch.setitem(tiny.passes.__dict__, "program", None)


@pytest.mark.usefixtures("by_modules")
def test_only_the_question_runs_through_the_model(tiny, cache):
    """Counted from outside: every row that enters the model's embedding."""
    counted = []
    handle = tiny.model.get_input_embeddings().register_forward_hook(
        lambda _, args, __: counted.append(args[0].numel())
    )
    try:
        answer = tiny.answer(cache, "What is the gate code?", max_new_tokens=5, stop=["\x00"])
    finally:
        handle.remove()
    question = tiny.encode_query(cache, "What is the gate code?")
    assert counted[0] == len(question) == answer.usage.prefill_tokens
    assert counted[1:] == [1] * (answer.usage.completion_tokens - 1)
    assert answer.usage.cache_read_tokens == cache.num_tokens > len(question)


def test_steps_add_up_to_the_answer(tiny, cache):
    generation = tiny.start(cache, tiny.encode_query(cache, "What is the gate code?"), Sampling(max_tokens=20))
    batch, pieces = tiny.batch(), []
    while not generation.finished:
        pieces += batch.step([generation])
    answer = generation.answer()
    assert "".join(pieces) == answer.text
    assert len(answer.token_ids) == answer.usage.completion_tokens <= 20


def test_the_length_limit_ends_an_answer(tiny, cache):
    answer = tiny.answer(cache, tiny.text.question("text", "The gate"), max_new_tokens=1)
    assert (answer.finish_reason, answer.usage.completion_tokens) == ("length", 1)


def test_the_models_longest_sequence_ends_an_answer(tiny, monkeypatch, cache):
    question = tiny.encode_query(cache, "What is the gate code?")
    monkeypatch.setattr(tiny.facts, "max_tokens", cache.num_tokens + len(question) + 2)
    answer = tiny.answer(cache, question, max_new_tokens=100, temperature=5.0, seed=1)
    assert answer.usage.completion_tokens <= 2
    monkeypatch.setattr(tiny.facts, "max_tokens", cache.num_tokens + len(question))
    with pytest.raises(InvalidRequest, match="no room"):
        tiny.start(cache, question)


def test_greedy_answers_are_the_same_every_time(tiny, cache):
    answers = {tiny.answer(cache, "What is the gate code?").text for _ in range(3)}
    assert len(answers) == 1


def test_a_seed_repeats_a_sampled_answer_and_seeds_differ(tiny, cache):
    """At temperature 3 two answers of 24 tokens are equal by luck less often than once in 10^9."""
    ask = lambda seed: tiny.answer(cache, "Tell me.", temperature=3.0, seed=seed, max_new_tokens=24).token_ids  # noqa: E731
    assert ask(7) == ask(7)
    assert len({tuple(ask(seed)) for seed in range(4)}) == 4
    assert ask(None) != ask(None)


class Scripted:
    """Feeds a fixed text to a `_TextStream`, one token a time, as a model would."""

    def __init__(self, tiny, text):
        self.decoder = tiny.text.decoder()
        self.ids = self.decoder.encode(text, add_special_tokens=False).ids

    def run(self, stop=()):
        stream, pieces = _TextStream(self.decoder, stop), []
        for token in self.ids:
            pieces.append(stream.push(token))
            if stream.stopped:
                break
        pieces.append(stream.flush())
        assert "".join(pieces) == stream.text
        return stream, pieces


def test_characters_of_several_tokens_come_whole(tiny):
    text = "naïve 日本語 🙂 end"
    stream, pieces = Scripted(tiny, text).run()
    assert stream.text == text
    assert all("�" not in piece for piece in pieces)


@pytest.mark.parametrize("stop", ["code", "gate code is", "s 48", "913"])
def test_a_stop_text_ends_the_answer_before_itself(tiny, stop):
    text = "The gate code is 482913. And more."
    stream, pieces = Scripted(tiny, text).run([stop, "never"])
    assert stream.stopped == stop
    assert stream.text == text[: text.index(stop)]
    assert all(stop not in "".join(pieces[:i]) for i in range(len(pieces)))


def test_what_may_become_a_stop_text_is_held_back_and_released(tiny):
    stream, pieces = Scripted(tiny, "one two three").run(["two tree"])
    assert not stream.stopped
    assert stream.text == "one two three"
    seen = ""
    for piece in pieces[:-1]:
        seen += piece
        assert not seen.endswith("two t")


@pytest.mark.parametrize("stop", [(), ("two tree",), ("日本",), ("wo",)])
def test_a_token_is_told_with_the_last_of_its_text(tiny, stop):
    scripted = Scripted(tiny, "one two three 日本語 🙂 four")
    stream, told = _TextStream(scripted.decoder, stop), 0
    for count in range(1, len(scripted.ids) + 1):
        stream.push(scripted.ids[count - 1])
        assert told <= stream.tokens <= count
        told = stream.tokens
        assert stream.text.startswith(whole := scripted.decoder.decode(scripted.ids[:told]))
        assert stream.stopped or "\ufffd" not in whole, "no token in the middle of a character"
        next_text = scripted.decoder.decode(scripted.ids[: told + 1])
        assert told == count or "\ufffd" in next_text or not stream.text.startswith(next_text)
        if stream.stopped:
            return
    stream.flush()
    assert stream.tokens == len(scripted.ids)


def test_pieces_have_the_logprobs_of_their_tokens(tiny, cache):
    question = tiny.encode_query(cache, "What is the gate code?")
    whole = tiny.answer(cache, question, max_new_tokens=12)
    stop = whole.text[-3:]
    row = tiny.start(cache, question, Sampling(12, Ask(stop=[stop, whole.text[2:5] + "\x00"]), logprobs=0))
    batch, pieces = tiny.batch(), []
    while not row.finished:
        pieces += filter(None, batch.step([row]))
    answer = row.answer()
    assert answer.stop == stop
    told = [each for piece in pieces for each in piece.logprobs]
    assert len(pieces) > 2
    assert "".join(pieces) == answer.text
    assert list(answer.logprobs[: len(told)]) == told
    assert answer.text.startswith("".join(each.token for each in told))
    assert len("".join(each.token for each in answer.logprobs[: len(told) + 1])) > len(answer.text)


def test_an_answer_that_ends_within_a_character_shows_that_it_does(tiny):
    """So its text is what the tokenizer makes of its tokens; and that may be a stop text, too."""
    scripted = Scripted(tiny, "one two 日")
    scripted.ids = scripted.ids[:-1]
    stream, pieces = scripted.run()
    assert stream.text == scripted.decoder.decode(scripted.ids)
    assert pieces[-1] == "\ufffd"
    assert not stream.stopped
    stream, _ = scripted.run(["o \ufffd"])
    assert stream.stopped == "o \ufffd"
    assert stream.text == "one tw"


def test_stop_texts_in_a_real_answer(tiny, cache):
    whole = tiny.answer(cache, "What is the gate code?", max_new_tokens=12)
    assert len(whole.text) > 1
    cut = tiny.answer(cache, "What is the gate code?", max_new_tokens=12, stop=[whole.text[1:3]])
    assert cut.text == whole.text[:1]
    assert cut.finish_reason == "stop"


@pytest.mark.parametrize(
    "bad", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"stop": ("",)}], ids=str
)
def test_bad_sampling_is_refused_by_name(bad):
    with pytest.raises(InvalidRequest, match=next(iter(bad)).replace("max_new", "max")):
        AnswerOptions.of(**bad)


def test_an_option_that_does_not_exist_is_refused_as_by_a_call(tiny, cache):
    with pytest.raises(TypeError, match="unexpected keyword argument 'top_k'"):
        tiny.answer(cache, "Tell me.", top_k=5)


@pytest.mark.usefixtures("by_modules")
def test_an_answer_can_be_abandoned_between_layers(tiny, cache):
    calls = []

    def gone():
        calls.append(1)
        if len(calls) == 2:
            raise Cancelled("the client hung up")

    generation = tiny.start(cache, tiny.encode_query(cache, "What is the gate code?"))
    with pytest.raises(Cancelled):
        tiny.batch().step([generation], gone)
    assert len(calls) == 2 <= tiny.model.config.num_hidden_layers


def test_an_empty_question_is_refused(tiny, cache):
    for question in ("", [], ()):
        with pytest.raises(InvalidRequest, match="empty"):
            tiny.start(cache, tiny.encode_query(cache, question))
