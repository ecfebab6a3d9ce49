"""`kvshelf bench quality`: measuring, the resume file, refusals, tables and the picture."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvshelf.errors import InvalidRequest, KvshelfError, StateConflict
from kvshelf_bench.cli import app
from kvshelf_bench.engines import EngineOptions
from kvshelf_bench.quality.grid import BASELINE, Block, Changes, Grid, Row, Variant, make_grid
from kvshelf_bench.quality.measuring import ResumeFile
from kvshelf_bench.quality.outcome import Outcome, Protocol
from kvshelf_bench.quality.quality import run
from kvshelf_bench.quality.tables import quality_tables

KEYDIFF = Row(Variant("keydiff"), 0.5)


def outcome(*exact: int, stored_bytes: int = 1000, refused: str | None = None) -> Outcome:
    partial = tuple(map(float, exact))
    return Outcome("key", refused, exact, partial, 100, stored_bytes, prefill_s=1.0, compress_s=0.1)


def bench(options: str, *more: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["quality", *options.split(), *map(str, more)])
    if isinstance(result.exception, KvshelfError):
        raise result.exception
    return result.exit_code, result.stdout


# Measuring


def test_a_unit_measures_the_policy_and_not_only_the_model(tiny):
    """Keeping 5 % of a document's ends cannot answer what the whole cache can; chance has one in 10^3 per answer."""
    grid = make_grid("small", Changes(haystacks=["prose"], policies=["streaming_llm"], ratios=[0.95], documents=3))
    protocol = Protocol.of(tiny, grid.questions, grid.seed)
    hits = {BASELINE: 0, "streaming_llm": 0}
    for unit in grid.units():
        (found,) = protocol.measure(tiny, unit)
        assert found.refused is None
        assert len(found.exact) == len(found.partial) == 4
        assert found.stored_bytes > 0
        assert found.prefill_s > 0
        hits[unit.variant.policy] += sum(found.exact)
    assert hits[BASELINE] >= 10
    assert hits["streaming_llm"] <= 4


def test_the_key_changes_with_whatever_the_result_depends_on(tiny):
    protocol = Protocol.of(tiny, 4, 0)
    (unit,) = Grid((Block(("needle",), ("prose",), (300,), 1, ("keydiff",), (0.5,)),)).units()[1:]
    row = unit.rows[0]
    others = [
        Protocol.of(tiny, 3, 0).key(unit, row),
        Protocol.of(tiny, 4, 1).key(unit, row),
        Protocol("other weights", "cpu", 4, 0).key(unit, row),
        protocol.key(unit, Row(row.variant, row.removed, "int4")),
        protocol.key(unit, Row(row.variant, row.removed, exported=True)),
        protocol.key(unit, Row(row.variant, row.removed, "klt")),
        replace(protocol, transforms="0f" * 32).key(unit, Row(row.variant, row.removed, "klt")),
    ]
    assert replace(protocol, transforms="0f" * 32).key(unit, row) == protocol.key(unit, row)
    for changed in (
        make_grid(
            "small", Changes(tasks=["needle"], haystacks=["prose"], lengths=[301], policies=["keydiff"], ratios=[0.5])
        ),
        make_grid(
            "small", Changes(tasks=["needle"], haystacks=["prose"], lengths=[300], policies=["keydiff"], ratios=[0.6])
        ),
        make_grid(
            "small", Changes(tasks=["needle"], haystacks=["prose"], lengths=[300], policies=["lagkv"], ratios=[0.5])
        ),
        make_grid(
            "small",
            Changes(tasks=["needle"], haystacks=["prose"], lengths=[300], policies=["lagkv:lag=8"], ratios=[0.5]),
        ),
    ):
        other = changed.units()[1]
        others.append(protocol.key(other, other.rows[0]))
    assert len({protocol.key(unit, row), *others}) == 1 + len(others)
    assert Protocol.of(tiny, 4, 0).key(unit, row) == protocol.key(unit, row)


def test_a_policy_that_refuses_gives_a_refused_cell_and_the_run_goes_on(tmp_path):
    grid = Grid((Block(("needle",), ("prose",), (300,), 1, ("lagkv:lag=512", "keydiff"), (0.5,)),))
    summary = run(grid, EngineOptions(), tmp_path / "journal.jsonl", processes=1)
    (refused,) = [row for row in summary.rows if row.variant.policy == "lagkv"]
    assert "lag" in summary.entries[refused, grid.cells()[0]].refused
    assert summary.entries[KEYDIFF, grid.cells()[0]].refused is None
    reasons = quality_tables(summary, "title")[-1]
    assert any("lag 512" in str(cell) for column in reasons.columns for cell in column.cells)


