"""llama.cpp's memory of keys and values as numbered sequences, through the functions of llama-cpp-python."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvshelf.errors import InternalError, InvalidRequest, MissingExtra

PACKAGE: Final = "llama-cpp-python"
INSTALL: Final = f"pip install '{PACKAGE}>=0.3.36,<0.4'"

MOST_SEQUENCES: Final = 128
"""Of documents and of the questions that are open. llama.cpp has memory for the logits of as many."""

MOST_TOKENS: Final = 1024
"""Of one pass."""

_NEEDED: Final = (
    "llama_batch_init",
    "llama_decode",
    "llama_get_logits_ith",
    "llama_init_from_model",
    "llama_log_set",
    "llama_memory_seq_cp",
    "llama_memory_seq_rm",
    "llama_model_load_from_file",
    "llama_state_seq_get_data",
    "llama_state_seq_get_size",
    "llama_state_seq_set_data",
)
_HEAD: Final = 8
"""Bytes that a state in memory begins with, and that a file has not: llama.cpp's mark, and a sequence."""
_FLOAT16: Final = 1  # ggml's
_FLASH_ATTENTION: Final = 1  # without it values would be transposed


class SequenceRun(NamedTuple):
    """Tokens to run behind a sequence. first: the position of the first. last: so many at their end give logits."""

    sequence: int
    first: int
    token_ids: Sequence[int]
    last: int = 1


class Sequences:
    """The sequences of one model: lists of cells, with keys and values in float16. Sequences may share cells, as a
    question shares those of its document. One thread uses them at a time."""

    def __init__(self, file: Path, *, cells: int, threads: int) -> None:
        """file: GGUF. cells: tokens that all sequences together have room for. Raises `MissingExtra` without
        llama-cpp-python and for a version that lacks something, `InvalidRequest` for a file that llama.cpp refuses."""
        self._lib = lib = library()
        self.cells = cells
        self._free = list(range(MOST_SEQUENCES))[::-1]
        self._reserved: dict[int, int] = {}
        """Cells of each sequence beside those that it shares: what it has, or may come to have."""
        _hear(lib)
        model = lib.llama_model_load_from_file(str(file).encode(), lib.llama_model_default_params())
        if not model:
            raise InvalidRequest(f"llama.cpp does not load {file.name!r}: {_reason()}", param="model")
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_seq_max = cells, MOST_TOKENS, MOST_SEQUENCES
        options.n_threads = options.n_threads_batch = threads
        options.type_k = options.type_v = _FLOAT16
        options.flash_attn_type, options.kv_unified = _FLASH_ATTENTION, True
        self._context = context = lib.llama_init_from_model(model, options)
        if not context:
            lib.llama_model_free(model)
            raise InvalidRequest(f"llama.cpp cannot run {file.name!r} with {cells} cells: {_reason()}", param="model")
        self._model = model
        self._memory = lib.llama_get_memory(context)
        self.vocabulary: int = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._head = self._state(0)[:_HEAD]

    def close(self) -> None:
        """Free its memory. The sequences can only be dropped afterwards."""
        self._reserved.clear()
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def has_room(self, cells: int, *, without: Sequence[int] = ()) -> bool:
        """Whether there is room for so many cells, of a document and a question, once these sequences are dropped."""
        others = sum(self._reserved.values()) - sum(self._reserved[number] for number in without)
        return others + cells <= self.cells and len(self._free) + len(without) >= 2

    def load(self, state: bytes, cells: int) -> int:
        """A new sequence with these cells, as `files.llamacpp.state_of` writes them. Raises `MissingExtra` where
        llama.cpp does not take them."""
        number = self._reserve(cells)
        data = self._head + state
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        if self._lib.llama_state_seq_set_data(self._context, buffer, len(data), number) != len(data):
            self.drop(number)
            raise MissingExtra(
                f"llama.cpp refuses the state of a cache ({_reason()}); kvshelf writes that of {PACKAGE} 0.3.36, and "
                f"{package_version()} is installed; run: {INSTALL}"
            )
        return number

    def require_alike(self, state: bytes, cells: int) -> None:
        """Raise `MissingExtra` unless llama.cpp has these cells as they were written, once it has read them."""
        number = self.load(state, cells)
        same = self._state(number)[_HEAD:] == state
        self.drop(number)
        if not same:
            raise MissingExtra(
                f"{PACKAGE} {package_version()} keeps other cells than it was given, so no cache can be asked there; "
                f"run: {INSTALL}"
            )

    def fork(self, number: int, cells: int) -> int:
        """A new sequence that shares all cells of one, and may come to have so many of its own."""
        other = self._reserve(cells)
        self._lib.llama_memory_seq_cp(self._memory, number, other, -1, -1)
        return other

    def drop(self, number: int) -> None:
        """Forget a sequence. Cells that no other one shares are free."""
        if self._reserved.pop(number, None) is not None:
            self._lib.llama_memory_seq_rm(self._memory, number, -1, -1)
            self._free.append(number)

    def _reserve(self, cells: int) -> int:
        number = self._free.pop()
        self._reserved[number] = cells
        return number

    def run(self, runs: Sequence[SequenceRun]) -> list[Tensor]:
        """Run tokens of several sequences in one pass, at most `MOST_TOKENS`. Gives the logits of each run, `[last,
        vocabulary]` fp32. Raises `InternalError` where llama.cpp fails; its sequences are then as before."""
        lib, places = self._lib, list[list[int]]()
        batch = lib.llama_batch_init(sum(len(run.token_ids) for run in runs), 0, 1)
        try:
            at = 0
            for number, first, token_ids, last in runs:
                for index, token in enumerate(token_ids):
                    batch.token[at], batch.pos[at] = token, first + index
                    batch.n_seq_id[at], batch.seq_id[at][0] = 1, number
                    batch.logits[at] = index >= len(token_ids) - last
                    at += 1
                places.append(list(range(at - last, at)))
            batch.n_tokens = at
            code = lib.llama_decode(self._context, batch)
        finally:
            lib.llama_batch_free(batch)
        if code:
            for number, first, _, _ in runs:  # some of their cells may have been written
                lib.llama_memory_seq_rm(self._memory, number, first, -1)
            raise InternalError(f"llama.cpp's pass failed with {code}: {_reason()}")
        return [self._logits(rows) for rows in places]

    def _logits(self, places: Sequence[int]) -> Tensor:
        logits = torch.empty(len(places), self.vocabulary)
        for row, place in enumerate(places):
            pointer = self._lib.llama_get_logits_ith(self._context, place)
            logits[row] = torch.from_numpy(np.ctypeslib.as_array(pointer, (self.vocabulary,)))
        return logits

    def _state(self, number: int) -> bytes:
        """The state of a sequence, as llama.cpp writes it."""
        size = self._lib.llama_state_seq_get_size(self._context, number)
        buffer = (ctypes.c_uint8 * size)()
        return bytes(buffer[: self._lib.llama_state_seq_get_data(self._context, buffer, size, number)])


