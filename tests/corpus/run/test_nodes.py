"""A batch on a Ray cluster of several nodes, which are processes of this machine, with the shelf in Redis."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from kvshelf.store.url import StoreConfig
from tests.corpus.hostile import corpus
from tests.store.redis.servers import PATIENT, ValkeyServer

pytestmark = pytest.mark.timeout(1500)


@pytest.mark.faults
def test_a_node_that_dies_takes_no_row_with_it(tmp_path: Path, tiny_folder: Path, soak: bool) -> None:
    """One replica is on each node; the second node is killed when some rows are done."""
    if not soak:
        pytest.skip("two Ray nodes take a minute to start; `make soak` runs this")
    rows = corpus(200, tokens=(2000, 6000))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    journal = tmp_path / "out.jsonl.journal"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        doomed = cluster.add_node(num_cpus=1)
        with ValkeyServer(tmp_path) as server:
            command = [sys.executable, "-m", "kvshelf", "batch", "rows.jsonl", "--output", "out.jsonl", "--json"]
            command += [f"--model={tiny_folder}", "--store", server.url + PATIENT, "--replicas", "2"]
            command += ["--address", cluster.address]
            clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSHELF_")}
            process = subprocess.Popen(command, cwd=tmp_path, env=clean, stdout=subprocess.PIPE, text=True)
            deadline = time.monotonic() + 600
            while not journal.exists() or journal.read_bytes().count(b"\n") < 20:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            cluster.remove_node(doomed, allow_graceful=False)
            said, _ = process.communicate(timeout=900)
            assert process.returncode == 0, said
            summary = json.loads(said)
            assert (summary["state"], summary["done"], summary["failed"]) == ("completed", len(rows), 0)
            assert len(summary["workers"]) >= 2
            lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
            assert {line["custom_id"] for line in lines} == {row["custom_id"] for row in rows}
            with StoreConfig(server.url + PATIENT).open() as shelf:
                assert list(shelf.check()) == []
                assert shelf.usage().caches == len(rows)
                assert shelf.requests.unfinished() == []
    finally:
        cluster.shutdown()