def test_a_length_that_cannot_hold_the_facts_is_refused_before_any_work(tmp_path):
    journal = tmp_path / "journal.jsonl"
    with pytest.raises(InvalidRequest, match="16 facts do not fit into 40 tokens"):
        run(make_grid("small", Changes(lengths=[40])), EngineOptions(), journal)
    assert not journal.exists()


def test_an_exported_row_is_answered_by_plain_transformers_or_refused(tiny):
    """At half of a short document KeyDiff keeps nearly every fact; ragged heads are no prefix at all."""
    changes = Changes(
        tasks=["needle"], haystacks=["prose"], lengths=[300], policies=["keydiff", "ada:base=keydiff"], ratios=[0.5],
        documents=4,
    )  # fmt: skip
    grid = make_grid("small", changes, export=True)
    protocol = Protocol.of(tiny, grid.questions, grid.seed)
    found: dict[tuple[str, bool], list[Outcome]] = {}
    for unit in grid.units():
        for row, measured in zip(unit.rows, protocol.measure(tiny, unit), strict=True):
            found.setdefault((row.variant.policy, row.exported), []).append(measured)
    assert [one.exact for one in found["full", True]] == [one.exact for one in found["full", False]]
    assert sum(sum(one.exact) for one in found["keydiff", True]) >= 3
    assert all(one.refused is None for one in found["ada", False])
    assert all("heads" in (one.refused or "") for one in found["ada", True])


# The journal


def test_a_line_cut_off_by_a_kill_is_removed_and_the_rest_kept(tmp_path):
    path = tmp_path / "journal.jsonl"
    with ResumeFile(path) as journal:
        journal.append(outcome(1, 0), {"policy": "ü"})
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    with ResumeFile(path) as journal:
        assert journal.load() == {"key": outcome(1, 0)}
        journal.append(outcome(1), {})
    assert path.read_bytes().startswith(whole)
    assert len(path.read_bytes().splitlines()) == 2


@pytest.mark.parametrize("length", [1, 20, 60])
def test_a_first_line_cut_off_by_a_kill_is_removed(tmp_path, length):
    path = tmp_path / "journal.jsonl"
    with ResumeFile(path) as journal:
        journal.append(outcome(1), {"policy": "keydiff"})
    whole = path.read_bytes()
    path.write_bytes(whole[:length])
    with ResumeFile(path) as journal:
        assert journal.load() == {}
        journal.append(outcome(1), {"policy": "keydiff"})
    assert path.read_bytes() == whole


FOREIGN = [
    "not json\n", "[1]\n", '{"key": "a"}\n', "12\n", "a note", '{"key": "a"}', '{\n "a": 1\n}', "\na note",
    "n\xf6te\n".encode("latin-1"), "n\xf6te".encode("latin-1"), b"\x93NUMPY\x01\x00v\x00",
]  # fmt: skip


@pytest.mark.parametrize("text", FOREIGN)
def test_a_file_that_is_no_journal_is_refused_and_left_as_it_is(tmp_path, text):
    path = tmp_path / "journal.jsonl"
    data = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(data)
    with ResumeFile(path) as journal, pytest.raises(InvalidRequest, match="line 1 of"):
        journal.load()
    assert path.read_bytes() == data


def test_a_foreign_line_after_good_ones_is_refused_with_its_torn_end_in_place(tmp_path):
    path = tmp_path / "journal.jsonl"
    with ResumeFile(path) as journal:
        journal.append(outcome(1), {})
    data = path.read_bytes() + b"a note\nof two lines"
    path.write_bytes(data)
    with ResumeFile(path) as journal, pytest.raises(InvalidRequest, match="line 2 of"):
        journal.load()
    assert path.read_bytes() == data


@pytest.mark.parametrize("place", [".", "nowhere/journal.jsonl", "x" * 300])
def test_a_place_that_can_hold_no_journal_is_refused(tmp_path, place):
    with pytest.raises(InvalidRequest, match="--resume"), ResumeFile(tmp_path / place):
        pass


@pytest.mark.parametrize("place", [".", "nowhere/journal.jsonl", "x" * 300, "foreign"])
def test_what_cannot_be_resumed_is_refused_before_the_model_is_loaded(tmp_path, place):
    (tmp_path / "foreign").write_text("a note")
    with pytest.raises(InvalidRequest, match=r"--resume|line 1 of"):
        bench("--size small", "--model", tmp_path / "no-model", "--resume", tmp_path / place)
    assert (tmp_path / "foreign").read_text() == "a note"
    assert [path.name for path in tmp_path.iterdir()] == ["foreign"]


