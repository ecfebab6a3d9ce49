"""The types of /v1/workflows: the steps of an agent workflow (an Agent Step Graph, KVFlow, arXiv 2507.07400)."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from kvshelf.api.strict import MAX_JOINT, ListBody, RequestBody, ResponseBody, Text, misuse, require_each_once
from kvshelf.errors import nearest

MAX_STEPS: Final = 256
MAX_STEP_CACHES: Final = 256
"""Ids of caches in one workflow, over all of its steps."""
MAX_NEXT: Final = 1024
"""Names of following steps in one workflow, over all of its steps."""

StepName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
WorkflowId = StepName


class AtStep(RequestBody):
    """The step of a workflow of /v1/workflows that a question is. Two runs of one workflow at the same time need names
    of their own in `program`: without one they count as one run."""

    id: WorkflowId
    step: StepName


class WorkflowStep(RequestBody):
    """One step. Of several that come before the same one, one must have run (`join` any: they are alternatives) or all.
    When a question of one of them comes, only those that a join of all waits for are still expected."""

    cache_ids: Annotated[list[Text], Field(max_length=MAX_JOINT, fail_fast=True)] = Field(
        default_factory=list, description="the caches that its question asks"
    )
    next: Annotated[list[StepName], Field(max_length=MAX_STEPS, fail_fast=True)] = Field(
        default_factory=list, description="the steps that may follow it"
    )
    join: Literal["any", "all"] = Field("any", description="runs after any of the steps before it, or after all")
    duration_s: Annotated[float, Field(gt=0, le=86400)] | None = Field(
        None, description="seconds that are expected from its question to the next step's"
    )


class Workflow(RequestBody):
    """PUT /v1/workflows/{id}: steps by name, in no circle: a loop is written out, a step for each of its rounds."""

    steps: Annotated[dict[StepName, WorkflowStep], Field(min_length=1, max_length=MAX_STEPS)]

    @model_validator(mode="after")
    def _is_a_graph(self) -> Self:
        for name, step in self.steps.items():
            for follower in step.next:
                if follower not in self.steps:
                    raise misuse(f"steps.{name}.next", f"there is no step {follower!r}{nearest(follower, self.steps)}")
            require_each_once(step.next, f"steps.{name}.next")
            require_each_once(step.cache_ids, f"steps.{name}.cache_ids")
        if (count := sum(len(step.cache_ids) for step in self.steps.values())) > MAX_STEP_CACHES:
            raise misuse("steps", f"the steps name {count} caches; at most {MAX_STEP_CACHES} are accepted")
        if (count := sum(len(step.next) for step in self.steps.values())) > MAX_NEXT:
            raise misuse("steps", f"the steps name {count} that follow; at most {MAX_NEXT} are accepted")
        try:
            self.in_order()
        except CycleError as error:
            circle = " -> ".join(error.args[1])
            raise misuse("steps", f"the steps run in a circle, {circle}; write a step for each round") from None
        return self

    @property
    def before(self) -> dict[str, list[str]]:
        """The steps that come before each, by name."""
        before: dict[str, list[str]] = {name: [] for name in self.steps}
        for name, step in self.steps.items():
            for follower in step.next:
                before[follower].append(name)
        return before

    def in_order(self) -> list[str]:
        """The names of all steps, none before one that it follows. Raises `graphlib.CycleError`."""
        return list(TopologicalSorter(self.before).static_order())


class WorkflowObject(ResponseBody):
    """A kept workflow."""

    id: str
    object: Literal["workflow"] = "workflow"
    steps: dict[str, WorkflowStep]


class WorkflowList(ListBody):
    """GET /v1/workflows: newest first."""

    data: list[WorkflowObject]


class WorkflowDeleted(ResponseBody):
    """The answer to DELETE."""

    id: str
    object: Literal["workflow"] = "workflow"
    deleted: bool = True
