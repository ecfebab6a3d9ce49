"""The smallest level that is good enough: found as by measuring all, and refused with reasons."""

from __future__ import annotations

import functools
import json
import pickle
import random

import pytest

from kvshelf.api import Tried
from kvshelf.engine.inputs.job import Level
from kvshelf.errors import Cancelled, DocumentTooShort, InvalidRequest, PolicyUnsupported, QualityBelowFloor
from kvshelf.samples.tasks import make_document
from kvshelf.workers.replica.create.auto import MIN_QUALITY, PolicyChoice, SizeTarget, auto, candidates
from kvshelf.workers.replica.create.publish import comparable
from tests.amounts import SOAK
from tests.qualities import quality_of


@pytest.fixture(scope="module")
def prose(tiny):
    return make_document("multikey", "prose", 1000, 1, tiny.text.count_tokens).text


@pytest.fixture(scope="module")
def everything(tiny, prose):
    """Every candidate made and measured: (level, compression)."""
    levels = auto(tiny, prose).levels
    return list(zip(levels, tiny.run_levels(levels), strict=True))


@pytest.fixture(scope="module")
def chosen(tiny, prose):
    """What is chosen under a floor; each run of all candidates takes seconds."""

    @functools.cache
    def of(floor):
        return auto(tiny, prose, target=SizeTarget(floor)).run(tiny)

    return of


@pytest.mark.slow
@pytest.mark.parametrize("min_quality", [0.9, MIN_QUALITY, 1.0, *([0.8] if SOAK else [])])
def test_it_is_the_smallest_of_all_that_are_good_enough(everything, chosen, min_quality):
    good = [
        (made.cache.pack().nbytes, level)
        for level, made in everything
        if level.keeps_all or made.quality.low >= min_quality
    ]
    least = min(nbytes for nbytes, _ in good)
    choice = chosen(min_quality)
    assert choice.compression.cache.pack().nbytes == least
    assert choice.level.keeps_all or choice.compression.quality.low >= min_quality
    assert choice.compression.cache.identity == choice.level.identity
    assert choice.compression.cache.codec == choice.level.codec


@pytest.mark.slow
def test_floors_differ_so_choices_do(chosen):
    """Otherwise the test above shows nothing."""
    sizes = [chosen(floor).compression.cache.pack().nbytes for floor in (0.0, 1.0)]
    assert sizes[0] < sizes[1]


def test_the_usual_floor(tiny, prose):
    assert auto(tiny, prose).target == SizeTarget(MIN_QUALITY)


@pytest.mark.slow
def test_it_says_what_it_tried(everything, chosen):
    choice = chosen(MIN_QUALITY)
    told = [one.model_dump(mode="json") for one in choice.tried]
    assert [(one["policy"], one["compression_ratio"] or None, one["codec"]) for one in told] == list(candidates(True))
    for one, (_, made) in zip(told, everything, strict=True):
        assert (one["quality"] is None) == (one["reason"] is not None)
        if one["quality"] is not None:
            assert one["bytes"] == made.cache.pack().nbytes
            if one["quality"]["reason"] is None:
                assert one["quality"]["agreement"] == made.quality.agreement
                assert one["quality"]["kl"] == pytest.approx(made.quality.kl, abs=1e-6)
            else:  # asked no further: out of reach of the floor
                assert one["quality"]["cues"] < made.quality.cues
                assert one["quality"]["high"] < MIN_QUALITY
                assert made.quality.low < MIN_QUALITY
    kept = [one for one in told if one["quality"] and one["bytes"] == choice.compression.cache.pack().nbytes]
    assert len(kept) == 1
    smaller = [one for one in told if one["bytes"] and one["bytes"] < kept[0]["bytes"]]
    assert all(one["quality"]["low"] < MIN_QUALITY for one in smaller)


def test_what_could_not_be_smaller_is_not_made(chosen):
    """With no floor the smallest of the first prefill is kept, and the dear one is not run at all."""
    choice = chosen(0.0)
    assert (choice.level.job.policy.name, choice.level.job.budget.compression_ratio) == ("keydiff", 0.9375)
    assert [one.quality is not None for one in choice.tried].count(True) == 1
    dear = [one for one in choice.tried if one.policy in ("kvzip", "kvcues")]
    assert [one.bytes for one in dear] == [None] * 6
    assert all("not made" in one.reason for one in dear)


def test_a_floor_that_nothing_meets_is_refused_with_what_was_tried(tiny, prose):
    levels = tuple(Level(tiny.prepare(prose, compression_ratio=ratio)) for ratio in (0.9, 0.95))
    with pytest.raises(QualityBelowFloor, match=r"'keydiff' at 0\.9.* with 0\.") as refused:
        PolicyChoice(levels, SizeTarget(0.97)).run(tiny)
    assert refused.value.param == "min_quality"
    assert refused.value.status == 422
    tried = json.loads(json.dumps(refused.value.details["tried"]))
    assert [one["compression_ratio"] for one in tried] == [0.9, 0.95]
    assert all(one["quality"]["low"] < 0.97 for one in tried)
    assert pickle.loads(pickle.dumps(refused.value)).details == refused.value.details


def test_of_given_levels_the_smallest_good_one_is_kept(tiny, prose):
    levels = tuple(Level(tiny.prepare(prose, compression_ratio=ratio), "int8") for ratio in (0.0, 0.5, 0.95))
    alone = [made.quality.low for made in tiny.run_levels(levels)]
    assert alone[0] > alone[2]
    choice = PolicyChoice(levels, SizeTarget(alone[0])).run(tiny)
    assert choice.level is levels[max(index for index, low in enumerate(alone) if low >= alone[0])]
    assert PolicyChoice(levels, SizeTarget(0.0)).run(tiny).level is levels[2]
    assert [one.compression_ratio for one in choice.tried] == [0.0, 0.5, 0.95]


