"""A batch's journal, output, numbers and window."""

from __future__ import annotations

import datetime
import json
import os
import resource
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kvshelf.corpus.output.files import require_format, write_output
from kvshelf.corpus.row import Row, Shard
from kvshelf.corpus.run.journal import FileLines, OutputJournal
from kvshelf.corpus.run.progress import Tally, WorkHours
from kvshelf.errors import InvalidRequest, StateConflict, StorageFull
from tests.corpus.results import failure, success

ABOUT = {"input": "in.jsonl", "fields": {"policy": "knorm"}}
LEVELS = ({"cache_id": "kvs_1", "compression_ratio": 0.5}, {"cache_id": "kvs_2", "compression_ratio": 0.75})


def kept(path: Path) -> dict[int, Row]:
    with OutputJournal(FileLines(path), ABOUT) as journal:
        results = list(journal.finished())
    assert len({result.key for result in results}) == len(results)
    return {result.line: result for result in results}


def test_a_journal_has_the_last_result_of_each_row(tmp_path: Path) -> None:
    path = tmp_path / "out.journal"
    with OutputJournal(FileLines(path), ABOUT) as journal:
        journal.append([success(1, quality={"agreement": 0.5}), failure(2)])
        journal.append([success(3, levels=LEVELS, custom_id="ü 漢\n")])
    with OutputJournal(FileLines(path), ABOUT) as journal:
        journal.append([success(2), success(1, reused=True)])
        journal.append([failure(4)])
    assert kept(path) == {
        1: success(1, reused=True),
        2: success(2),
        3: success(3, levels=LEVELS, custom_id="ü 漢\n"),
        4: failure(4),
    }


def test_what_a_run_has_not_come_by_is_left_out_when_it_is_over(tmp_path: Path) -> None:
    """A file that was removed since, say; until then all that is known is told."""
    path = tmp_path / "j"
    with OutputJournal(FileLines(path), ABOUT) as journal:
        journal.append([success(1), failure(2)])
        assert len(list(journal.finished(of_this_run=True))) == 2
    with OutputJournal(FileLines(path), ABOUT) as journal:
        assert list(journal.finished(of_this_run=True)) == []
        journal.append([success(1), success(3)])
        journal.append([success(1, reused=True)])
        assert list(journal.finished(of_this_run=True)) == [success(3), success(1, reused=True)]
    assert kept(path).keys() == {1, 2, 3}


def test_rows_of_two_files_are_two_rows(tmp_path: Path) -> None:
    with OutputJournal(FileLines(tmp_path / "j"), ABOUT) as journal:
        journal.append([Row("a", 1), Row("b", 1)])
        assert {result.key for result in journal.finished()} == {("a", 1), ("b", 1)}


