"""An answer asked again of the full cache: whether it differs, how far, and what its cache is worth now."""

from __future__ import annotations

import math
import time

import pytest
import torch

from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.certify.recheck import MOST_TOKENS, Recheck, compared, joint_job
from kvshelf.engine.progress import nothing
from kvshelf.errors import DocumentTooLong, PolicyUnsupported
from kvshelf.samples.tasks import make_document
from tests.amounts import few


@pytest.fixture(scope="module")
def document():
    return make_document("multikey", "prose", 400, 3, lambda text: len(text.split()))


def recheck(engine, document, cache, *, question=0, checkpoint=nothing):
    """The check of a cache's answer to one of the document's questions."""
    prompt = document.questions[question].text
    answer = engine.answer(cache, prompt, max_new_tokens=16)
    query = engine.encode_query(cache, prompt)
    job = engine.prepare(document.text, policy="full")
    return Recheck(job, (cache,), tuple(query), tuple(answer.token_ids), 0.9).run(engine, checkpoint=checkpoint)


@pytest.mark.parametrize("codec", few(1, ["int8", "none", "klt"]))
def test_what_loses_nothing_answers_as_the_full_cache(tiny, document, codec):
    cache = tiny.encoded(tiny.compress(document.text, policy="full"), codec)
    for question in range(len(document.questions)):
        result = recheck(tiny, document, cache, question=question)
        assert (result.differs, result.quality) == (False, None)
        assert result.kl < (1e-5 if codec == "none" else 0.2)


@pytest.mark.slow
def test_an_answer_that_differs_has_its_cache_measured(tiny, document):
    """By the same figure as at its creation, of all cues."""
    cache = tiny.compress(document.text, policy="streaming_llm", compression_ratio=0.9)
    results = [recheck(tiny, document, cache, question=number) for number in range(len(document.questions))]
    differing = [result for result in results if result.differs]
    assert len(differing) > len(results) / 2
    job = tiny.prepare(document.text, policy="streaming_llm", compression_ratio=0.9)
    (made,) = tiny.run_levels([tiny.compressor.level(job)])
    for result in differing:
        assert result.kl > 0.5
        assert result.quality is not None
        assert result.quality.agreement == pytest.approx(made.quality.agreement, abs=0.15)  # of the first of its cues
        assert result.quality.high < 0.9


def test_only_the_first_tokens_of_a_long_answer_are_compared(tiny, document):
    cache = tiny.compress(document.text, policy="full")
    query = tiny.encode_query(cache, document.questions[0].text)
    answer = tiny.answer(cache, document.questions[0].text, max_new_tokens=16).token_ids
    job = tiny.prepare(document.text, policy="full")
    long = Recheck(job, (cache,), tuple(query), tuple(answer * 100)).run(tiny)
    assert long.tokens == MOST_TOKENS


def test_what_no_cue_can_measure_differs_all_the_same(tiny):
    """A document of a few words has no cues."""
    job = tiny.prepare("The access code of the amber falcon is 482913.", policy="full")
    right, wrong = (tiny.compress(f"The access code of the amber falcon is {code}.") for code in (482913, 175206))
    query = tiny.encode_query(right, "What is the access code of the amber falcon?")
    answer = tiny.answer(right, query).token_ids
    result = Recheck(job, (wrong,), tuple(query), tuple(answer)).run(tiny)
    assert (result.differs, result.quality) == (True, None)


