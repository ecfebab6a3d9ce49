"""The workflows of each tenant, by id, until they are deleted."""

from __future__ import annotations

from typing import Final

from kvshelf.api.workflows import Workflow
from kvshelf.errors import WorkflowNotFound
from kvshelf.store.jobs.named import NamedTable
from kvshelf.store.manifest import StoredRecord
from kvshelf.store.table import JobTable

MOST_WORKFLOWS: Final = 100
"""Of a tenant: their listing is one answer."""


class KeptWorkflow(StoredRecord):
    """models: by cache, the name of the served model that answers from it."""

    id: str
    workflow: Workflow
    models: dict[str, str]


class WorkflowTable(NamedTable[KeptWorkflow]):
    """The workflows of one home. `get` and `delete` raise `WorkflowNotFound`."""

    def __init__(self, table: JobTable) -> None:
        super().__init__(table, "workflow", KeptWorkflow, MOST_WORKFLOWS, _missing)


def _missing(id: str) -> WorkflowNotFound:
    return WorkflowNotFound(
        f"there is no workflow {id[:80]!r}; PUT /v1/workflows/{{id}} keeps one, GET /v1/workflows names yours",
        param="workflow",
    )