def library() -> Any:
    """The module llama_cpp. Raises `MissingExtra`."""
    try:
        lib = import_module("llama_cpp")
    except (ImportError, OSError, RuntimeError) as error:  # what it wraps is not there, or does not load here
        raise MissingExtra(
            f"llama.cpp is asked through {PACKAGE}, which does not load ({error}); run: {INSTALL}"
        ) from error
    if lacking := [name for name in _NEEDED if not hasattr(lib, name)]:
        raise MissingExtra(f"{PACKAGE} {package_version()} lacks {', '.join(lacking)}; run: {INSTALL}")
    return lib


def package_version() -> str:
    """Of llama-cpp-python, "" where it is not installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return ""


_MESSAGES: Final[deque[str]] = deque(maxlen=3)
_LISTENERS: Final[list[Any]] = []
"""The function that llama.cpp calls with its messages, for as long as this process lives."""
_WARNING: Final = 3


def _hear(lib: Any) -> None:
    """Keep what llama.cpp warns of, and let it write nothing on stderr."""
    if not _LISTENERS:

        def hear(level: int, text: bytes, _: Any) -> None:
            if level >= _WARNING and (message := text.decode(errors="replace").strip()):
                _MESSAGES.append(message)

        _LISTENERS.append(lib.llama_log_callback(hear))
        lib.llama_backend_init()
    lib.llama_log_set(_LISTENERS[0], None)


def _reason() -> str:
    return "; ".join(_MESSAGES) or "it does not say why"
