"""A cache as a file of another engine, by the engine's name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from kvshelf import atomic
from kvshelf.api.caches import ExportTo
from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.engine import Engine
from kvshelf.engine.files import llamacpp, mlx
from kvshelf.engine.files.prefix import EngineFile
from kvshelf.errors import InvalidRequest


def engine_file(
    engine: Engine,
    cache: CompressedCache,
    to: ExportTo,
    *,
    dtype: str | None = None,
    engine_model: str | None = None,
    document: Sequence[int] = (),
) -> EngineFile:
    """The file that the engine `to` reads as the prefix of a question. Everything is checked before a byte is written.

    dtype: float32, float16 or bfloat16; None: llama.cpp's own default, float16, or the model's for MLX. engine_model:
    the `--model` of `mlx_lm.generate`; None: the model's name here. document: the cache's token ids, if known: where
    every token has its entry, they are those of the file.

    Raises `ModelMismatch` for a cache of another model, `PolicyUnsupported` for one that the engine cannot hold (heads
    or layers of different lengths, merged tokens, windows, states, latents) and for a model that was not compared with
    the engine's, `InvalidRequest` for an unknown `to` or `dtype` and for numbers that the dtype does not hold.
    """
    if to == llamacpp.NAME:
        if engine_model is not None:
            raise InvalidRequest(f"a file of {to} names no model; leave engine_model out", param="engine_model")
        return llamacpp.llama_file(engine, cache, dtype=dtype, document=document)
    if to == mlx.NAME:
        return mlx.mlx_file(engine, cache, dtype=dtype, model=engine_model, document=document)
    raise InvalidRequest(f"to is {to!r}; one of {', '.join(get_args(ExportTo))}", param="to")


def export_file(
    engine: Engine,
    cache: CompressedCache,
    path: str | Path,
    to: ExportTo,
    *,
    dtype: str | None = None,
    engine_model: str | None = None,
    document: Sequence[int] = (),
) -> Path:
    """Write the file of `engine_file`, whole or not at all. Returns its path. Raises as that, and `OSError`."""
    file = engine_file(engine, cache, to, dtype=dtype, engine_model=engine_model, document=document)
    with atomic.written(path := Path(path)) as out:
        for piece in file.pieces:
            out.write(piece)
    return path
