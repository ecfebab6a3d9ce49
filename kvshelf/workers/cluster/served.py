"""Which served model a request means: a model by its name, or an adapter of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from kvshelf.errors import InvalidRequest, KvshelfError


def served_name(model: str) -> str:
    """A model's name in the API. For a folder or a GGUF file, its own name without the path, which stays private."""
    path = Path(model).expanduser()
    return path.name.removesuffix(".gguf") if path.exists() else model


class ServedModel(Protocol):
    """A model that is served; of one with an adapter, the name of the model that the adapter is of."""

    @property
    def parent(self) -> str | None: ...


def served_model(
    engines: Mapping[str, ServedModel],
    model: str | None,
    adapter: str | None,
    unknown: type[KvshelfError] = InvalidRequest,
) -> str:
    """The name of the served model that a request means by its fields `model` and `adapter`: an adapter is a model by
    its own name, and the first model is the default. Raises `unknown` for another model, and `InvalidRequest` for
    another adapter, or one of another model."""
    if adapter is None:
        name = next(iter(engines)) if model is None else model
        if name not in engines:
            raise unknown(f"model {model!r:.100} is not served here; there is {', '.join(engines)}", param="model")
        return name
    parents = {name: engine.parent for name, engine in engines.items() if engine.parent is not None}
    if adapter not in parents:
        choice = f"there is {', '.join(parents)}" if parents else "there is none: kvshelf serve --adapter NAME=FOLDER"
        raise InvalidRequest(f"adapter {adapter!r:.100} is not served here; {choice}", param="adapter")
    if model not in (None, adapter, parents[adapter]):
        raise InvalidRequest(
            f"the adapter {adapter!r} is of the model {parents[adapter]!r}, not of {model!r:.100}", param="adapter"
        )
    return adapter
