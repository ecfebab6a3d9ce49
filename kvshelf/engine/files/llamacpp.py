"""The state of one sequence of llama.cpp, as `llama_state_seq_save_file` writes it and llama-server keeps its slots.

Read from llama.cpp's `llama-context.cpp` and `llama-kv-cache.cpp` (`LLAMA_STATE_SEQ_VERSION` 3). All numbers are
little-endian. llama.cpp reads to the end of the state; behind it stands the file's description of itself.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.engine import Engine
from kvshelf.engine.files.prefix import EngineFile, layers_of, prefix_of, raw
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
    about = json.dumps(prefix.about, sort_keys=True).encode()
    tail = about + _TRAILER.pack(len(about), _TRAILER_MAGIC)
    head = struct.pack("<III", _MAGIC, _VERSION, prefix.entries) + np.asarray(prefix.token_ids, "<i4").tobytes()
    cells = _cells(prefix.entries, 0, len(prefix.layers))
    rows = sum(_ROWS.size + row.nbytes for layer in prefix.layers for row in layer)
    state = _state(prefix.layers, engine.model.config.model_type, cells)
    return EngineFile(len(head) + len(cells) + rows + len(tail), chain([head], state, [tail]))


def half_layers(past: DynamicCache) -> list[tuple[Tensor, Tensor]]:
    """Keys and values `[kv_heads, K, D]` of an exported cache, in float16. Raises as `layers_of`."""
    return layers_of(past, NAME, torch.float16)


def state_of(layers: Sequence[tuple[Tensor, Tensor]], model_type: str, *, first: int) -> bytes:
    """The state alone, as `llama_state_seq_set_data` reads it behind eight bytes of its own. first: the position of the
    first cell; a question stands at that behind the last cell, whatever the positions to which keys are rotated."""
    return b"".join(_state(layers, model_type, _cells(layers[0][0].shape[1], first, len(layers))))


def about_file(path: Path) -> dict[str, Any]:
    """The description in a file of `llama_file`. Raises `InvalidRequest` for any other file."""
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


def _cells(entries: int, first: int, layers: int) -> bytes:
    """The bytes before the rows: one stream, a cell an entry, values not transposed. first: the first position."""
    cells = np.zeros((entries, 3), "<i4")
    cells[:, 0], cells[:, 1] = first + np.arange(entries), 1  # position, number of sequences, sequence
    streams, transposed = 1, 0
    return struct.pack("<II", streams, entries) + cells.tobytes() + struct.pack("<II", transposed, layers)


def _state(layers: Sequence[tuple[Tensor, Tensor]], model_type: str, cells: bytes) -> Iterator[memoryview | bytes]:
    keys: Callable[[Tensor], Tensor] = _side_by_side if PERMUTED[model_type] else lambda states: states
    yield cells
    for layer in layers:
        yield from _rows(keys(layer[0]))
    for layer in layers:
        yield from _rows(layer[1])


def _rows(states: Tensor) -> Iterator[memoryview | bytes]:
    """One row for each cell, of all heads. states: `[kv_heads, K, D]`."""
    rows = states.transpose(0, 1).flatten(1)
    yield _ROWS.pack(_TYPES[rows.dtype], rows.shape[1] * rows.element_size())
    yield raw(rows)


def _side_by_side(states: Tensor) -> Tensor:
    """Channels c and c + D / 2 side by side, as llama.cpp's converter permutes the rows of the weights."""
    heads, entries, channels = states.shape
    return states.reshape(heads, entries, 2, channels // 2).transpose(-1, -2).reshape(heads, entries, channels)