@pytest.mark.parametrize("left", [b'{"source": "in.jso', b"\0\0\0", b""])
def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path, left: bytes) -> None:
    path = tmp_path / "j"
    with OutputJournal(FileLines(path), ABOUT) as journal:
        journal.append([success(1)])
    with path.open("ab") as file:
        file.write(left)
    with OutputJournal(FileLines(path), ABOUT) as journal:
        journal.append([success(2)])
    assert kept(path).keys() == {1, 2}
    assert all(json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.parametrize("kept_bytes", [0, 1, 20])
def test_a_journal_that_was_only_begun_is_begun_anew(tmp_path: Path, kept_bytes: int) -> None:
    path = tmp_path / "j"
    with OutputJournal(FileLines(path), ABOUT):
        pass
    os.truncate(path, kept_bytes)
    assert kept(path) == {}


@pytest.mark.parametrize("text", ["my notes\n", "my notes", "\n", "{}\n"])
def test_what_is_no_journal_is_not_touched(tmp_path: Path, text: str) -> None:
    path = tmp_path / "j"
    path.write_text(text)
    with pytest.raises((InvalidRequest, StateConflict)), OutputJournal(FileLines(path), ABOUT):
        pass
    assert path.read_text() == text


def test_the_journal_of_another_batch_is_refused(tmp_path: Path) -> None:
    """While rows or an output are there, whose ids the other batch would replace."""
    output, path = tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal"
    other = {**ABOUT, "fields": {"policy": "snapkv", "codec": "int8"}}
    with OutputJournal(FileLines(path), ABOUT, output=output) as journal:
        journal.append([success(1)])
    with pytest.raises(StateConflict) as refusal, OutputJournal(FileLines(path), other, output=output):
        pass
    assert (
        'policy was "knorm" and is "snapkv"; codec was not given and is "int8". Give another' in refusal.value.message
    )
    with OutputJournal(FileLines(path), ABOUT, output=output) as journal:
        assert [row.line for row in journal.finished()] == [1]
        output.write_text("its results\n")
        journal.complete()
        assert list(journal.finished()) == []
    with (
        pytest.raises(StateConflict, match="belongs to another batch"),
        OutputJournal(FileLines(path), other, output=output),
    ):
        pass
    output.unlink()
    with OutputJournal(FileLines(path), other, output=output) as journal:
        journal.append([success(1)])


def test_an_output_that_no_batch_wrote_is_not_replaced(tmp_path: Path) -> None:
    output, path = tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal"
    output.write_text("my rows\n")
    with pytest.raises(StateConflict, match="is there already"), OutputJournal(FileLines(path), ABOUT, output=output):
        pass
    assert not path.exists()


def test_one_run_at_a_time_has_a_journal(tmp_path: Path) -> None:
    first, second = OutputJournal(FileLines(tmp_path / "j"), ABOUT), OutputJournal(FileLines(tmp_path / "j"), ABOUT)
    with first, pytest.raises(StateConflict, match="another run"), second:
        pass
    assert kept(tmp_path / "j") == {}


def test_a_full_disk_leaves_the_journal_whole(tmp_path: Path) -> None:
    """The kernel refuses the second write in its middle; what is appended when there is room again is read."""
    path = tmp_path / "j"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with OutputJournal(FileLines(path), ABOUT) as journal:
        journal.append([success(1)])
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 600, hard))
        try:
            with pytest.raises(StorageFull, match="no room for the results"):
                journal.append([success(2, custom_id="x" * 1000)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        journal.append([Row("in.jsonl", 2)])  # shorter than what was left behind
    assert kept(path).keys() == {1, 2}
    assert path.read_bytes().count(b"\n") == 3
    assert path.read_bytes().endswith(b"}\n")


# Output


def test_the_lines_of_the_output_are_the_contract() -> None:
    assert success(7, quality={"agreement": 0.9}).output(file=False) == {
        "custom_id": "row-7",
        "cache_id": "kvs_7",
        "document_id": "doc_7",
        "tokens": {"document": 100, "kept": 25},
        "bytes": {"full": 1000, "full_16bit": 500, "stored": 250},
        "quality": {"agreement": 0.9},
        "attempts": 1,
        "seconds": 0.5,
        "reused": False,
    }
    assert failure(17).output(file=False) == {
        "custom_id": None,
        "line": 17,
        "error": {"code": "worker_crashed", "message": "it died"},
        "attempts": 3,
    }
    assert success(1).output(file=True)["file"] == failure(1).output(file=True)["file"] == "in.jsonl"
    assert success(3, custom_id=None).output(file=False)["line"] == 3
    assert success(3, levels=LEVELS).output(file=False)["levels"] == list(LEVELS)


def test_the_output_is_json_lines_or_parquet(tmp_path: Path) -> None:
    results = [
        success(1, quality={"agreement": 0.9, "low": None, "high": 0.95, "kl": 0.1, "cues": 32, "version": 1}),
        failure(2),
    ]
    results += [success(3, levels=LEVELS), success(4, custom_id='=1+1,"\n漢')]
    assert write_output(tmp_path / "out.jsonl", iter(results), file=True) == 4
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert lines == [result.output(file=True) for result in results]
    assert write_output(tmp_path / "out.parquet", iter(results), file=True) == 4
    table = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["custom_id"] for row in table] == ["row-1", None, "row-3", '=1+1,"\n漢']
    assert table[0]["tokens"] == {"document": 100, "kept": 25}
    assert table[0]["quality"] == {"agreement": 0.9, "low": None, "high": 0.95, "kl": 0.1, "cues": 32}
    assert table[1]["error"] == {"code": "worker_crashed", "message": "it died"}
    assert json.loads(table[2]["levels"]) == list(LEVELS)
    assert not list(tmp_path.glob("*.partial"))


def test_an_output_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write_output(path, iter([success(1)]), file=False)
    before = path.read_bytes()

    def breaks():  # type: ignore[no-untyped-def]
        yield success(2)
        raise StorageFull("no more")

    with pytest.raises(StorageFull):
        write_output(path, breaks(), file=False)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize("name", ["out", "out.csv", "nowhere/out.jsonl"])
def test_an_output_that_could_not_be_written_is_refused_before_any_work(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest):
        require_format(tmp_path / name)


# Numbers


class Part(Shard):
    def __init__(self, nbytes: int, rows: int | None) -> None:
        self.nbytes = nbytes
        self.rows = rows

    def read(self):  # type: ignore[no-untyped-def]
        return iter(())


def test_a_tally_adds_up() -> None:
    tally = Tally()
    tally.expect([Part(60, 6), Part(40, 4)])
    tally.tick(2.0)
    for result in (success(1, worker="a"), success(2, worker="a"), success(3, worker="b"), failure(4, seconds=1.0)):
        tally.add(result)
    tally.add(success(5, reused=True, seconds=0.0))
    counts = tally.counts()
    assert (counts["total"], counts["done"], counts["reused"], counts["failed"]) == (10, 4, 1, 1)
    assert (counts["tokens"], counts["bytes_full"], counts["bytes_stored"]) == (400, 4000, 1000)
    assert counts["bytes_full_16bit"] == 2000
    assert counts["tokens_per_s"] == 150  # of new ones
    assert counts["gpu_hours"] == pytest.approx(2.5 / 3600)
    assert (counts["workers"]["a"].done, counts["workers"]["b"].tokens) == (2, 100)
    assert counts["fraction"] == 0.5
    assert counts["eta_s"] == pytest.approx(2.0 * 50 / 40)  # what was reused says nothing about what is left


def test_a_replica_of_two_gpus_takes_two_hours_an_hour() -> None:
    tally = Tally(gpus=2)
    tally.add(success(1, seconds=1800.0))
    assert (tally.gpu_hours, tally.counts()["gpu_hours"]) == (1.0, 1.0)


def test_without_a_known_total_the_bytes_tell_how_far_it_is() -> None:
    tally = Tally()
    tally.expect([Part(60, None), Part(40, 4)])
    assert tally.counts()["eta_s"] is None
    tally.add(success(1))
    assert (tally.counts()["total"], tally.counts()["fraction"]) == (None, 0.1)
    tally.complete()
    assert (tally.counts()["total"], tally.counts()["fraction"]) == (1, 1.0)


@pytest.mark.parametrize(
    ("window", "open_at", "shut_at"),
    [
        ("22:00-06:00", ["22:00", "23:59", "00:00", "05:59"], ["06:00", "12:00", "21:59"]),
        ("9:30-17:00", ["09:30", "12:00", "16:59"], ["00:00", "09:29", "17:00"]),
    ],
)
def test_a_window_may_span_midnight(window: str, open_at: list[str], shut_at: list[str]) -> None:
    parsed = WorkHours.parse(window)
    assert [parsed.open_at(datetime.time.fromisoformat(at)) for at in open_at] == [True] * len(open_at)
    assert [parsed.open_at(datetime.time.fromisoformat(at)) for at in shut_at] == [False] * len(shut_at)
    assert WorkHours.parse(str(parsed)) == parsed


@pytest.mark.parametrize("text", ["", "22:00", "22-6", "25:00-06:00", "22:00-06:00-07:00", "06:00-06:00", "a:b-c:d"])
def test_a_window_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="window"):
        WorkHours.parse(text)


def test_a_result_crosses_processes_as_it_is() -> None:
    for result in (success(1, levels=LEVELS, quality={"agreement": 1.0}), failure(2)):
        assert Row.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    assert Row("s", 1).error is None
