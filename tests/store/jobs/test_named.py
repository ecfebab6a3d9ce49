"""Certificates and workflows: by name and tenant, replaced, deleted, and erased with all of a tenant. The same on every
home."""

from __future__ import annotations

import pytest

from kvshelf.api import Certificate, GroupBound, Workflow
from kvshelf.errors import CertificateNotFound, StateConflict, WorkflowNotFound
from kvshelf.store.erasure.eraser import Subject
from kvshelf.store.jobs import named
from kvshelf.store.jobs.named import KeptWorkflow
from tests.store.caches import make_cache
from tests.store.places import Clock, Place


def make_certificate(name: str, alpha: float = 0.1) -> Certificate:
    group = GroupBound(documents=9, questions=9, limit=1.0, tokens=(1, 9), share=0.5, loss=0.0, ways=[])
    texts = {"model": "m", "weights": "w", "tokenizer": "t", "fingerprint": "f", "data": "d", "date": "2026-01-01"}
    fields = {"reference": "full", "quality_version": 3, "ways": [], "groups": {"": group}}
    return Certificate(name=name, alpha=alpha, **texts, **fields).signed()  # type: ignore[arg-type]


def test_two_tenants_see_no_certificate_of_each_other(place: Place, clock: Clock) -> None:
    with place.open(now=clock) as shelf:
        kept = shelf.certificates
        assert kept.keep(make_certificate("law"), tenant="a")
        assert not kept.keep(make_certificate("law", 0.2), tenant="a")
        assert kept.keep(make_certificate("law", 0.3), tenant="b")
        assert kept.keep(make_certificate("tax"), tenant="a")
        assert [one.name for one in kept.list(tenant="a")] == ["tax", "law"]
        assert kept.get("law", tenant="a") == make_certificate("law", 0.2)
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


def test_there_is_an_end_to_how_many_certificates(place: Place, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "MOST_CERTIFICATES", 2)
    with place.open(now=clock) as shelf:
        for name in ("a", "b"):
            shelf.certificates.keep(make_certificate(name), tenant="a")
        with pytest.raises(StateConflict, match="2 certificates, as many as may be"):
            shelf.certificates.keep(make_certificate("c"), tenant="a")
        shelf.certificates.keep(make_certificate("b", 0.5), tenant="a")


def make_workflow(id: str, seconds: float | None = None) -> KeptWorkflow:
    step = {"cache_ids": ["kvs_1"], "next": ["two"], "join": "all", "duration_s": seconds}
    graph = Workflow.model_validate({"steps": {"one": step, "two": {}}})
    return KeptWorkflow(id=id, workflow=graph, models={"kvs_1": "tiny"})


def test_two_tenants_see_no_workflow_of_each_other(place: Place, clock: Clock) -> None:
    with place.open(now=clock) as shelf:
        kept = shelf.workflows
        assert kept.keep("law", make_workflow("law"), tenant="a")
        assert not kept.keep("law", make_workflow("law", 2.5), tenant="a")
        assert kept.keep("law", make_workflow("law", 3.0), tenant="b")
        assert kept.keep("tax", make_workflow("tax"), tenant="a")
        assert [one.id for one in kept.list(tenant="a")] == ["tax", "law"]
        kept.delete("tax", tenant="a")
        for id, tenant in (("tax", "a"), ("law", "c")):
            with pytest.raises(WorkflowNotFound, match=f"there is no workflow {id!r}"):
                kept.get(id, tenant=tenant)
    with place.open(now=clock) as shelf:
        assert shelf.workflows.get("law", tenant="a") == make_workflow("law", 2.5), "another process sees it"
        assert shelf.erase(Subject(tenant="b")).counts == {"workflow": 1}
        assert shelf.workflows.list(tenant="b") == []
        assert len(shelf.workflows.list(tenant="a")) == 1
        assert shelf.check() == []


def test_there_is_an_end_to_how_many_workflows(place: Place, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "MOST_WORKFLOWS", 2)
    with place.open(now=clock) as shelf:
        for id in ("a", "b"):
            shelf.workflows.keep(id, make_workflow(id), tenant="a")
        with pytest.raises(StateConflict, match="2 workflows, as many as may be"):
            shelf.workflows.keep("c", make_workflow("c"), tenant="a")
        shelf.workflows.keep("b", make_workflow("b", 1.0), tenant="a")


def test_an_erasure_of_a_part_says_which_workflows_name_what_is_gone(place: Place, clock: Clock) -> None:
    with place.open(now=clock) as shelf:
        erased = shelf.put(make_cache(), labels={"subject": "one"}, tenant="a").id
        other = shelf.put(make_cache(8), labels={"subject": "two"}, tenant="a").id
        for id, cache_id, tenant in (("law", erased, "a"), ("tax", other, "a"), ("law", erased, "b")):
            graph = Workflow.model_validate({"steps": {"one": {"cache_ids": [cache_id]}}})
            kept = KeptWorkflow(id=id, workflow=graph, models={cache_id: "tiny"})
            shelf.workflows.keep(id, kept, tenant=tenant)
        subject = Subject(tenant="a", labels={"subject": "one"})
        for dry_run in (True, False):
            receipt = shelf.erase(subject, dry_run=dry_run)
            stays = [(thing.kind, thing.id) for thing in receipt.stays if thing.kind == "workflow"]
            assert (receipt.counts, stays) == ({"cache": 1}, [("workflow", "law")])
        assert len(shelf.workflows.list(tenant="a")) == 2
