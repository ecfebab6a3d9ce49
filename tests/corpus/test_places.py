"""Output, report and journal as objects in S3: each promise that they keep in a folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from kvshelf.corpus.input.files import FileCorpus
from kvshelf.corpus.output.files import require_format, write_output
from kvshelf.corpus.places import beside, opened, place, put, written
from kvshelf.corpus.run.journal import journal_of
from kvshelf.errors import InvalidRequest, StateConflict, StorageFull, StoreUnavailable
from tests.corpus.objects import objects, s3_server
from tests.corpus.results import failure, success

ABOUT = {"input": "in.jsonl", "fields": {"policy": "knorm"}}
OTHER = {"input": "in.jsonl", "fields": {"policy": "snapkv"}}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, s3_server(patch) as bucket:
        yield bucket


@pytest.fixture
def prefix(server: str, request: pytest.FixtureRequest) -> str:
    """A prefix of the test's own, without a scheme."""
    return f"{server}/{request.node.name.partition('[')[0]}"


def upload(path: str, data: bytes) -> None:
    system, _ = opened(f"s3://{path}", param="x")
    put(system, path, data)


def test_a_url_names_an_object_or_a_prefix() -> None:
    assert place("s3://b/night/out.parquet", param="--output") == "s3://b/night/out.parquet"
    assert place("s3://b/night", param="--output") == place("s3://b/night/", param="--output")
    assert place("s3://b/night/?region=x", param="--output") == "s3://b/night/results.jsonl?region=x"
    assert beside("s3://b/out.jsonl?region=x", ".journal") == "s3://b/out.jsonl.journal?region=x"
    require_format("s3://b/out.jsonl?region=x.y")
    for wrong in ("gs://b/out.jsonl", "file:///out.jsonl", "s3://key:secret@b/out.jsonl"):
        with pytest.raises(InvalidRequest) as refusal:
            place(wrong, param="--output")
        assert "secret@" not in refusal.value.message
    with pytest.raises(InvalidRequest, match=r"\.parquet"):
        require_format(place("s3://b/out.csv", param="--output"))


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_an_output_is_the_one_that_a_folder_would_get(prefix: str, tmp_path: Path, name: str) -> None:
    rows = [success(1), failure(2), success(3, custom_id="ü 漢")]
    for where in (tmp_path / name, f"s3://{prefix}/{name}"):
        write_output(where, rows, file=True)
    assert objects(prefix)[name] == (tmp_path / name).read_bytes()
    if name == "out.parquet":
        assert pq.read_table(tmp_path / name).num_rows == 3


def broken_off(url: str) -> None:
    with written(url) as target:
        target.write(b"new")
        raise ZeroDivisionError


