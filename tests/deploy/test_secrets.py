"""A key file as Kubernetes mounts it: written by root, readable by the group of the pod."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshelf.errors import InvalidRequest
from kvshelf.store.private import read_private

USER, OTHER = 10001, 10002

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to root and read it as another")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:  # tmp_path lies below folders that only root may enter
        Path(made).chmod(0o755)
        yield Path(made)


def refused_to_the_pod(path: Path) -> bool:
    """Whether a process with the ids of the image is refused the file."""
    process = multiprocessing.get_context("fork").Process(target=_read, args=(path,))
    process.start()
    process.join(60)
    assert process.exitcode in (0, 3)
    return process.exitcode == 3


def _read(path: Path) -> None:
    os.setgroups([])
    os.setgid(USER)
    os.setuid(USER)
    try:
        read_private(path, param="x")
    except InvalidRequest:
        os._exit(3)


@pytest.mark.parametrize(
    ("mode", "owner", "group", "refused"),
    [
        (0o440, 0, USER, False),
        (0o640, 0, USER, False),
        (0o440, 0, OTHER, True),  # not readable at all
        (0o444, 0, USER, True),
        (0o460, 0, USER, True),
        (0o440, OTHER, USER, True),  # another user of the group could have written it
        (0o440, USER, USER, True),
        (0o400, USER, USER, False),
    ],
)
def test_what_root_wrote_for_the_group_is_taken_and_nothing_wider(
    folder: Path, mode: int, owner: int, group: int, refused: bool
) -> None:
    path = folder / "keys"
    path.write_bytes(b"{}")
    os.chown(path, owner, group)
    path.chmod(mode)
    assert refused_to_the_pod(path) is refused