def test_where_nothing_can_be_measured_the_full_cache_is_kept(tiny):
    choice = auto(tiny, "The gate is 48.").run(tiny)
    assert (choice.level.job.policy.name, choice.level.codec) == ("full", "none")
    assert choice.compression.quality is None
    assert len(choice.tried) == len(candidates(True))
    assert all(one.reason for one in choice.tried)


def test_where_nothing_can_be_measured_a_floor_is_refused(tiny, prose):
    job = tiny.prepare(prose, policy="lagkv", policy_params={"prefill": "chunked"})
    with pytest.raises(PolicyUnsupported, match="no quality can be measured") as refused:
        PolicyChoice((Level(job),), SizeTarget(0.5)).run(tiny)
    assert refused.value.param == "min_quality"


def test_a_candidate_that_refuses_the_document_is_named(tiny):
    """kvzip runs the document twice: a very long one leaves it no room."""
    ids = [5, 6, 7, 8] * 4_075
    selection = auto(tiny, ids)
    assert {one.policy for one in selection.refused} == {"kvzip", "kvcues"}
    assert all("16384 tokens" in one.reason for one in selection.refused)
    assert len(selection.levels) + len(selection.refused) == len(candidates(True))


@pytest.fixture(scope="module")
def tried(everything):
    """What came of each candidate, all of them made and measured."""
    ways = ((level, made.cache.pack().nbytes, made.quality) for level, made in everything)
    return [
        Tried(
            policy=level.job.identity.policy,
            compression_ratio=level.job.identity.compression_ratio,
            codec=level.codec,
            bytes=nbytes,
            quality=quality,
        )
        for level, nbytes, quality in ways
    ]


@pytest.mark.slow
@pytest.mark.parametrize("floor", [0.0, 0.4, 0.8, MIN_QUALITY, 1.0])
def test_what_is_known_says_what_would_be_chosen_or_nothing(everything, tried, floor):
    """Of any part of the facts: a choice only if nothing that was left out could be good enough and smaller."""
    levels = [level for level, _ in everything]
    selection = PolicyChoice(tuple(levels), SizeTarget(floor))
    good = {one.bytes: level for one, level in zip(tried, levels, strict=True) if selection.target.met(level, one)}
    assert selection.known(tried) is good[min(good)]
    answers, chance = 0, random.Random(7)
    for _ in range(200):
        told = [chance.choice([*[one] * 30, one.model_copy(update={"quality": None}), None]) for one in tried]
        level = selection.known(told)
        if level is None:
            continue
        answers += 1
        nbytes = next(nbytes for nbytes, one in good.items() if one is level)
        missed = [one for size, one in good.items() if size < nbytes]
        # Heads share a budget unevenly, and their last entries are not encoded: of equal counts one may take less.
        assert all(one.codec == level.codec and one.job.budget.tokens >= level.job.budget.tokens for one in missed)
    assert 0 < answers < 200


@pytest.mark.slow
@pytest.mark.parametrize("floor", [0.0, 0.9, MIN_QUALITY])
def test_what_one_choice_has_tried_makes_the_same_choice_again(tiny, prose, chosen, floor):
    selection, choice = auto(tiny, prose, target=SizeTarget(floor)), chosen(floor)
    told = [Tried.model_validate_json(one.model_dump_json()) for one in choice.tried]
    known = selection.known(told)
    assert known in selection.levels
    assert (known.job.identity, known.codec) == (choice.level.job.identity, choice.level.codec)
    assert selection.known([None] * len(told)) is None


def test_that_nothing_is_good_enough_can_be_known_too(tiny, prose):
    levels = tuple(Level(tiny.prepare(prose, compression_ratio=ratio)) for ratio in (0.9, 0.95))
    quality = quality_of(0.5)
    told = [
        Tried(policy="keydiff", compression_ratio=ratio, codec="none", bytes=nbytes, quality=quality)
        for ratio, nbytes in ((0.9, 20), (0.95, 10))
    ]
    with pytest.raises(QualityBelowFloor, match=r"'keydiff' at 0\.9.* with 0\.5") as refused:
        PolicyChoice(levels, SizeTarget(0.6)).known(told)
    assert [one["bytes"] for one in refused.value.details["tried"]] == [20, 10]
    assert PolicyChoice(levels, SizeTarget(0.4)).known(told) is levels[1]
    assert PolicyChoice(levels, SizeTarget(0.4)).known([told[0], None]) is None
    old = told[1].model_copy(update={"quality": quality.model_copy(update={"version": 0})})
    assert (comparable(old).quality, comparable(told[1])) == (None, told[1])


@pytest.mark.parametrize("floor", [-0.1, 1.1, float("nan"), True])
def test_a_floor_that_is_no_share_is_refused(tiny, prose, floor):
    with pytest.raises(InvalidRequest) as refused:
        auto(tiny, prose, target=SizeTarget(floor))
    assert refused.value.param == "min_quality"


def test_what_is_wrong_with_the_document_is_said(tiny):
    with pytest.raises(DocumentTooShort):
        auto(tiny, [])


def test_a_caller_who_went_away_ends_it(tiny, prose):
    def gone():
        raise Cancelled("gone")

    with pytest.raises(Cancelled):
        auto(tiny, prose).run(tiny, checkpoint=gone)
