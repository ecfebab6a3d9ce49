"""Run by the Python that has llama-cpp-python: answers questions from exported files, as JSON on stdout.

Arguments: a GGUF file, the dtype of llama.cpp's cache, a folder with `asked.json`.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path

import llama_cpp as lib
import numpy as np

TYPES = {"float32": 0, "float16": 1}


class Sequence:
    """Sequence 0 of a context, greedy. evaluated: tokens that were computed since it was loaded."""

    def __init__(self, gguf: str, dtype: str) -> None:
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(gguf.encode(), lib.llama_model_default_params())
        options = lib.llama_context_default_params()
        options.n_ctx = options.n_batch = 4096
        options.type_k = options.type_v = TYPES[dtype]
        options.flash_attn_type = 1  # values are not transposed
        options.n_threads = options.n_threads_batch = int(os.environ.get("OMP_NUM_THREADS", "2"))
        self.ctx = lib.llama_init_from_model(self.model, options)
        self.words = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.clear()

    def clear(self) -> None:
        lib.llama_memory_clear(lib.llama_get_memory(self.ctx), True)
        self.place = self.evaluated = 0

    def load(self, path: Path) -> list[int]:
        self.clear()
        ids, count = (lib.llama_token * 4096)(), ctypes.c_size_t()
        read = lib.llama_state_seq_load_file(self.ctx, str(path).encode(), 0, ids, 4096, ctypes.byref(count))
        assert read, f"llama.cpp refuses {path}"
        self.place = count.value
        return ids[: count.value]

    def step(self, ids: list[int]) -> int:
        batch = lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for index, token in enumerate(ids):
            batch.token[index], batch.pos[index] = token, self.place + index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = index == len(ids) - 1
        assert lib.llama_decode(self.ctx, batch) == 0
        lib.llama_batch_free(batch)
        self.place += len(ids)
        self.evaluated += len(ids)
        return int(np.ctypeslib.as_array(lib.llama_get_logits_ith(self.ctx, -1), (self.words,)).argmax())


def main(gguf: str, dtype: str, folder: Path) -> list[dict]:
    sequence, results, prefilled = Sequence(gguf, dtype), [], set()
    for asked in json.loads((folder / "asked.json").read_text()):
        path = folder / f"{asked['name']}.{dtype}.bin"
        began = time.perf_counter()
        ids = sequence.load(path)
        said = [sequence.step(asked["question"])]
        result = {"first_s": time.perf_counter() - began, "evaluated": sequence.evaluated}
        while len(said) < len(asked["answer"]):
            said.append(sequence.step(said[-1:]))
        if asked["whole"] and asked["name"] not in prefilled:  # the same without the file
            prefilled.add(asked["name"])
            sequence.clear()
            began = time.perf_counter()
            again = sequence.step([*ids, *asked["question"]])
            result |= {"prefill_s": time.perf_counter() - began, "prefill_first": again}
        results.append(result | {"tokens": said})
    return results


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
