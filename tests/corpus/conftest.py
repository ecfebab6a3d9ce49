"""A Ray cluster for the tests of runs, with replicas that documents can harm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvshelf.store.url import StoreConfig
from kvshelf.workers.cluster.connect import ray_cluster
from kvshelf.workers.cluster.remote import RemoteEngine
from tests.corpus.hostile import vulnerable


@dataclass(frozen=True)
class RunCluster:
    """A Ray cluster for runs: the replicas of one small model in it, and the shelf they write to."""

    engines: dict[str, RemoteEngine]
    store: StoreConfig


@pytest.fixture(scope="package")
def run_cluster(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunCluster]:
    """Ray on this machine for the tests of this folder, one replica in it, and a shelf on disk."""
    from kvshelf.workers.cluster import deployment

    store = StoreConfig(f"disk://{tmp_path_factory.mktemp('corpus')}/home")
    with ray_cluster(None, min_cpus=2):
        config = deployment.ReplicaConfig(str(tiny_folder), store, threads=1, begin=vulnerable)
        engines = deployment.deploy([config])
        deployment.await_running(engines.values(), deadline_s=200)
        yield RunCluster(engines, store)