def test_two_runs_do_not_write_one_journal(tmp_path):
    path = tmp_path / "journal.jsonl"
    with ResumeFile(path), pytest.raises(StateConflict, match="another run"), ResumeFile(path):
        pass


# The command


def figures(report: Path) -> object:
    """A report without times and machine."""
    cells = ("documents", "questions", "exact", "low", "high", "partial", "bytes_per_token", "refused")
    rows = json.loads(report.read_text())["rows"]
    return [
        (row["policy"], row["removed"], {name: [cell[key] for key in cells] for name, cell in row["cells"].items()})
        for row in rows
    ]


@pytest.mark.faults
def test_a_killed_run_goes_on_where_it_stopped_with_any_number_of_processes(tmp_path):
    options = "--tasks needle --haystacks prose --lengths 400 --documents 10 --policies keydiff --ratios 0.5"
    journal, report, fresh = tmp_path / "journal.jsonl", tmp_path / "report.json", tmp_path / "fresh.json"
    command = [sys.executable, "-m", "kvshelf", "bench", "quality", *options.split(), "--resume", str(journal)]
    process = subprocess.Popen([*command, "--processes", "2"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    workers = _killed_after(process, journal, lines=3)
    kept = journal.read_bytes().rpartition(b"\n")[0]
    assert 3 <= len(kept.splitlines()) < 20, "the run was over before it was killed"
    assert _gone(workers), "a process of the killed run is still there"
    assert bench(options, "--resume", journal, "--processes", 1, "--output", report)[0] == 0
    assert journal.read_bytes().startswith(kept)
    keys = [json.loads(line)["key"] for line in journal.read_text().splitlines()]
    assert len(keys) == len(set(keys)) == 20, "something was measured twice"
    assert bench(options, "--resume", tmp_path / "other.jsonl", "--processes", 2, "--output", fresh)[0] == 0
    assert figures(report) == figures(fresh)


def _killed_after(process: subprocess.Popen[bytes], journal: Path, *, lines: int) -> list[int]:
    """Kill -9 the run once its resume file has so many lines; returns the pids of its workers."""
    deadline = time.monotonic() + 300
    while not (journal.exists() and journal.read_bytes().count(b"\n") >= lines):
        assert process.poll() is None, "the run ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(children) >= 2
    return list(map(int, children))


def _gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 120  # one may still be importing what it needs
    while time.monotonic() < deadline:
        if not any(_alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.slow
def test_the_command_writes_a_table_a_report_and_a_picture(tmp_path):
    report = tmp_path / "report.json"
    options = "--size small --lengths 512 --documents 2 --policies keydiff,streaming_llm --ratios 0.5,0.9"
    more = ["--processes", "1", "--resume", tmp_path / "journal.jsonl"]
    for picture in (tmp_path / "quality.png", tmp_path / "quality.svg"):
        code, text = bench(options, *more, "--output", report, "--picture", picture)
        assert code == 0
        assert picture.stat().st_size > 10_000
    drawn = (tmp_path / "quality.svg").read_text()
    assert "keydiff" in drawn
    assert "full cache in 16 bits" in drawn
    assert max(map(len, text.splitlines())) <= 120
    assert "of the 2,048 bytes of the full cache in 16 bits" in " ".join(text.split())
    assert json.loads(report.read_text())["full_16bit"] == 2048
    rows = json.loads(report.read_text())["rows"]
    assert [(row["policy"], row["removed"]) for row in rows] == [
        ("full", 0.0), ("keydiff", 0.5), ("keydiff", 0.9), ("streaming_llm", 0.5), ("streaming_llm", 0.9),
    ]  # fmt: skip
    full = rows[0]["cells"]["multikey prose 512"]
    assert full["questions"] == 8
    assert full["low"] <= full["exact"] <= full["high"]
    for row in rows:
        assert any(row["policy"] in line for line in text.splitlines())
    assert rows[2]["overall"]["bytes_per_token"] < 0.25 * rows[0]["overall"]["bytes_per_token"]


@pytest.mark.parametrize("picture", ["quality.gif", "nowhere/quality.png", "."])
def test_a_picture_that_cannot_be_drawn_is_refused_before_any_work(tmp_path, picture):
    with pytest.raises(InvalidRequest, match="--picture"):
        bench("--size small", "--picture", tmp_path / picture, "--resume", tmp_path / "journal.jsonl")
    assert not (tmp_path / "journal.jsonl").exists()


def test_json_is_printed_alone(tmp_path):
    options = "--tasks needle --haystacks prose --lengths 300 --documents 1 --policies full --json"
    code, text = bench(options, "--resume", tmp_path / "journal.jsonl")
    assert code == 0
    assert json.loads(text)["rows"][0]["policy"] == "full"
