"""What cannot start is refused before Ray starts, in seconds, with the reason and the way out."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvshelf.errors import InvalidRequest, MissingExtra, NoWorker, OutOfMemory, PolicyUnsupported
from kvshelf.service.process.preflight import memory_plan, require_startable
from kvshelf.service.settings import Settings
from kvshelf.workers.cluster.connect import _require_listener

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


MOST_S = 15.0
"""Of processor time until a bad start has ended, three times what one takes: torch and transformers alone take 4."""

OLD_CARD = """
import sys
from types import SimpleNamespace
import torch
from kvshelf.model.loading import outline
torch.cuda.is_available = lambda: True
torch.cuda.get_device_properties = lambda card: SimpleNamespace(name="Tesla T4", major=7, minor=5)
try:
    outline("kvshelf-tiny", device="cuda", dtype="bfloat16")
finally:
    assert "transformers.modeling_utils" not in sys.modules
"""
WITHOUT_WEIGHTS = """
import sys
from kvshelf.engine.engine import Engine
try:
    Engine.load("kvshelf-tiny", device="cuda")
finally:
    assert "transformers.models.auto" not in sys.modules
"""


@pytest.mark.slow
@WITHOUT_GPU
@pytest.mark.parametrize(
    ("arguments", "memory", "said"),
    [
        (["-m", "kvshelf", "serve", "--port", "0", "--device", "cuda"], None, "device 'cuda' cannot be used: PyTorch"),
        (["-m", "kvshelf", "serve", "--port", "0", "--device", "cpu"], "1GiB", "does not fit on cpu: it needs"),
        (["-m", "kvshelf", "doctor", "--device", "cuda"], None, "device 'cuda' cannot be used: PyTorch"),
        (["-m", "kvshelf", "doctor", "--device", "cpu"], "1GiB", "does not fit on cpu: it needs"),
        (["-c", WITHOUT_WEIGHTS], None, "device 'cuda' cannot be used: PyTorch"),
        (["-c", OLD_CARD], None, "Tesla T4 (compute capability 7.5) multiplies no bfloat16"),
    ],
)
def test_a_bad_start_is_named_in_seconds(arguments: list[str], memory: str | None, said: str, tmp_path: Path) -> None:
    """The whole process; what names it has not begun to read a model, start Ray, or try a model in another process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSHELF_")}
    environment = clean | {"KVSHELF_STORE": f"disk://{tmp_path}/shelf", "OMP_NUM_THREADS": "1"}
    environment |= {} if memory is None else {"KVSHELF_GPU_MEMORY": memory}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = done.stdout + done.stderr
    assert done.returncode == (2 if "serve" in arguments and memory is None else 1), output
    assert said in output
    assert "Ray" not in output
    assert "AssertionError" not in output
    if "doctor" in arguments:
        assert "kvshelf-tiny was not tried" in output
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MOST_S


@WITHOUT_GPU
def test_only_a_local_cluster_needs_the_gpu_here() -> None:
    with pytest.raises(InvalidRequest, match="device 'cuda:0' cannot be used"):
        require_startable(Settings(device="cuda:0"))
    require_startable(Settings(device="cuda", address="head:6379"))
    require_startable(Settings(device="auto"))
    require_startable(Settings(device="spread"))


def test_a_model_that_has_no_room_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(OutOfMemory, match=r"'kvshelf-tiny' does not fit on cpu: it needs .* may use 1,073,741,824"):
        require_startable(Settings(device="cpu", gpu_memory="1GiB"))  # type: ignore[arg-type]
    small = {
        "resident_bytes": 1 << 20,
        "max_suffix_bytes": 1 << 20,
        "device": "cpu",
        "gpu_memory": 12e9,
    }  # of which this process has some
    require_startable(Settings(**small))
    with pytest.raises(OutOfMemory, match="a document of 16,384 tokens"):
        require_startable(Settings(**(small | {"max_document_tokens": 16384, "resident_bytes": 11_990_000_000})))


