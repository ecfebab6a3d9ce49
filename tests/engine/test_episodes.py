"""Episodes of a conversation, their caches, and the router."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.engine import Engine
from kvshelf.engine.episodes import UTTERANCES, WINDOWS, kmeans, windows_of
from kvshelf.errors import InvalidRequest
from kvshelf.methods.policies.base import MAX_PROBE_BYTES
from kvshelf.methods.policies.centroids import MAX_CENTROID, packed, unpacked
from kvshelf_bench.quality.retrieval import counter
from scripts.conversations import make_conversation

TOPICS = 4


@pytest.fixture(scope="module")
def talk(tiny: Engine):
    return make_conversation(TOPICS, 1500, 1, counter(tiny))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(6, 30), st.booleans())
def test_k_means_is_a_fixed_point_without_empty_clusters(seed, count, points, twice):
    """Each point is nearest to the mean of its own cluster. Equal points must not empty a cluster."""
    found = np.random.default_rng(seed).normal(size=(points, 3))
    if twice:
        found = np.repeat(found[: max(count, points // 2)], 2, axis=0)
    clusters = kmeans(found, count)
    assert sorted(point for members in clusters.members for point in members) == list(range(len(found)))
    firsts = [min(members) for members in clusters.members]
    assert firsts == sorted(firsts)
    for label, members in enumerate(clusters.members):
        np.testing.assert_allclose(clusters.centroids[label], found[list(members)].mean(axis=0), atol=1e-9)
        distances = ((found[:, None] - clusters.centroids) ** 2).sum(axis=2)
        for point in members:
            assert distances[point, label] <= distances[point].min() + 1e-9
        own = [distances[point, label] for point in members]
        assert own == sorted(own)
    assert repr(kmeans(found, count)) == repr(clusters)


def test_equal_points_make_clusters_too():
    """Windows of different tokens may be one point, as tokens share channels."""
    clusters = kmeans(np.ones((5, 3)), 4)
    assert sorted(map(len, clusters.members)) == [1, 1, 1, 2]


def test_k_means_finds_groups_that_are_apart():
    centers = np.array([[0.0, 0], [9, 0], [0, 9], [9, 9]])
    points = np.concatenate([centers + np.random.default_rng(n).normal(scale=0.5, size=(4, 2)) for n in range(8)])
    assert sorted(kmeans(points, 4).members[0]) == list(range(0, 32, 4))


def test_an_episode_is_its_nearest_windows_in_time_order(tiny, talk):
    windows = windows_of(talk.utterances)
    found = tiny.compressor.episodes(talk.text, TOPICS)
    assert sorted(window for each in found for window in each.windows) == list(range(len(windows)))
    for each in found:
        assert each.text == "\n\n".join(windows[window] for window in sorted(each.windows[:WINDOWS]))
    messages = [{"role": "user", "content": utterance} for utterance in talk.utterances]
    assert tiny.compressor.episodes(messages, TOPICS) == found


def test_the_router_finds_the_episode_of_each_of_its_windows(tiny, talk):
    windows, found = windows_of(talk.utterances), tiny.compressor.episodes(talk.text, TOPICS)
    params = [{"centroid": each.centroid} for each in found]
    for number, each in enumerate(found):
        for window in each.windows[:WINDOWS]:
            assert tiny.asker.nearest(params, windows[window]) == number
            ids = tiny.text.encode(windows[window])
            assert tiny.asker.nearest(params, ids) == number
            assert tiny.asker.nearest(params, [{"role": "user", "content": windows[window]}]) == number
    assert tiny.asker.nearest(params, "?") == 0  # nothing in common with any


def test_the_router_finds_the_episode_that_holds_the_fact(tiny):
    """A draw among four would be right for a quarter."""
    hits = []
    for seed in range(3):
        talk = make_conversation(TOPICS, 1500, seed, counter(tiny))
        found = tiny.compressor.episodes(talk.text, TOPICS)
        params = [{"centroid": each.centroid} for each in found]
        nearest = partial(tiny.asker.nearest, params)
        hits += [at // UTTERANCES in found[nearest(asked.text)].windows for at, asked in talk.questions]
    assert sum(hits) > 0.8 * len(hits)


@pytest.mark.slow
def test_one_cache_of_the_whole_document_for_each_episode(tiny, talk):
    caches = tiny.episodes(talk.text, TOPICS, compression_ratio=0.8, chunk=256)
    found = tiny.compressor.episodes(talk.text, TOPICS)
    assert [cache.to_bytes() for cache in caches] == [
        cache.to_bytes() for cache in tiny.episodes(talk.text, TOPICS, compression_ratio=0.8, chunk=256)
    ]
    assert len({cache.identity.content() for cache in caches}) == TOPICS
    for cache, each in zip(caches, found, strict=True):
        assert (cache.identity.policy, cache.identity.prefill) == ("epicache", "chunked:chunk=256,probed")
        assert cache.identity.policy_params["probe"] == each.text
        assert each.text in cache.identity.probe
        assert CompressedCache.from_bytes(cache.to_bytes()).identity.policy_params["centroid"] == each.centroid
    question = talk.questions[0][1].text
    place = tiny.asker.nearest([cache.identity.policy_params for cache in caches], question)
    routed = tiny.answer(caches, question, route="nearest")
    assert routed.text == tiny.answer(caches[place], question).text
    assert routed.sources == tuple(float(number == place) for number in range(TOPICS))


def test_one_episode_of_a_short_talk_is_a_cache_with_the_whole_text_as_probe(tiny, talk):
    text = "\n\n".join(talk.utterances[: UTTERANCES * WINDOWS])
    (one,) = tiny.episodes(text, 1, compression_ratio=0.5)
    (episode,) = tiny.compressor.episodes(text, 1)
    assert episode.text == text
    same = tiny.compress(
        text, policy="epicache", compression_ratio=0.5, prefill="chunked", probe=text, centroid=episode.centroid
    )
    assert one.to_bytes() == same.to_bytes()


def test_a_text_without_paragraphs_is_cut_into_sentences(tiny):
    harbour = "The crane was tested. Is the grain dry? The crane is old! The grain was stored. "
    school = "A teacher painted. The pupils sang. A teacher slept! The pupils wrote. "
    first, second = tiny.compressor.episodes((harbour + school) * 3, 2)
    assert (first.windows, second.windows) == ((0, 2, 4), (1, 3, 5))
    assert "crane" in first.text
    assert "crane" not in second.text


def test_an_episode_s_text_has_room_in_a_probe(tiny):
    long = ["grain crane " * 600, "teacher pupil " * 2000]
    first, second = tiny.compressor.episodes("\n\n".join(part for each in long for part in [each] * 8), 2)
    assert len(first.text.encode()) <= MAX_PROBE_BYTES
    assert len(second.text.encode()) == MAX_PROBE_BYTES  # the beginning of one window


@pytest.mark.parametrize(
    ("document", "count", "param"),
    [
        ("One. Two. Three. Four. Five.", 0, "episodes.count"),
        ("One. Two. Three. Four. Five.", 65, "episodes.count"),
        ("One. Two. Three. Four. Five.", True, "episodes.count"),
        ("One. Two. Three. Four.", 2, "episodes.count"),
        ("Nothing new.\n\n" * 40, 2, "episodes.count"),
        ("", 1, "episodes.count"),
        ([5, 6, 7], 1, "episodes"),
        ([{"role": "pilot", "content": "x"}], 1, "messages[0].role"),
    ],
    ids=str,
)
def test_documents_without_so_many_episodes_are_refused(tiny, document, count, param):
    with pytest.raises(InvalidRequest) as refused:
        tiny.compressor.episodes(document, count)
    assert refused.value.param == param


def test_a_route_needs_caches_of_episodes_and_a_tokenizer(tiny, talk, llama):
    caches = tiny.episodes(talk.text, 2, compression_ratio=0.8)
    other = tiny.compress(talk.text, policy="keydiff")
    for asked, route, param in (
        (caches[:1], "nearest", "route"),
        (caches[0], "nearest", "route"),
        (caches, "farthest", "route"),
        ([*caches, other], "nearest", "cache_ids[2]"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            tiny.answer(asked, "Who?", route=route)
        assert refused.value.param == param
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        llama.engine.compressor.episodes("One. Two.", 1)


@settings(deadline=None)
@given(st.dictionaries(st.integers(0, 2**32 - 1), st.floats(0.01, 1), min_size=1, max_size=700))
def test_a_centroid_as_text_keeps_its_largest_weights(weights):
    found = unpacked(packed(weights))
    largest = sorted(weights, key=lambda token: (-weights[token], token))[:MAX_CENTROID]
    assert set(found) <= set(largest)
    assert sum(weight**2 for weight in found.values()) == pytest.approx(1)
    scale = found[largest[0]] / weights[largest[0]]
    for token in largest:
        assert found.get(token, 0.0) / scale == pytest.approx(weights[token], abs=weights[largest[0]] / 500)
