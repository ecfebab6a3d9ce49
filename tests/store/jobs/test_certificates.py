"""Certificates: by name and tenant, replaced, deleted, and erased with all of a tenant. The same on every home."""

from __future__ import annotations

import pytest

from kvshelf.api import Certificate, GroupBound
from kvshelf.errors import CertificateNotFound, StateConflict
from kvshelf.store.erasure.eraser import Subject
from kvshelf.store.jobs import certificates
from tests.store.places import Clock, Place


def made(name: str, alpha: float = 0.1) -> Certificate:
    group = GroupBound(documents=9, questions=9, limit=1.0, tokens=(1, 9), share=0.5, loss=0.0, ways=[])
    told = {"model": "m", "weights": "w", "tokenizer": "t", "fingerprint": "f", "data": "d", "date": "2026-01-01"}
    fields = {"reference": "full", "quality_version": 3, "ways": [], "groups": {"": group}}
    return Certificate(name=name, alpha=alpha, **told, **fields).signed()  # type: ignore[arg-type]


def test_two_tenants_see_nothing_of_each_other(place: Place, clock: Clock) -> None:
    with place.open(now=clock) as shelf:
        kept = shelf.certificates
        assert kept.keep(made("law"), tenant="a")
        assert not kept.keep(made("law", 0.2), tenant="a")
        assert kept.keep(made("law", 0.3), tenant="b")
        assert kept.keep(made("tax"), tenant="a")
        assert [one.name for one in kept.list(tenant="a")] == ["tax", "law"]
        assert kept.get("law", tenant="a") == made("law", 0.2)
        kept.delete("law", tenant="a")
        for tenant in ("a", "c"):
            with pytest.raises(CertificateNotFound, match="there is no certificate 'law'"):
                kept.get("law", tenant=tenant)
    with place.open(now=clock) as shelf:
        assert shelf.certificates.get("law", tenant="b").alpha == 0.3
        assert shelf.erase(Subject(tenant="b", labels={"x": "y"})).counts == {}
        assert shelf.erase(Subject(tenant="b")).counts == {"certificate": 1}
        assert shelf.certificates.list(tenant="b") == []
        assert len(shelf.certificates.list(tenant="a")) == 1
        assert shelf.check() == []


def test_there_is_an_end_to_how_many(place: Place, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "MOST_CERTIFICATES", 2)
    with place.open(now=clock) as shelf:
        for name in ("a", "b"):
            shelf.certificates.keep(made(name), tenant="a")
        with pytest.raises(StateConflict, match="2 certificates, as many as may be"):
            shelf.certificates.keep(made("c"), tenant="a")
        shelf.certificates.keep(made("b", 0.5), tenant="a")
