"""What was measured of a cache stands in its manifest, from the start or later."""

from __future__ import annotations

import pytest

from kvshelf.api import Tried
from kvshelf.errors import CacheNotFound, EtagMismatch
from kvshelf.store.manifest import Judgement
from tests.qualities import quality_of
from tests.store.caches import make_cache
from tests.store.places import Place

GOOD = Judgement(
    quality=quality_of(0.98),
    tried=(Tried(policy="full", compression_ratio=0.0, codec="none", bytes=17),),
)


def test_it_is_stored_with_the_cache_and_replaced_later(place: Place) -> None:
    with place.open() as ours, place.open() as theirs:
        bare, judged = ours.put(make_cache(0)), ours.put(make_cache(1), judged=GOOD)
        assert (bare.quality, bare.tried) == (None, ())
        assert (judged.quality, judged.tried) == (GOOD.quality, GOOD.tried)
        assert theirs.stat(judged.id) == judged
        assert ours.put(make_cache(0), judged=GOOD) == bare, "what is there is left as it is"
        seen = theirs.keep_judgement(bare.id, GOOD)
        assert ours.stat(bare.id) == seen == bare.model_copy(update=dict(GOOD))
        assert seen.revision != bare.revision
        assert ours.get(bare.id).to_bytes() == make_cache(0).to_bytes()


def test_it_is_of_the_cache_as_it_was_seen(place: Place) -> None:
    with place.open() as shelf:
        bare = shelf.put(make_cache())
        renamed = shelf.update(bare.id, name="another")
        with pytest.raises(EtagMismatch):
            shelf.keep_judgement(bare.id, GOOD, if_revision=[bare.revision])
        floor = Judgement(min_quality=0.5)
        seen = shelf.keep_judgement(bare.id, floor, if_revision=[renamed.revision])
        assert seen.revision != renamed.revision, "a floor that was raised is seen by who saw the former one"


def test_it_goes_with_other_changes(place: Place) -> None:
    with place.open() as shelf:
        bare = shelf.put(make_cache())
        shelf.update(bare.id, name="kept")
        shelf.keep_judgement(bare.id, GOOD)
        updated = shelf.update(bare.id, labels={"a": "b"})
        assert (updated.name, updated.labels, updated.quality) == ("kept", {"a": "b"}, GOOD.quality)


def test_what_is_not_there_is_not_judged(place: Place) -> None:
    with place.open() as shelf:
        bare = shelf.put(make_cache())
        with pytest.raises(CacheNotFound):
            shelf.keep_judgement(bare.id, GOOD, tenant="another")
        shelf.delete(bare.id)
        with pytest.raises(CacheNotFound):
            shelf.keep_judgement(bare.id, GOOD)
