"""What each worker of Ray imports before its first task: Serve's controller and the replicas all need Serve, and
importing it takes 1 s. A replica calls `startup.end`; the controller does not, as it has no tensors."""

from __future__ import annotations

from kvshelf.workers.cluster import startup

startup.begin()

import ray.serve  # noqa: E402, F401 - after `begin`, which makes it faster
