"""A connector under which a cache or its store is lost at the worst moment: it is scheduled, and not yet read."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvshelf.integrations.vllm.connector import ShelfConnector
from kvshelf.integrations.vllm.step import ConnectorStep

before_load: list[Callable[[], Any]] = []
"""Called once, after the next step with a load was scheduled. For a vLLM in this process."""

KILLS = "LOSING_CONNECTOR_KILLS"
"""Names a file. If it is there then, the process whose id it holds is killed. For a vLLM in other processes."""


class LosingConnector(ShelfConnector):
    def build_connector_meta(self, scheduler_output: Any) -> ConnectorStep:
        step = super().build_connector_meta(scheduler_output)
        if step.loads and before_load:
            before_load.pop()()
        if step.loads and KILLS in os.environ and (victim := Path(os.environ[KILLS])).exists():
            os.kill(int(victim.read_text()), signal.SIGKILL)
            victim.unlink()
        return step
