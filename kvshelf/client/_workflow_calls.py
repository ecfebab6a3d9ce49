"""The calls of `client.workflows`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvshelf.api.workflows import Workflow, WorkflowDeleted, WorkflowList, WorkflowObject, WorkflowStep
from kvshelf.client._calls import checked, quoted
from kvshelf.client._exchange import HttpCall, parse_as


def keep_workflow(id: str, steps: Mapping[str, Mapping[str, Any] | WorkflowStep]) -> HttpCall[WorkflowObject]:
    """Keep a workflow in place of the one of its id: steps by name, each with the `cache_ids` that it asks, the steps
    that are `next`, `join` ("any" or "all" of the steps before it) and `duration_s`. Raises `InvalidRequest` for a
    circle and an unknown step, `CacheNotFound`, `ModelMismatch`."""
    path = f"/v1/workflows/{quoted(id)}"
    return HttpCall("PUT", path, parse_as(WorkflowObject), body={"json": checked(Workflow, {"steps": steps})})


def list_workflows() -> HttpCall[list[WorkflowObject]]:
    """The workflows of your tenant, newest first."""
    return HttpCall("GET", "/v1/workflows", lambda response: parse_as(WorkflowList)(response).data)


def retrieve_workflow(id: str) -> HttpCall[WorkflowObject]:
    """One workflow. Raises `WorkflowNotFound`."""
    return HttpCall("GET", f"/v1/workflows/{quoted(id)}", parse_as(WorkflowObject))


def delete_workflow(id: str) -> HttpCall[WorkflowDeleted]:
    """Delete a workflow; its caches stay. Raises `WorkflowNotFound`."""
    return HttpCall("DELETE", f"/v1/workflows/{quoted(id)}", parse_as(WorkflowDeleted))
