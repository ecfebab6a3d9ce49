"""Where a model comes from: bundled with the package, a local folder, or the hub.

Needs no torch, so that a service can refuse a folder that does not exist before it starts anything.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Final

from kvshelf.errors import InvalidRequest

BUNDLED: Final = ("kvshelf-tiny",)


def bundled_folder(name: str) -> str:
    """The folder of a model that comes with the package."""
    return str(files("kvshelf") / "models" / name)


def source_of(name: str) -> str:
    """What transformers loads for a model's name: a folder or a hub id. Raises `InvalidRequest` for a path that is no
    folder, or a folder without a model."""
    if name in BUNDLED:
        return bundled_folder(name)
    looks_local = name.startswith((".", "/", "~")) or Path(name).is_absolute()
    folder = Path(name).expanduser()
    if looks_local and not folder.is_dir():
        raise InvalidRequest(f"the model folder {name!r} does not exist", param="model")
    if looks_local and not (folder / "config.json").is_file():
        raise InvalidRequest(f"the folder {name!r} holds no model: it has no config.json", param="model")
    return str(folder) if looks_local else name
