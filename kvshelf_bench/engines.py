"""How the benches load an engine."""

from __future__ import annotations

from dataclasses import dataclass

import transformers

from kvshelf.engine.engine import Engine
from kvshelf_bench.measure import use_threads


@dataclass(frozen=True)
class EngineOptions:
    """How to load an engine: the arguments of `Engine.load`, and the threads of torch (0: its own choice)."""

    model: str = "kvshelf-tiny"
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 1
    weights: str = "plain"

    def configure(self) -> None:
        """Sets the threads of this process, and hides the bars of transformers: the bench has its own."""
        use_threads(self.threads)
        transformers.utils.logging.disable_progress_bar()

    def load(self) -> Engine:
        """An engine in this process, after `configure`."""
        self.configure()
        return Engine.load(self.model, device=self.device, dtype=self.dtype, weights=self.weights)
