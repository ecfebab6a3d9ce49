"""Workflows: by id and tenant, replaced, deleted, and erased with all of a tenant. The same on every home."""

from __future__ import annotations

import pytest

from kvshelf.api import Workflow
from kvshelf.errors import StateConflict, WorkflowNotFound
from kvshelf.store.erasure.eraser import Subject
from kvshelf.store.jobs import workflows
from kvshelf.store.jobs.workflows import KeptWorkflow
from tests.store.caches import make_cache
from tests.store.places import Clock, Place


def made(id: str, seconds: float | None = None) -> KeptWorkflow:
    step = {"cache_ids": ["kvs_1"], "next": ["two"], "join": "all", "duration_s": seconds}
    graph = Workflow.model_validate({"steps": {"one": step, "two": {}}})
    return KeptWorkflow(id=id, workflow=graph, models={"kvs_1": "tiny"})


def test_two_tenants_see_nothing_of_each_other(place: Place, clock: Clock) -> None:
    with place.open(now=clock) as shelf:
        kept = shelf.workflows
        assert kept.keep("law", made("law"), tenant="a")
        assert not kept.keep("law", made("law", 2.5), tenant="a")
        assert kept.keep("law", made("law", 3.0), tenant="b")
        assert kept.keep("tax", made("tax"), tenant="a")
        assert [one.id for one in kept.list(tenant="a")] == ["tax", "law"]
        kept.delete("tax", tenant="a")
        for id, tenant in (("tax", "a"), ("law", "c")):
            with pytest.raises(WorkflowNotFound, match=f"there is no workflow {id!r}"):
                kept.get(id, tenant=tenant)
    with place.open(now=clock) as shelf:
        assert shelf.workflows.get("law", tenant="a") == made("law", 2.5), "another process sees it"
        assert shelf.erase(Subject(tenant="b")).counts == {"workflow": 1}
        assert shelf.workflows.list(tenant="b") == []
        assert len(shelf.workflows.list(tenant="a")) == 1
        assert shelf.check() == []


def test_there_is_an_end_to_how_many(place: Place, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workflows, "MOST_WORKFLOWS", 2)
    with place.open(now=clock) as shelf:
        for id in ("a", "b"):
            shelf.workflows.keep(id, made(id), tenant="a")
        with pytest.raises(StateConflict, match="2 workflows, as many as may be"):
            shelf.workflows.keep("c", made("c"), tenant="a")
        shelf.workflows.keep("b", made("b", 1.0), tenant="a")


def test_an_erasure_of_a_part_says_which_workflows_name_what_is_gone(place: Place, clock: Clock) -> None:
    with place.open(now=clock) as shelf:
        gone = shelf.put(make_cache(), labels={"subject": "one"}, tenant="a").id
        stays = shelf.put(make_cache(8), labels={"subject": "two"}, tenant="a").id
        for id, cache_id, tenant in (("law", gone, "a"), ("tax", stays, "a"), ("law", gone, "b")):
            graph = Workflow.model_validate({"steps": {"one": {"cache_ids": [cache_id]}}})
            kept = KeptWorkflow(id=id, workflow=graph, models={cache_id: "tiny"})
            shelf.workflows.keep(id, kept, tenant=tenant)
        subject = Subject(tenant="a", labels={"subject": "one"})
        for dry_run in (True, False):
            receipt = shelf.erase(subject, dry_run=dry_run)
            named = [(each.kind, each.id) for each in receipt.stays if each.kind == "workflow"]
            assert (receipt.counts, named) == ({"cache": 1}, [("workflow", "law")])
        assert len(shelf.workflows.list(tenant="a")) == 2
