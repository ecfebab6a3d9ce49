"""A connector under which a cache is deleted at the worst moment: it is scheduled, and not yet read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvshelf.integrations.vllm.connector import ShelfConnector
from kvshelf.integrations.vllm.step import Step

before_load: list[Callable[[], Any]] = []
"""Called once, after the next step with a load was scheduled."""


class LosingConnector(ShelfConnector):
    def build_connector_meta(self, scheduler_output: Any) -> Step:
        step = super().build_connector_meta(scheduler_output)
        if step.loads and before_load:
            before_load.pop()()
        return step
