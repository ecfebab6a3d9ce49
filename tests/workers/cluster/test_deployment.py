"""What surrounds replicas in Ray. That they run, die and come back is tested over HTTP, in tests/service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvshelf import errors
from kvshelf.store.url import StoreConfig
from kvshelf.workers.cluster.deployment import (
    ReplicaConfig,
    app_name,
    require_gpus,
    resources_of,
    startup_error,
)
from kvshelf.workers.cluster.served import served_name

TRACEBACK = """The deployment failed to start 1 times in a row. Error:
Traceback (most recent call last):
  File "model.py", line 42, in load
OSError: no such file

kvshelf.errors.StoreUnavailable: the first error

During handling of the above exception, another exception occurred:

  File "deployment.py", line 59, in __init__
kvshelf.errors.InvalidRequest: the model 'x' cannot be loaded: no such file
Look again.

"""


def test_the_cause_of_a_failed_start_is_raised_as_itself() -> None:
    error = startup_error("x", TRACEBACK)
    assert type(error) is errors.InvalidRequest
    assert error.message == "the model 'x' cannot be loaded: no such file\nLook again."
    foreign = startup_error("x", "Traceback\n  File y\nMemoryError: too big\n")
    assert type(foreign) is errors.NoWorker
    assert "MemoryError: too big" in foreign.message


def test_a_folder_goes_by_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    assert served_name(str(tmp_path / "my-model")) == served_name(f"{tmp_path}/my-model/") == "my-model"
    assert served_name("some-org/some-model") == "some-org/some-model"
    assert app_name("some-org/some-model", "0300").startswith("kvshelf-some-org-some-model-job0300-")
    assert app_name("m", "0300") != app_name("m", "0300")  # two services on one cluster


def test_a_device_that_is_named_decides_what_a_replica_takes_whatever_nodes_are_there_yet() -> None:
    def of(device: str, **fields: Any) -> dict[str, float]:
        return resources_of(ReplicaConfig("m", StoreConfig("disk:///s"), device=device, **fields))

    assert of("cuda") == of("cuda:0") == {"num_gpus": 1, "num_cpus": 0}
    assert of("cpu") == {"num_cpus": 1}
    assert of("cuda", gpus=4) == {"num_gpus": 4, "num_cpus": 0}
    assert of("cpu", gpus=2) == {"num_cpus": 2}
    assert of("cuda", memory=0.25) == {"num_gpus": 0.25, "num_cpus": 0}
    assert of("cuda", memory=40e9) == of("cuda", memory=1.0) == of("cuda"), "bytes leave the rest to other programs"
    assert of("cpu", memory=0.25) == {"num_cpus": 1}


def test_more_gpus_than_there_are_is_refused_where_no_node_can_join() -> None:
    """On another cluster it is not: its head may have no GPU, and a node with one may join later."""
    configs = [ReplicaConfig("m", StoreConfig("disk:///s"), device=device) for device in ("cuda", "cpu", "cuda:0")]
    with pytest.raises(errors.InvalidRequest, match=r"the replicas take 4 GPUs, and Ray finds 3 .* --device cpu"):
        require_gpus(configs, 2, 3, local=True)
    require_gpus(configs, 2, 4, local=True)
    require_gpus(configs, 2, 0, local=False)


def test_replicas_of_a_share_take_the_gpus_that_hold_them_whole() -> None:
    def configs(models: int, memory: float) -> list[ReplicaConfig]:
        return [
            ReplicaConfig(f"m{number}", StoreConfig("disk:///s"), device="cuda", memory=memory)
            for number in range(models)
        ]

    require_gpus(configs(2, 0.5), 1, 1, local=True)
    require_gpus(configs(2, 0.3), 3, 2, local=True)
    with pytest.raises(errors.InvalidRequest, match=r"take 2 GPUs, and Ray finds 1 .*\(KVSHELF_GPU_MEMORY=0.5"):
        require_gpus(configs(2, 0.6), 1, 1, local=True)
