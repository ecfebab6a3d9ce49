"""The model that a bench of speed measures, in a folder that another process can load it from too."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from kvshelf.bench.speed.random_model import load_random_model, random_layers, save_random_model
from kvshelf.workers.engine.engine import Engine
from kvshelf.workers.model.devices import chosen_device
from kvshelf.workers.model.loading import BUNDLED, bundled_folder
from kvshelf.workers.model.prepacking import prepack

QUESTION_TOKENS = 32
"""Tokens of every question that a bench of speed asks."""


@dataclass(frozen=True)
class Subject:
    """An engine, and what loads the same model elsewhere: a local folder or a hub id."""

    engine: Engine
    source: str

    @property
    def device(self) -> torch.device:
        return torch.device(self.engine.model.device)

    @property
    def dtype(self) -> str:
        return str(self.engine.model.dtype).removeprefix("torch.")

    def tokens(self, count: int, seed: int) -> list[int]:
        """Random token ids. What a document says does not change what its prefill costs."""
        return random.Random(seed).choices(range(self.engine.model.config.vocab_size), k=count)


@contextmanager
def load_subject(name: str, device: str, dtype: str, threads: int) -> Iterator[Subject]:
    """`name` is a bundled model, a local folder, a hub id, or "random:8" for a random Llama of 8 layers.

    `threads` is for torch; 0 leaves its own choice. The model is as replicas have it, prepacked, for everything that is
    measured, what stands beside kvshelf included.
    """
    if threads:
        torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    with _engine(name, device, dtype) as (engine, source):
        prepack(engine.model)
        yield Subject(engine, source)


@contextmanager
def _engine(name: str, device: str, dtype: str) -> Iterator[tuple[Engine, str]]:
    layers = random_layers(name)
    if layers is None:
        yield Engine.load(name, device=device, dtype=dtype), bundled_folder(name) if name in BUNDLED else name
        return
    with tempfile.TemporaryDirectory(prefix="kvshelf-bench-") as folder:
        save_random_model(Path(folder), layers)
        yield Engine(load_random_model(Path(folder), chosen_device(device), dtype), name=name), folder
