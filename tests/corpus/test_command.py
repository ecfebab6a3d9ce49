"""`kvshelf batch` as a process that is interrupted, killed and started again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from kvshelf.cli import app
from kvshelf.cli.batch import BatchJob, mention_service
from kvshelf.store.url import StoreConfig
from tests.conftest import _descendants
from tests.corpus.hostile import corpus
from tests.corpus.objects import objects, s3_server
from tests.corpus.results import failure
from tests.service.files import pdf

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def rows(tmp_path: Path, soak: bool) -> list[dict[str, Any]]:
    """A corpus whose batch runs long enough to kill it."""
    documents = corpus(400, tokens=(2000, 6000)) if soak else corpus(60, tokens=(1000, 3000))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents) + "no json\n")
    return documents


@pytest.fixture
def begin(tmp_path: Path, tiny_folder: Path) -> Callable[..., subprocess.Popen[str]]:
    def begin(*options: str, output: str = "out.jsonl", rows: str = "rows.jsonl") -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kvshelf", "batch", rows, "--output", output, f"--model={tiny_folder}"]
        command += ["--store", f"disk://{tmp_path}/shelf", "--policy", "knorm", *options]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSHELF_")}
        return subprocess.Popen(
            command, cwd=tmp_path, env=clean, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return begin


def end(process: subprocess.Popen[str], code: int) -> tuple[str, str]:
    said, noted = process.communicate(timeout=600)
    assert process.returncode == code, f"{said}\n{noted[-4000:]}"
    return said, noted


def output(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def lines_kept(folder: Path) -> int:
    """Rows in the journal; its first line identifies the batch."""
    journal = folder / "out.jsonl.journal"
    return journal.read_bytes().count(b"\n") - 1 if journal.exists() else 0


def until_kept(folder: Path, process: subprocess.Popen[str], lines: int) -> None:
    deadline = time.monotonic() + 400
    while lines_kept(folder) < lines:
        assert process.poll() is None, "it ended before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def kill(process: subprocess.Popen[str]) -> None:
    """Kill the process and all its descendants, as a power cut would."""
    for pid in [process.pid, *_descendants(process.pid)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.communicate()


def refused_with_this_journal(folder: Path, model: Path) -> None:
    """The same output with another model or store is refused: the output would mix two batches."""
    (folder / "other").symlink_to(model)
    shelves = f"disk://{folder}/shelf", f"disk://{folder}/another"
    for chosen, shelf in ((folder / "other", shelves[0]), (model, shelves[1])):
        command = ["batch", str(folder / "rows.jsonl"), "--output", str(folder / "out.jsonl"), "--policy", "knorm"]
        done = CliRunner().invoke(app, [*command, "--model", str(chosen), "--store", shelf], env={"COLUMNS": "400"})
        changed = "store was" if chosen == model else "model was"
        assert (done.exit_code, changed in done.output) == (2, True), done.output


@pytest.mark.faults
def test_a_batch_that_is_killed_and_one_that_is_interrupted_go_on(
    tmp_path: Path,
    tiny_folder: Path,
    rows: list[dict[str, Any]],
    begin: Callable[..., subprocess.Popen[str]],
    soak: bool,
) -> None:
    process = begin()
    until_kept(tmp_path, process, 5)
    kill(process)
    assert not (tmp_path / "out.jsonl").exists()

    before = lines_kept(tmp_path)  # which come again, reused, before any other
    process = begin()
    until_kept(tmp_path, process, 2 * before + 5)
    process.send_signal(signal.SIGINT)
    _, noted = end(process, 130)
    assert "Run the same command again to go on" in noted
    partial = output(tmp_path / "out.jsonl")
    assert 0 < len(partial) < len(rows)
    refused_with_this_journal(tmp_path, tiny_folder)
    with (tmp_path / "out.jsonl.journal").open("ab") as journal:  # a row of a file that has been removed since
        journal.write(json.dumps(failure(1, source="gone.jsonl").to_dict()).encode() + b"\n")

    said, noted = end(begin("--report", "morning.html"), 1)
    assert said.strip() == "out.jsonl"
    match = re.search(r"(\d+) documents on the shelf, (\d+) of them before; (\d+) failed", noted)
    assert match is not None
    done, reused, failed = map(int, match.groups())
    assert (done, failed) == (len(rows), 1)
    assert reused >= len([line for line in partial if "cache_id" in line])
    lines = output(tmp_path / "out.jsonl")
    assert {line["custom_id"] for line in lines} == {None, *(row["custom_id"] for row in rows)}
    assert len(lines) == len(rows) + 1
    assert [line["line"] for line in lines if "error" in line] == [len(rows) + 1]
    assert lines_kept(tmp_path) == 0
    assert "not JSON" in (tmp_path / "morning.html").read_text()
    with StoreConfig(f"disk://{tmp_path}/shelf").open() as shelf:
        assert list(shelf.check()) == []
        assert shelf.usage().caches == len(rows)
        assert shelf.sweep(now=time.time() + 3600).orphans >= 0
        assert list(shelf.check()) == []

    if not soak:  # another output is another batch: what follows takes as long as all before
        return
    said, _ = end(begin("--json", output="again.parquet"), 1)
    summary = json.loads(said)
    assert (summary["state"], summary["done"], summary["reused"]) == ("completed", len(rows), len(rows))
    assert (summary["gpu_hours"], summary["tokens_per_s"]) == (0.0, 0.0)
    table = pq.read_table(tmp_path / "again.parquet").to_pylist()
    assert {row["cache_id"] for row in table} == {line.get("cache_id") for line in lines}


def test_what_the_command_writes_beside_its_input_is_no_input_of_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written = ["out.jsonl", "out.jsonl.journal", "out.jsonl.partial", "morning.html", "morning.html.partial"]
    for name in ("one.txt", "jsonl", *written):
        Path(name).write_text("x")
    job = BatchJob(".", Path("out.jsonl"), Path("morning.html"), {}, {}, False)
    assert [file.name for file in job.corpus().files] == ["jsonl", "one.txt"]


@pytest.mark.slow
def test_a_batch_into_s3_says_what_a_user_needs_and_another_one_replaces_nothing(
    tmp_path: Path, begin: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "a.html").write_text("<p>The lock keeper counts nineteen barges.</p>")
    (folder / "b.pdf").write_bytes(pdf("The tide is high."))
    (folder / "c.pdf").write_bytes(b"%PDF-1.7 and nothing of the kind")
    with s3_server(monkeypatch) as bucket:
        said, noted = end(begin("--report", "morning.html", rows="mixed", output=f"s3://{bucket}/night"), 1)
        assert said == f"s3://{bucket}/night/results.jsonl\n"
        *progress, last = noted.splitlines()
        assert all(re.match(r"(running|completed)[:, ]", line) for line in progress), noted
        assert last.startswith("2 documents on the shelf, 0 of them before; 1 failed; ")
        kept = objects(bucket)
        lines = [json.loads(line) for line in kept["night/results.jsonl"].splitlines()]
        assert {line["custom_id"]: line.get("error", {}).get("code") for line in lines} == {
            "a.html": None,
            "b.pdf": None,
            "c.pdf": "invalid_request",
        }
        arguments = ["batch", str(folder), "--output", f"s3://{bucket}/night", "--store", f"disk://{tmp_path}/shelf"]
        done = CliRunner().invoke(app, [*arguments, "--policy", "snapkv"], env={"COLUMNS": "400"})
        assert done.exit_code == 2
        assert 'policy was "knorm" and is "snapkv"' in done.output
        assert objects(bucket) == kept
    report = (tmp_path / "morning.html").read_text()
    assert all(words in report for words in (str(folder), "knorm", "compression ratio", "codec"))


def test_a_service_of_this_machine_is_told_of(
    service_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVSHELF_URL", service_url)
    mention_service(8765)
    assert f"A service listens at {service_url}. This batch starts a model of its own" in capsys.readouterr().err
    monkeypatch.setenv("KVSHELF_URL", "http://127.0.0.1:1")
    mention_service(8765)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--compression-ratio", "2"], "compression_ratio"),
        (["--policy", "none-such"], "none-such"),
        (["--policy", "knorm", "--param", "nothing=1"], "nothing"),
        (["--window", "late"], "22:00-06:00"),
        (["--document-timeout", "0"], "--document-timeout"),
        (["--report", "morning.md"], "end its name in .html"),
        (["--output", "out.csv"], ".jsonl"),
        (["--output", "nowhere/out.jsonl"], "nowhere"),
        (["--output", "gs://bucket/out.jsonl"], "s3://"),
        (["none.jsonl"], "none.jsonl"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_batch_that_cannot_be_done_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"document": "x"}\n')
    arguments = options if options[0].endswith(".jsonl") else ["rows.jsonl", *options]
    if "--output" not in arguments:
        arguments = [*arguments, "--output", "out.jsonl"]
    done = CliRunner().invoke(app, ["batch", *arguments, "--store", f"disk://{tmp_path}/shelf"], env={"COLUMNS": "400"})
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.jsonl"]


SERVICE = {"KVSHELF_URL": "http://127.0.0.1:1", "COLUMNS": "400"}


@pytest.mark.parametrize("named", [True, False], ids=["--url", "KVSHELF_URL"])
@pytest.mark.parametrize(
    "options",
    [
        ["--replicas", "2"],
        ["--address", "auto"],
        ["--device", "cpu"],
        ["--dtype", "float32"],
        ["--encryption-key-file", "keys"],
        ["--model", "one", "--model", "two"],
    ],
    ids=lambda options: options[0],
)
def test_options_that_a_service_would_pass_over_are_refused(tmp_path: Path, options: list[str], named: bool) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"document": "x"}\n')
    arguments = [
        str(rows),
        "--output",
        str(tmp_path / "out.jsonl"),
        *options,
        *(["--url", "http://127.0.0.1:1"] * named),
    ]
    done = CliRunner().invoke(app, ["batch", *arguments], env=SERVICE)
    assert done.exit_code == 2, done.output
    assert options[0] in done.output


def test_a_store_on_the_command_line_counts_more_than_a_service_in_the_environment(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"document": "x"}\n')
    arguments = [str(rows), "--output", str(tmp_path / "out.jsonl"), "--store", f"disk://{tmp_path}/shelf"]
    done = CliRunner().invoke(app, ["batch", *arguments, "--policy", "knorm", "--param", "nothing=1"], env=SERVICE)
    assert (done.exit_code, "nothing" in done.output) == (2, True), (
        done.output
    )  # a service would say it, not the command
    done = CliRunner().invoke(app, ["batch", *arguments, "--url", "http://127.0.0.1:1"], env=SERVICE)
    assert (done.exit_code, "--store" in done.output) == (2, True), done.output