def test_an_error_or_a_kill_leaves_the_old_object(prefix: str) -> None:
    url = f"s3://{prefix}/out.jsonl"
    with written(url) as target:
        target.write(b"old")
    with pytest.raises(ZeroDivisionError):
        broken_off(url)
    assert objects(prefix) == {"out.jsonl": b"old"}
    program = f"""
import sys
from kvshelf.corpus.places import opened, put
system, path = opened({url!r}, param="x")
print("begins", flush=True)
while True:
    put(system, path, b"n" * (64 << 20))
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.15)  # an upload of 64 MiB has begun
    process.kill()
    process.wait()
    (data,) = objects(prefix).values()
    assert data in (b"old", b"n" * (64 << 20))


class Interrupted:
    """A file system: Ctrl-C is pressed as soon as a stream is open."""

    def __init__(self, system: Any) -> None:
        self._system = system
        self.get_file_info = system.get_file_info

    def open_output_stream(self, path: str) -> Any:
        stream = self._system.open_output_stream(path)
        os.kill(os.getpid(), signal.SIGINT)
        return stream


def test_ctrl_c_publishes_no_half(prefix: str) -> None:
    """pyarrow completes the upload of a stream that is dropped, too."""
    system, path = opened(f"s3://{prefix}/out.jsonl", param="x")
    put(system, path, b"old")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            put(Interrupted(system), path, b"new")
    finally:
        signal.signal(signal.SIGINT, before)
    assert objects(prefix) == {"out.jsonl": b"new"}


def test_a_bucket_that_is_not_there_is_told(server: str) -> None:
    with pytest.raises(StorageFull, match="no-such-bucket"), written(f"s3://{server}-no-such-bucket/x.jsonl") as target:
        target.write(b"x")
    with (
        pytest.raises(StoreUnavailable, match="cannot be kept"),
        journal_of(f"s3://{server}-no-such-bucket/x.jsonl", ABOUT),
    ):
        pass


def test_a_journal_has_the_last_result_of_each_row(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvshelf.corpus.run.journal.PART_BYTES", 500)
    output = f"s3://{prefix}/out.jsonl"
    with journal_of(output, ABOUT) as journal:
        for line in range(1, 10):
            journal.append([success(line), failure(line + 100)])
        assert len(list(journal.finished())) == 18
    assert len(objects(prefix)) > 3, "several parts, and the identity"
    with journal_of(output, ABOUT) as journal:
        journal.append([success(1, reused=True), success(101)])
        assert {row.line for row in journal.finished(of_this_run=True)} == {1, 101}
        results = {row.line: row for row in journal.finished()}
        assert len(results) == 18
        assert results[1] == success(1, reused=True)
        assert results[101] == success(101)
        assert results[102] == failure(102)
        write_output(output, journal.finished(), file=False)
        journal.complete()
    assert objects(prefix).keys() == {"out.jsonl", "out.jsonl.journal/batch.json"}
    assert len(objects(prefix)["out.jsonl"].splitlines()) == 18


def test_the_output_of_another_batch_is_refused(prefix: str) -> None:
    output = f"s3://{prefix}/out.jsonl"
    with journal_of(output, ABOUT) as journal:
        journal.append([success(1)])
    with pytest.raises(StateConflict, match='policy was "knorm" and is "snapkv"'), journal_of(output, OTHER):
        pass
    with journal_of(output, ABOUT) as journal:
        write_output(output, journal.finished(), file=False)
        journal.complete()
    with pytest.raises(StateConflict, match="belongs to another batch"), journal_of(output, OTHER):
        pass
    system, path = opened(output, param="x")
    system.delete_file(path)
    with journal_of(output, OTHER) as journal:
        assert list(journal.finished()) == []
    upload(f"{prefix}/mine.jsonl", b"{}")
    with pytest.raises(StateConflict, match="is there already"), journal_of(f"s3://{prefix}/mine.jsonl", ABOUT):
        pass


def test_of_two_runs_at_once_the_second_to_end_replaces_no_output(prefix: str) -> None:
    output = f"s3://{prefix}/out.jsonl"
    with journal_of(output, ABOUT) as first, journal_of(output, ABOUT) as second:
        first.append([success(1)])
        second.append([success(2)])
        first.append([success(3)])
        assert {row.line for row in first.finished()} == {1, 2, 3}
        first.complete()
        second.append([success(4)])  # its last part, with row 2
        assert {row.line for row in second.finished()} == {2, 4}
        second.complete()
        first.append([success(5)])
    with journal_of(output, ABOUT) as first, journal_of(output, ABOUT) as second:
        first.append([success(1)])
        second.append([success(2)])
        first.complete()
        with pytest.raises(StateConflict, match="another run of this batch has completed"):
            second.finished()


def test_a_part_that_is_none_is_told(prefix: str) -> None:
    upload(f"{prefix}/out.jsonl.journal/000001-a-000001.jsonl", b"my notes\n")
    with pytest.raises(InvalidRequest, match="was not written by a batch"):
        list(journal_of(f"s3://{prefix}/out.jsonl", ABOUT).finished())


def test_what_a_batch_writes_below_its_own_input_is_no_part_of_it(prefix: str) -> None:
    for name in ("one.txt", "out.jsonl", "out.jsonl.journal/batch.json", "out.jsonl.journal/1.jsonl", "out.jsonl.md"):
        upload(f"{prefix}/{name}", b"{}")
    without = [f"s3://{prefix}/out.jsonl", f"s3://{prefix}/out.jsonl.journal", Path("one.txt")]
    assert [file.name for file in FileCorpus(f"s3://{prefix}", {}, without=without).files] == [
        "one.txt",
        "out.jsonl.md",
    ]
    assert json.loads(objects(prefix)["one.txt"]) == {}
    assert os.environ["AWS_ENDPOINT_URL"].startswith("http://127.0.0.1")