def test_an_answer_of_several_caches_is_asked_again_of_one_prefill_in_their_order(tiny):
    """By hand: the model over both documents, without what its template writes before the second."""
    texts = ("The access code of the amber falcon is 482913.", "The badge number of the grey otter is 175206.")
    prompt = "What is the badge number of the grey otter?"
    caches, jobs = ([make(text, policy="full") for text in texts] for make in (tiny.compress, tiny.prepare))
    query, answer = tiny.encode_query(caches[0], prompt), tiny.answer(caches, prompt, max_new_tokens=8).token_ids
    whole, (first, second) = (
        joint_job(tiny, jobs, len(query) + len(answer)),
        [list(job.document.token_ids) for job in jobs],
    )
    assert list(whole.document.token_ids) == first + second[jobs[1].document.protected_prefix :]
    result = Recheck(whole, tuple(caches), tuple(query), tuple(answer)).run(tiny)
    said = torch.tensor([[*query, *answer[:-1]]])
    joined = tiny.joined([tiny.attach(cache) for cache in caches])
    with torch.no_grad(), tiny.attachments.passing(joined) as past:
        own = tiny.model(said, **{CACHE_ARGUMENT: past}).logits[0, -len(answer) :]
    with torch.no_grad():
        full = tiny.model(torch.tensor([[*whole.document.token_ids, *said[0].tolist()]])).logits[0, -len(answer) :]
    assert own.argmax(dim=-1).tolist() == answer
    differs, kl = compared(full.log_softmax(dim=-1), own.log_softmax(dim=-1))
    assert (result.tokens, result.differs, result.quality) == (len(answer), differs, None)
    assert result.kl == pytest.approx(kl, abs=1e-4)


def test_documents_that_are_too_long_together_have_no_one_prefill(tiny):
    jobs = [tiny.prepare([5] * (tiny.max_tokens * 2 // 3), policy="full") for _ in range(2)]
    with pytest.raises(DocumentTooLong):
        joint_job(tiny, jobs, 2)


def test_what_is_read_behind_documents_together_fits_the_model_s_longest_sequence(tiny):
    jobs = [tiny.prepare([5] * (tiny.max_tokens // 2 - 10), policy="full") for _ in range(2)]
    room = tiny.max_tokens - joint_job(tiny, jobs, 2).num_tokens
    joint_job(tiny, jobs, room)
    with pytest.raises(DocumentTooLong, match=f"and {room + 1} are read behind them"):
        joint_job(tiny, jobs, room + 1)


def logs(*rows):
    return torch.tensor(rows).log()


@pytest.mark.parametrize(
    ("full", "other", "differs"),
    [
        ((0.6, 0.3, 0.1), (0.4, 0.35, 0.25), False),
        ((0.6, 0.3, 0.1), (0.3, 0.6, 0.1), True),
        ((0.45, 0.35, 0.2), (0.3, 0.6, 0.1), False),  # the full cache is itself unsure
        ((0.6, 0.3, 0.1), (0.45, 0.45, 0.1), False),  # rounding decides
    ],
)
def test_an_answer_differs_where_the_full_cache_is_sure_of_another_token(full, other, differs):
    same = (0.8, 0.1, 0.1)
    told, kl = compared(logs(same, full), logs(same, other))
    assert told == differs
    by_hand = sum(p * math.log(p / q) for p, q in zip(full, other, strict=True)) / 2
    assert kl == pytest.approx(by_hand, abs=1e-6)


def test_a_divergence_is_a_number_whatever_the_logits():
    assert compared(logs((0.8, 0.2)), torch.full((1, 2), math.nan)) == (True, 100.0)
    assert compared(logs((0.8, 0.2)), logs((0.0, 1.0))) == (True, 100.0)
    same = logs((0.8, 0.2, 0.0))  # a token that the model never says
    assert compared(same, same) == (False, 0.0)


def test_a_full_cache_without_numbers_is_no_reference(tiny, document, monkeypatch):
    cache = tiny.compress(document.text, policy="full")
    monkeypatch.setattr(Recheck, "_predicted", lambda *_: torch.full((1, 2), math.nan))
    with pytest.raises(PolicyUnsupported, match="are not numbers"):
        recheck(tiny, document, cache)


def test_other_work_has_its_turn_between_the_passes_of_a_check(tiny, document):
    """Layers of the prefill, then two passes of the answer and parts of the cues of each cache: no unit is longer than
    the prefill."""
    cache = tiny.compress(document.text, policy="streaming_llm", compression_ratio=0.9)
    times = [time.thread_time()]
    result = recheck(tiny, document, cache, checkpoint=lambda: times.append(time.thread_time()))
    assert result.quality is not None
    assert len(times) > tiny.model.config.num_hidden_layers + 2 + 3
