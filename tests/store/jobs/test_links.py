"""Links between models: one for each pair and engine, replaced, removed, and of no tenant. The same on every home."""

from __future__ import annotations

from typing import Any

import pytest

from kvshelf.errors import StateConflict
from kvshelf.store.erasure.eraser import Subject
from kvshelf.store.jobs import links
from kvshelf.store.jobs.links import LinkedModel, ModelLink
from tests.store.places import Clock, Place


def side(name: str) -> LinkedModel:
    return LinkedModel(name=name, fingerprint=name * 4, weights="w", dtype="float32", tokenizer="t", template="c")


NOW: dict[str, Any] = {"engine_version": "1", "quality_version": 3}


def made(maker: str, asker: str, agreement: float = 0.9, engine: str = "llama.cpp") -> ModelLink:
    fields: dict[str, Any] = NOW | {"low": 0.8, "cues": 50, "documents": 2}
    fields |= {"kvshelf": "0.1.0", "date": "2026-01-01", "agreement": agreement}
    return ModelLink(maker=side(maker), asker=side(asker), engine=engine, **fields)


def test_a_model_is_asked_for_caches_of_those_it_is_linked_to(place: Place, clock: Clock) -> None:
    with place.open(now=clock) as shelf:
        for link in (made("a", "q"), made("b", "q"), made("a", "p"), made("c", "q", engine="other")):
            shelf.links.keep(link)
        shelf.links.keep(made("b", "q", 0.95))  # in place of the earlier one
        assert shelf.links.makers("qqqq", "llama.cpp", **NOW) == {"aaaa": 0.9, "bbbb": 0.95}
        assert shelf.links.makers("aaaa", "llama.cpp", **NOW) == {}
        for later in ({"engine_version": "2"}, {"quality_version": 4}):
            assert shelf.links.makers("qqqq", "llama.cpp", **NOW | later) == {}, "measured with other versions"
    with place.open(now=clock) as shelf:
        assert sorted(link.agreement for link in shelf.links.list()) == [0.9, 0.9, 0.9, 0.95]
        shelf.erase(Subject(tenant="kvshelf"))
        shelf.links.remove(made("a", "q"))
        assert shelf.links.makers("qqqq", "llama.cpp", **NOW) == {"bbbb": 0.95}
        assert shelf.check() == []


def test_there_is_an_end_to_how_many(place: Place, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MOST_LINKS", 1)
    with place.open(now=clock) as shelf:
        shelf.links.keep(made("a", "q"))
        with pytest.raises(StateConflict, match="1 links between models"):
            shelf.links.keep(made("b", "q"))
        shelf.links.keep(made("a", "q", 0.5))
