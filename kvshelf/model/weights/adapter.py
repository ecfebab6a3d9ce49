"""LoRA adapters: a model and an adapter merged into its weights are one more model, with an identity of its own."""

from __future__ import annotations

import json
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kvshelf.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_KIND = "LORA"


def split(name: str) -> tuple[str, Path | None]:
    """Split a name such as `Qwen/Qwen3-0.6B+./contracts` into the model's own name and the folder of its adapter.

    A folder whose own name has a "+" is a model without adapter. Raises `InvalidRequest` for an adapter that does not
    exist or cannot be merged into weights, and without peft.
    """
    base, plus, folder = name.rpartition("+")
    if not plus or Path(name).expanduser().exists():
        return name, None
    path = Path(folder).expanduser()
    if not (path / CONFIG).is_file() or not (path / WEIGHTS).is_file():
        raise InvalidRequest(
            f"the adapter {folder!r} of the model {name!r} is no folder with {CONFIG} and {WEIGHTS}; give one that "
            "peft has saved: MODEL+./FOLDER",
            param="model",
        )
    try:
        kind = json.loads((path / CONFIG).read_text())["peft_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"the adapter {folder!r} cannot be read: {CONFIG}: {error!r}", param="model") from error
    if kind != _KIND:
        raise InvalidRequest(
            f"the adapter {folder!r} is of the kind {kind!r}, and kvshelf merges {_KIND}: its weights can become the "
            "model's",
            param="model",
        )
    if find_spec("peft") is None:
        raise InvalidRequest(
            f"the adapter of {name!r} needs the package peft; run: pip install 'peft>=0.18,<1'", param="model"
        )
    return base, path


def require_none(name: str, who: str) -> None:
    """Raise `InvalidRequest` for a model's name with an adapter, which `who` would leave out in silence."""
    if split(name)[1] is not None:
        raise InvalidRequest(f"{who} does not load the adapter of {name!r}; name a model without one", param="model")


def merge(model: PreTrainedModel, folder: Path, name: str) -> PreTrainedModel:
    """The model with an adapter's weights added to its own, in place.

    Kept apart, as an engine that answers under many adapters at once does, they would be a second product in each layer
    of a recorded pass. Merged, every kernel, codec and check is that of a plain model. name: for messages. Raises
    `InvalidRequest` for an adapter of other weights.
    """
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that is about to go
            adapted = PeftModel.from_pretrained(model, str(folder))
            merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
    except Exception as error:  # of many kinds: of files, shapes and names of layers, from three libraries
        raise InvalidRequest(
            f"the adapter of {name!r} cannot be merged into its weights: {error}", param="model"
        ) from error
    return merged
