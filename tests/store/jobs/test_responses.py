"""What every home promises of responses."""

from __future__ import annotations

import pytest

from kvshelf.errors import QuotaExceeded, ResponseNotFound
from kvshelf.store.index import KEEP_ENDED_S, Quota
from kvshelf.store.rules import Rules
from kvshelf.store.sealing.keyring import Keyring
from kvshelf.store.types import Swept
from tests.store.caches import make_cache
from tests.store.places import Clock, Place

SAID = b'{"id": "resp_1", "text": "The treasure is buried under the third oak."}' * 99


@pytest.mark.parametrize("sealed", [False, True])
def test_a_response_goes_with_its_cache(place: Place, sealed: bool) -> None:
    rules = Rules(keyring=Keyring([bytes(32)]) if sealed else None)
    with place.open(rules=rules) as shelf:
        cache_id = shelf.put(make_cache(), labels={"of the caller": ""}).id
        shelf.responses.keep("resp_1", SAID, tenant="default", cache_id=cache_id)
        record = shelf.responses.get("resp_1", tenant="default")
        assert (record.cache_id, shelf.responses.read(record)) == (cache_id, SAID)
        assert any(SAID in data for data in place.contents()) == (not sealed)
        with pytest.raises(ResponseNotFound):
            shelf.responses.get("resp_1", tenant="you")
        assert shelf.responses.of_cache(cache_id, tenant="default") == [record]
        assert shelf.responses.of_cache(cache_id, tenant="you") == []
        shelf.delete(cache_id)
        with pytest.raises(ResponseNotFound):
            shelf.responses.get("resp_1", tenant="default")
        with pytest.raises(ResponseNotFound):
            shelf.responses.read(record)
        assert not any(SAID in data for data in place.contents())
        assert shelf.check() == []


def test_a_response_ends_after_its_time(place: Place, clock: Clock) -> None:
    with place.open(now=clock) as shelf:
        shelf.responses.keep("resp_1", SAID, tenant="default", cache_id=shelf.put(make_cache()).id)
        clock.time += KEEP_ENDED_S
        with pytest.raises(ResponseNotFound):
            shelf.responses.get("resp_1", tenant="default")
        assert shelf.sweep() == Swept(responses=1)
        assert shelf.check() == []


def test_a_response_counts_for_the_quota(place: Place) -> None:
    with place.open() as shelf:
        cache_id = shelf.put(make_cache()).id
        used = shelf.usage(tenant="default").bytes
    with place.open(rules=Rules(quota=Quota(max_bytes=used))) as shelf:
        with pytest.raises(QuotaExceeded):
            shelf.responses.keep("resp_1", SAID, tenant="default", cache_id=cache_id)
        with pytest.raises(ResponseNotFound):
            shelf.responses.get("resp_1", tenant="default")
        assert shelf.check() == []