@pytest.mark.parametrize("several", [{"gpus_per_replica": 2}, {"engine": "llama.cpp"}])
def test_what_one_process_does_not_hold_has_no_plan(several: dict[str, Any]) -> None:
    assert memory_plan(Settings(**several), "kvshelf-tiny") is None
    assert memory_plan(Settings(device="cpu"), "kvshelf-tiny") is not None


@pytest.mark.slow
def test_doctor_prints_the_plan_of_the_environment() -> None:
    """Its own default device is no wish for another one than the environment's."""
    command = [sys.executable, "-m", "kvshelf", "doctor", "--json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSHELF_")}
    done = subprocess.run(
        command,
        env=environment | {"KVSHELF_DEVICE": "spread", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    findings = {one["check"]: one for one in map(json.loads, done.stdout.splitlines())}
    assert findings["memory"]["ok"]
    assert findings["memory"]["finding"].startswith("kvshelf-tiny on cpu: ")


def test_only_a_local_cluster_needs_the_folder_here(tmp_path: Path) -> None:
    missing, empty = str(tmp_path / "none"), str(tmp_path)
    with pytest.raises(InvalidRequest, match="none' does not exist"):
        require_startable(Settings(models=("kvshelf-tiny", missing)))
    with pytest.raises(InvalidRequest, match="holds no model"):
        require_startable(Settings(models=(empty,)))
    require_startable(Settings(models=(missing, empty), address="auto"))


def test_an_adapter_that_cannot_be_merged_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted = Settings(adapters=(f"law={tmp_path}",))
    assert adapted.replica_processes == 2
    with pytest.raises(InvalidRequest, match="is no folder with adapter_config"):
        require_startable(adapted)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.safetensors").touch()
    require_startable(adapted)
    with pytest.raises(InvalidRequest, match="merged in one process"):
        require_startable(Settings(adapters=adapted.adapters, gpus_per_replica=2, device="cpu"))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InvalidRequest, match=r"needs the package peft; run: pip install"):
        require_startable(adapted)


def test_packed_weights_that_no_replica_would_load_are_refused(tmp_path: Path) -> None:
    def say(**quantized: object) -> tuple[str, ...]:
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantized}))
        return (str(tmp_path),)

    with pytest.raises(PolicyUnsupported, match="'marlin' with 4 bits, and kvshelf reads"):
        require_startable(Settings(models=say(quant_method="gptq", bits=4, checkpoint_format="marlin")))
    models = say(quant_method="awq", bits=4)
    require_startable(Settings(models=models))
    for fields in ({"device": "spread"}, {"device": "cpu", "gpus_per_replica": 2}):
        with pytest.raises(PolicyUnsupported, match="one process and on one device"):
            require_startable(Settings(models=models, **fields))
    require_startable(Settings(models=models, device="spread", address="auto"))


def test_a_service_that_asks_llama_cpp_needs_it_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    asking = Settings(engine="llama.cpp")
    with pytest.raises(MissingExtra, match="llama-cpp-python, which does not load"):
        require_startable(asking)
    require_startable(asking.model_copy(update={"address": "auto"}))


def test_only_a_local_cluster_needs_the_hub_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidRequest, match="'some-org/some-model' is not in the hub's cache"):
        require_startable(Settings(models=("some-org/some-model",)))
    require_startable(Settings(models=("some-org/some-model",), address="auto"))


def test_a_cluster_where_nothing_listens_is_named_at_once() -> None:
    """Ray itself would try for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        _require_listener(f"127.0.0.1:{port}")
        _require_listener(f"ray://127.0.0.1:{port}")
    began = time.monotonic()
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        with pytest.raises(NoWorker, match=f"no Ray cluster at '{address}'"):
            _require_listener(address)
    assert time.monotonic() - began < 5
    _require_listener("auto")
