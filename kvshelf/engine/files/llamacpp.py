"""The state of one sequence of llama.cpp, as `llama_state_seq_save_file` writes it and llama-server keeps its slots.

Read from llama.cpp's `llama-context.cpp` and `llama-kv-cache.cpp` (`LLAMA_STATE_SEQ_VERSION` 3). All numbers are
little-endian. llama.cpp reads to the end of the state; behind it stands what the file says of itself.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.engine import Engine
from kvshelf.engine.files.prefix import EngineFile, Prefix, as_json, prefix_of, raw
from kvshelf.errors import InvalidRequest

NAME: Final = "llama.cpp"

PERMUTED: Final = {"llama": True, "mistral": True, "qwen2": False, "qwen3": False}
"""Types of models that were compared, and whether a GGUF file has the rows of their keys in another order: pairs that
are rotated together side by side, where transformers has them half a head apart."""

_MAGIC, _VERSION = 0x67677371, 3
_TRAILER: Final = struct.Struct("<Q8s")
_TRAILER_MAGIC: Final = b"KVENGIN\n"
_TYPES: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}  # ggml's
_MOST_ABOUT: Final = 1 << 20


def llama_file(
    engine: Engine, cache: CompressedCache, *, dtype: str | None = None, document: Sequence[int] = ()
) -> EngineFile:
    """The file of a cache. dtype: that of llama.cpp's own cache (`--cache-type-k` and `-v`), by default float16. Raises
    as `prefix_of`."""
    prefix = prefix_of(engine, cache, of=NAME, types=PERMUTED, dtype=dtype or "float16", document=document)
    permuted = PERMUTED[engine.model.config.model_type]
    keys: Callable[[Tensor], Tensor] = _side_by_side if permuted else lambda states: states
    about = as_json(prefix.about).encode()
    head, tail = _head(prefix), about + _TRAILER.pack(len(about), _TRAILER_MAGIC)
    rows = sum(_ROWS.size + row.nbytes for layer in prefix.layers for row in layer)
    return EngineFile(len(head) + rows + len(tail), _pieces(prefix, keys, head, tail))


def about_file(path: Path) -> dict[str, Any]:
    """What a file of `llama_file` says of itself. Raises `InvalidRequest` for any other."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size > _TRAILER.size:
            file.seek(size - _TRAILER.size)
            length, magic = _TRAILER.unpack(file.read(_TRAILER.size))
            if magic == _TRAILER_MAGIC and length <= min(size - _TRAILER.size, _MOST_ABOUT):
                file.seek(size - _TRAILER.size - length)
                about: dict[str, Any] = json.loads(file.read(length))
                return about
    raise InvalidRequest(f"{path} is no file that `kvshelf export --to {NAME}` wrote", param="FILE")


_ROWS: Final = struct.Struct("<iQ")


def _head(prefix: Prefix) -> bytes:
    cells = np.zeros((prefix.entries, 3), "<i4")
    cells[:, 0], cells[:, 1] = np.arange(prefix.entries), 1  # position, number of sequences, sequence
    ids = np.asarray(prefix.token_ids, "<i4")
    streams, transposed = 1, 0
    return b"".join(
        (
            struct.pack("<III", _MAGIC, _VERSION, prefix.entries),
            ids.tobytes(),
            struct.pack("<II", streams, prefix.entries),
            cells.tobytes(),
            struct.pack("<II", transposed, len(prefix.layers)),
        )
    )


def _pieces(prefix: Prefix, keys: Callable[[Tensor], Tensor], head: bytes, tail: bytes) -> Iterator[memoryview | bytes]:
    yield head
    for layer in prefix.layers:
        yield from _rows(keys(layer[0]))
    for layer in prefix.layers:
        yield from _rows(layer[1])
    yield tail


def _rows(states: Tensor) -> Iterator[memoryview | bytes]:
    """One row a cell, of all heads. states: `[kv_heads, K, D]`."""
    rows = states.transpose(0, 1).flatten(1)
    yield _ROWS.pack(_TYPES[rows.dtype], rows.shape[1] * rows.element_size())
    yield raw(rows)


def _side_by_side(states: Tensor) -> Tensor:
    """Channels c and c + D / 2 side by side, as llama.cpp's converter permutes the rows of the weights."""
    heads, entries, channels = states.shape
    return states.reshape(heads, entries, 2, channels // 2).transpose(-1, -2).reshape(heads, entries, channels)
