"""A file is replaced whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvshelf.atomic import partial_of, written


@pytest.mark.parametrize("private", [False, True])
def test_an_error_leaves_the_old_content_and_nothing_else(tmp_path: Path, private: bool) -> None:
    path = tmp_path / "file"
    for content in (b"old", b"new"):
        with written(path, private=private) as file:
            file.write(content)
    assert path.read_bytes() == b"new"

    def write_half() -> None:
        with written(path, private=private) as file:
            file.write(b"half")
            raise RuntimeError("oops")

    with pytest.raises(RuntimeError, match="oops"):
        write_half()
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
    assert not partial_of(path).exists()
    assert not private or path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("private", [False, True])
def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path, private: bool) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "file", tmp_path / "link"
    link.symlink_to(target)
    for content in (b"old", b"new"):
        with written(link, private=private) as file:
            file.write(content)
            assert private or partial_of(link).exists()
        assert link.is_symlink()
        assert target.read_bytes() == content


@pytest.mark.parametrize("private", [False, True])
def test_what_is_no_file_is_refused_and_stays(tmp_path: Path, private: bool) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link, tmp_path):
        with pytest.raises(OSError, match=r"a device or a pipe|Is a directory"), written(path, private=private):
            pytest.fail("no work is done for it")
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, pipe]


def test_links_in_a_circle_lead_nowhere(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(link)
    with written(link) as file:
        file.write(b"new")
    assert link.read_bytes() == b"new"


def test_a_stream_is_refused_even_where_it_leads_to_a_file(tmp_path: Path) -> None:
    """Under `>>` in a shell the file would lose what stands in it."""
    with (tmp_path / "log").open("wb") as log:
        path = Path(f"/proc/self/fd/{log.fileno()}")
        with pytest.raises(OSError, match="a device or a pipe"), written(path):
            pytest.fail("no work is done for it")


def test_a_folder_that_may_be_written_but_not_read_is_enough(tmp_path: Path) -> None:
    folder = tmp_path / "box"
    folder.mkdir()
    folder.chmod(0o333)
    program = (
        "import os, sys, pathlib, kvshelf.atomic as atomic\n"
        "os.chdir(sys.argv[1])\n"
        "os.geteuid() or os.setuid(65534)\n"  # root may read any folder
        "with atomic.written(pathlib.Path('file')) as file: file.write(b'new')"
    )
    try:
        subprocess.run([sys.executable, "-c", program, folder], check=True)
        assert (folder / "file").read_bytes() == b"new"
    finally:
        folder.chmod(0o700)
