"""Steps to execution in a workflow, as hints of the next use (KVFlow, arXiv 2507.07400).

    steps(t) = 1 + max over the steps before t     if t runs after all of them (`join` all)
               1 + min over the steps before t     if t runs after any of them

The step that is asked has 0. Of the steps before t only those count that run now or come later: the others have run, or
run beside. Seconds are summed in the same way, by each step's expected duration, `STEP_S` where nobody said one.

A hint counts down, but not below what stands behind the step that runs now: as long as that is not over, the steps
behind it keep their order and their distance.
"""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Final, NamedTuple

from kvshelf.api.workflows import Workflow
from kvshelf.workers.replica.memory.retention import AHEAD_S, Hint

STEP_S: Final = AHEAD_S
"""Of a step without a duration. So the caches of the next step are read at once, and those behind it in free room."""


FARTHEST_S: Final = 86400.0
"""As of `next_use_s`."""


class Ahead(NamedTuple):
    """How far a step is: steps, and seconds."""

    steps: int
    seconds: float


def steps_ahead(workflow: Workflow, step: str) -> dict[str, Ahead]:
    """How far all steps are that may follow this one, which is asked now and the first of them."""
    ahead, before = {step: Ahead(0, 0.0)}, workflow.before
    for name in workflow.in_order():
        reached = [earlier for earlier in before[name] if earlier in ahead]
        if reached:
            last = max if workflow.steps[name].join == "all" else min
            ahead[name] = Ahead(
                1 + last(ahead[earlier].steps for earlier in reached),
                last(ahead[earlier].seconds + _duration_s(workflow, earlier) for earlier in reached),
            )
    return ahead


def hints_of(workflow: Workflow, step: str, run: str) -> list[Hint]:
    """What the question of a step tells about the caches of all that follow, none beyond `FARTHEST_S`; and that the
    others are not asked any more, but for those that run beside. run: a name of this run of the workflow: later
    questions of the same run replace what was told of the same steps."""
    now_s, ahead = _duration_s(workflow, step), steps_ahead(workflow, step)
    over = {step} | workflow.steps.keys() - ahead.keys() - _beside(workflow, step, ahead.keys())
    hints = [Hint(id, None, 0.0, f"{run}/{name}") for name in over for id in workflow.steps[name].cache_ids]
    for name, (_, seconds) in ahead.items():
        if name != step:
            next_use_s = seconds if seconds <= FARTHEST_S else None
            hints += [Hint(id, next_use_s, seconds - now_s, f"{run}/{name}") for id in workflow.steps[name].cache_ids]
    # Of a tenant's hints the latest count, so these end with the nearest.
    return sorted(hints, key=lambda hint: -math.inf if hint.next_use_s is None else -hint.next_use_s)


def _beside(workflow: Workflow, step: str, ahead: Set[str]) -> set[str]:
    """The steps for which one that follows waits, though they do not follow themselves."""
    before = workflow.before
    joins = [name for name in ahead if name != step and workflow.steps[name].join == "all"]
    waiting = [earlier for join in joins for earlier in before[join]]
    beside: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in ahead and name not in beside:
            beside.add(name)
            waiting += before[name]
    return beside


def _duration_s(workflow: Workflow, step: str) -> float:
    return workflow.steps[step].duration_s or STEP_S
