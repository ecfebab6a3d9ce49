"""A prompt cache of mlx-lm, as its `save_prompt_cache` writes it from version 0.32 on: safetensors with metadata."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.engine import Engine
from kvshelf.engine.files.prefix import EngineFile, prefix_of, raw
from kvshelf.errors import InvalidRequest

NAME: Final = "mlx"

TYPES: Final = ("llama", "mistral", "qwen2", "qwen3")
"""Types of models that were compared: mlx-lm rotates them as transformers does."""

_DTYPES: Final = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32"}
_ABOUT: Final = "0.kvshelf"


def mlx_file(
    engine: Engine,
    cache: CompressedCache,
    *,
    dtype: str | None = None,
    model: str | None = None,
    document: Sequence[int] = (),
) -> EngineFile:
    """The file of a cache. dtype: by default the model's. model: the name that `mlx_lm.generate` compares, by default
    that of the cache's model. Raises as `prefix_of`."""
    prefix = prefix_of(engine, cache, of=NAME, types=TYPES, dtype=dtype, document=document)
    tensors: dict[str, Tensor] = {}
    name = model or cache.identity.model.name
    about = json.dumps(prefix.about, sort_keys=True)
    metadata = {"0.model": name, "0.tokenizer_config": "{}", _ABOUT: about}
    scalars = [("2.0", "")]
    for index, (keys, values) in enumerate(prefix.layers):
        tensors |= {f"{index}.0": keys[None], f"{index}.1": values[None]}
        tensors[f"{index}.2"] = torch.tensor(prefix.entries, dtype=torch.int32)
        metadata[f"1.{index}"] = "KVCache"
        scalars += [(f"2.{index + 1}.0", f"{index}.2"), (f"2.{index + 1}.1", "scalar")]
    head = _header(tensors, metadata | dict(scalars))
    nbytes = len(head) + sum(tensor.nbytes for tensor in tensors.values())
    return EngineFile(nbytes, chain([head], map(raw, tensors.values())))


def about_file(path: Path) -> dict[str, Any]:
    """The description in a file of `mlx_file`. Raises `InvalidRequest` for any other file."""
    try:
        with safe_open(path, "pt") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {})[_ABOUT])
            return about
    except (SafetensorError, KeyError, ValueError) as error:
        raise InvalidRequest(f"{path} is no file that `kvshelf export --to {NAME}` wrote", param="FILE") from error


def _header(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """The header of safetensors, written here because its own functions take a whole file into memory once more."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
