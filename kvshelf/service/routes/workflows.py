"""/v1/workflows: the steps of agent workflows, by which replicas know what is asked next."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from kvshelf.api.workflows import Workflow, WorkflowDeleted, WorkflowId, WorkflowList, WorkflowObject
from kvshelf.service.access.keys import Reader, Writer
from kvshelf.service.bodies import read_json
from kvshelf.service.http import openapi
from kvshelf.service.http.waiting import off_loop
from kvshelf.service.service import InService, written
from kvshelf.service.workflows import models_of
from kvshelf.store.jobs.named import KeptWorkflow

router = APIRouter(prefix="/v1/workflows", tags=["workflows"], responses=openapi.ERRORS)


@router.put(
    "/{id}",
    response_model=WorkflowObject,
    responses={201: {"model": WorkflowObject, "description": "there was none of this id"}},
    openapi_extra=openapi.body_of(Workflow),
)
async def keep(id: Annotated[WorkflowId, Path()], request: Request, service: InService, caller: Writer) -> Response:
    """Keep a workflow, in place of the one of its id. A question says which step it is by its field `workflow`; caches
    of the steps that follow then stay in memory, the nearest longest, and are read before their questions, if the key
    has the scope write. What was told by the one before stays until the run's next question, or its end in time."""
    body = await read_json(request, Workflow, service)
    models = await off_loop(models_of, service.store, service.identities, body, caller.tenant)
    workflow = KeptWorkflow(id=id, workflow=body, models=models)
    is_new = await off_loop(service.store.workflows.keep, id, workflow, tenant=caller.tenant)
    response = await service.computing.run(written, _object(workflow))
    response.status_code = 201 if is_new else 200
    return response


@router.get("", response_model=WorkflowList)
async def list_workflows(service: InService, caller: Reader) -> Response:
    """The workflows of the caller's tenant, newest first."""
    table = service.store.workflows
    return await service.listing.run(
        lambda: written(WorkflowList(data=[*map(_object, table.list(tenant=caller.tenant))]))
    )


def _object(record: KeptWorkflow) -> WorkflowObject:
    return WorkflowObject(id=record.id, steps=record.workflow.steps)


@router.get("/{id}", response_model=WorkflowObject)
async def get_workflow(id: str, service: InService, caller: Reader) -> Response:
    """One workflow, with its steps."""
    workflow = await off_loop(service.store.workflows.get, id, tenant=caller.tenant)
    return await service.computing.run(written, _object(workflow))


@router.delete("/{id}")
async def delete_workflow(id: str, service: InService, caller: Writer) -> WorkflowDeleted:
    """Delete a workflow. Its caches stay; what was told of their next use counts until its time is over: ten minutes
    after the steps should have run, an hour where they were as far."""
    await off_loop(service.store.workflows.delete, id, tenant=caller.tenant)
    return WorkflowDeleted(id=id)
