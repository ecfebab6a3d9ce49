"""A real vLLM on the CPU with the bundled model, and a sealed shelf that it reads. Needs an environment with vLLM, as
`make test-vllm` makes it; in any other one there are no tests here."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch

from kvshelf.artifact.transforms import Transforms
from kvshelf.integrations.vllm.request import is_ragged
from kvshelf.model.calibration import OWN_FOLDER, TRANSFORMS_BESIDE_THE_WEIGHTS
from kvshelf.samples.tasks import TaskDocument, make_facts, write_document
from kvshelf.store.base import Store
from kvshelf.store.manifest import Manifest
from kvshelf.store.rules import Rules
from kvshelf.store.sealing.keyring import Keyring
from kvshelf.store.url import open_store
from tests.conftest import TOKENIZER

if TYPE_CHECKING:
    from kvshelf.engine.engine import Engine

if find_spec("vllm") is None:
    collect_ignore_glob = ["*.py"]

MODULE = "tests.integrations_vllm.losing"


def document(number: int) -> TaskDocument:
    """A text of about 900 words with four facts, and a question about each."""
    chance = random.Random(number)
    return write_document(chance, make_facts(chance, [4] * 4), "prose", 900, lambda text: len(text.split()))


@dataclass(frozen=True)
class Serving:
    """vLLM in this process, and an engine of kvshelf with the same weights. One token is not enough to tell two answers
    apart, so both go on behind the model's end."""

    llm: Any
    engine: Engine
    store: Store
    home: Path

    def blob(self, cache: Manifest) -> Path:
        """The file of a cache."""
        (path,) = (self.home / "blobs").glob(f"{cache.id.removeprefix('kvs_')}-*.kvb")
        return path

    def put(
        self, text: str, *, codec: str = "none", ttl_s: float | None = None, tenant: str = "default", **how: Any
    ) -> Manifest:
        encoded = self.engine.encoded(self.engine.compress(text, **how), codec)
        return self.store.put(encoded, codec=codec, ttl_s=ttl_s, tenant=tenant)

    def ask(self, *requests: Any, **sampling: Any) -> list[Any]:
        """The outputs of vLLM for requests of `shelf_request`, or for pairs as `offline`; all in one call."""
        from vllm import SamplingParams

        pairs = [request if isinstance(request, tuple) else request.offline for request in requests]
        options = {"temperature": 0, "max_tokens": 12, "ignore_eos": True} | sampling
        params = [SamplingParams(**options, extra_args=extra) for _, extra in pairs]
        return list(self.llm.generate([prompt for prompt, _ in pairs], params, use_tqdm=False))

    def request(self, cache: Manifest, question: str) -> Any:
        from kvshelf.integrations.vllm import shelf_request

        return shelf_request(cache, question, self.llm.get_tokenizer())

    def own(self, cache: Manifest, question: str, tokens: int = 12) -> list[int]:
        """The greedy answer of kvshelf's engine from the same cache, exported to the places 0 to K - 1; a ragged one,
        which cannot be, is asked as it stands."""
        stored = self.store.get(cache.id, tenant=cache.tenant)
        ids, said = self.engine.encode_query(stored, question), []
        prefix = self.engine.attached(stored) if is_ragged(cache) else nullcontext(self.engine.export(stored))
        with torch.no_grad(), prefix as past:
            for _ in range(tokens):
                logits = self.engine.model(torch.tensor([ids]), past_key_values=past).logits
                ids = [int(logits[0, -1].argmax())]
                said += ids
        return said


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model without its transforms, which the shelf has and a service does not give away."""
    folder, without = tmp_path_factory.mktemp("vllm") / "model", shutil.ignore_patterns(TRANSFORMS_BESIDE_THE_WEIGHTS)
    return Path(shutil.copytree(TOKENIZER, folder, ignore=without))


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """`kv_connector_extra_config` for a sealed shelf."""
    home = tmp_path_factory.mktemp("shelf")
    key = home / "key"
    key.touch(mode=0o600)
    key.write_text(os.urandom(32).hex())
    return {"store": f"disk://{home}/home", "encryption_key_file": str(key)}


@pytest.fixture(scope="session")
def store(shelf: dict[str, str]) -> Iterator[Store]:
    with open_store(shelf["store"], rules=Rules(keyring=Keyring.read(shelf["encryption_key_file"]))) as opened:
        transforms = (TOKENIZER / OWN_FOLDER / TRANSFORMS_BESIDE_THE_WEIGHTS).read_bytes()
        opened.transforms.keep(Transforms.from_bytes(transforms).digest, transforms)
        yield opened


@pytest.fixture(scope="session")
def serving(tiny: Engine, model_folder: Path, shelf: dict[str, str], store: Store) -> Iterator[Serving]:
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        from vllm import LLM
        from vllm.config import KVTransferConfig

        connector = KVTransferConfig(
            kv_connector="LosingConnector",
            kv_connector_module_path=MODULE,
            kv_role="kv_consumer",
            kv_connector_extra_config=shelf,
        )
        llm = LLM(
            str(model_folder), dtype="float32", enforce_eager=True, max_model_len=4096, kv_transfer_config=connector
        )
        home = Path(shelf["store"].removeprefix("disk://"))
        yield Serving(llm, tiny, store, home)
        llm.llm_engine.engine_core.shutdown()


@contextmanager
def served(
    model_folder: Path,
    shelf: dict[str, Any],
    log: Path,
    *options: str,
    connector: tuple[str, str] = ("ShelfConnector", "kvshelf.integrations.vllm"),
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """vLLM as a server, and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    name, module = connector
    transfer = {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": shelf,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_folder)]
    command += ["--dtype", "float32", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--kv-transfer-config", json.dumps(transfer), *options]
    cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with log.open("w") as written:
        process = subprocess.Popen(
            command, env=os.environ | cpu, stdout=written, stderr=written, start_new_session=True
        )
    try:
        _wait(f"http://127.0.0.1:{port}", process, log)
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its engine, where it was killed


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    while process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=120).is_success:
                return
        except httpx.ConnectError:
            time.sleep(0.5)
    raise AssertionError(f"vLLM did not start:\n{log.read_text(errors='replace')[-4000:]}")
