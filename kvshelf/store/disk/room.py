"""Whether a file system has room left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

LEAST_BYTES: Final = 256 << 20
LEAST_FILES: Final = 1000


def shortage(folder: Path) -> str | None:
    """What the file system of a folder has too little of, None if it has room: `LEAST_BYTES` and `LEAST_FILES`."""
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    if free < LEAST_BYTES:
        return f"the disk of {folder} is full: {free / 2**20:.0f} MiB are free, fewer than {LEAST_BYTES >> 20}"
    if room.f_files and room.f_favail < LEAST_FILES:
        return f"the disk of {folder} is full: it takes {room.f_favail} more files, fewer than {LEAST_FILES}"
    return None
