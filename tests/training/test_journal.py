"""What a search that was interrupted has found."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvshelf.training.journal import SearchJournal


def test_a_search_goes_on_behind_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = SearchJournal(path, "one")
    assert [first.step(lambda number=number: number) for number in range(3)] == [0, 1, 2]
    path.write_text(path.read_text()[:-2], "utf-8")  # the last line is torn
    again = SearchJournal(path, "one")
    assert [again.step(lambda: "new") for _ in range(3)] == [0, 1, "new"]
    assert SearchJournal(path, "another").step(lambda: "new") == "new"


def test_a_disk_that_fails_does_not_lose_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    SearchJournal(path, "one").step(lambda: 1)
    kept = path.read_bytes()

    def fail(*_: object) -> str:
        raise OSError(errno.EIO, "the disk fails")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", fail)
        with pytest.raises(OSError, match="the disk fails"):
            SearchJournal(path, "one")
    assert path.read_bytes() == kept
