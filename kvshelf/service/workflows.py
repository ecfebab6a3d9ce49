"""What the question of a workflow's step tells the replicas: when the caches of the steps that follow are asked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from kvshelf.api.workflows import AtStep, Workflow
from kvshelf.artifact.identity import ModelIdentity
from kvshelf.errors import InvalidRequest, KvshelfError, nearest
from kvshelf.service.engines import serving
from kvshelf.store.base import Store
from kvshelf.workers.replica.memory.retention import Hint
from kvshelf.workers.replica.memory.steps import hints_of

ModelHints = Mapping[str, Sequence[Hint]]
"""Hints by the name of the model whose replicas are told."""


def models_of(store: Store, identities: Mapping[str, ModelIdentity], workflow: Workflow, tenant: str) -> dict[str, str]:
    """The name of the served model for each cache of a workflow. Raises as `Store.stat` and `serving`; the error names
    the step."""
    models: dict[str, str] = {}
    for name, step in workflow.steps.items():
        try:
            for cache_id in step.cache_ids:
                if cache_id not in models:
                    manifest = store.stat(cache_id, tenant=tenant)
                    models[cache_id] = serving(identities, ModelIdentity(**manifest.identity["model"]))
        except KvshelfError as error:
            error.param = f"steps.{name}.cache_ids"
            raise
    return models


def hints_for(store: Store, at: AtStep, program: str | None, tenant: str) -> ModelHints:
    """What the question of a step tells. Raises `WorkflowNotFound`, and `InvalidRequest` for a step that the workflow
    has not."""
    kept = store.workflows.get(at.id, tenant=tenant)
    if at.step not in kept.workflow.steps:
        raise InvalidRequest(
            f"workflow {at.id!r} has no step {at.step!r}{nearest(at.step, kept.workflow.steps)}; it has "
            f"{', '.join(list(kept.workflow.steps)[:20])}",
            param="workflow.step",
        )
    by_model: dict[str, list[Hint]] = defaultdict(list)
    for hint in hints_of(kept.workflow, at.step, f"{at.id}/{program or ''}"):
        by_model[kept.models[hint.cache_id]].append(hint)
    return by_model
