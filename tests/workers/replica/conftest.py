"""No test leaves a thread that runs an engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def ended_schedulers() -> Iterator[None]:
    """Set up first, so it looks after the fixtures of the test have ended."""
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("scheduler-")]
    assert not left, "stop schedulers and replicas in fixtures or `finally`"
