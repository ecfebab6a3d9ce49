"""Answers by llama.cpp on request: a program for an interpreter that has llama-cpp-python, and need not have kvshelf.

    python -I llama_worker.py FILE THREADS LONGEST ANSWERS

FILE is a GGUF file. The lines are those of `vllm_worker.py`, and so are the answers: all prompts of a line at once,
greedy, and no token ends one. What prompts have in common with the last one is kept, and with each other is read once.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from importlib.metadata import version

_BATCH = 512
"""Tokens of a pass, as llama.cpp has it by default."""

_BESIDE = 128
"""Most tokens of a question and its answer."""


def main(file: str, threads: str, longest: str, answers: str) -> None:
    # Libraries that print would break the protocol.
    out, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)
    model = Model(file, int(threads) or os.cpu_count() or 1, int(longest), int(answers))
    print(json.dumps({"versions": {"llama-cpp-python": version("llama-cpp-python")}}), file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        started_wall, started = time.perf_counter(), time.process_time()
        tokens = model.answer(request["prompts"], request["new_tokens"])
        costs = {"wall_s": time.perf_counter() - started_wall, "seconds": time.process_time() - started}
        print(json.dumps(costs | {"tokens": tokens}), file=out, flush=True)


class Model:
    """One context. Sequence 0 has what was read last, the others share it while several prompts are answered."""

    def __init__(self, file: str, threads: int, longest: int, answers: int) -> None:
        self._of = of = importlib.import_module("llama_cpp")  # not installed where the types are checked
        self._silent = of.llama_log_callback(lambda *_: None)  # its log of a load is hundreds of lines
        of.llama_log_set(self._silent, None)
        of.llama_backend_init()
        self._model = of.llama_model_load_from_file(file.encode(), of.llama_model_default_params())
        if not self._model:
            sys.exit(f"llama.cpp cannot load {file}")
        params = of.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = longest + _BESIDE * answers, _BATCH, _BATCH
        params.n_threads = params.n_threads_batch = threads
        params.n_seq_max, params.kv_unified = answers + 1, True
        self._context = of.llama_init_from_model(self._model, params)
        if not self._context:
            sys.exit("llama.cpp cannot make a context")
        self._memory = of.llama_get_memory(self._context)
        self._vocabulary = of.llama_vocab_n_tokens(of.llama_model_get_vocab(self._model))
        self._batch = of.llama_batch_init(_BATCH, 0, 1)
        self._read: list[int] = []

    def answer(self, prompts: list[list[int]], new_tokens: int) -> int:
        """The new tokens of all answers."""
        common = _common([self._read, *prompts])
        self._forget(0, common)
        if len(prompts) == 1:
            ends = [self._pass([(token, common + i, 0) for i, token in enumerate(prompts[0][common:])])[-1]]
            self._read, sequences = prompts[0], [0]
        else:
            self._read, sequences = self._read[:common], list(range(1, len(prompts) + 1))
            for sequence in sequences:
                self._of.llama_memory_seq_cp(self._memory, 0, sequence, 0, common)
            suffixes = [
                (token, common + i, sequence)
                for sequence, prompt in zip(sequences, prompts, strict=True)
                for i, token in enumerate(prompt[common:])
            ]
            ends = self._pass(suffixes, ends=[len(prompt) - 1 for prompt in prompts])
        count, places = len(ends), [len(prompt) for prompt in prompts]
        for step in range(new_tokens - 1):
            ends = self._pass([(t, p + step, s) for t, p, s in zip(ends, places, sequences, strict=True)], every=True)
            count += len(ends)
        for sequence in sequences:
            self._forget(sequence, len(self._read) if sequence == 0 else 0)
        return count

    def _pass(
        self, tokens: list[tuple[int, int, int]], ends: list[int] | None = None, *, every: bool = False
    ) -> list[int]:
        """The likeliest next tokens behind (token, position, sequence), in passes of `_BATCH`: behind the last alone,
        behind those at the positions `ends` of each sequence, or behind each."""
        likeliest: list[int] = []
        for first in range(0, len(tokens), _BATCH):
            some, batch = tokens[first : first + _BATCH], self._batch
            indices = []
            for i, (token, position, sequence) in enumerate(some):
                last = first + i == len(tokens) - 1
                chosen = every or (position == ends[sequence - 1] if ends else last)
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
                batch.seq_id[i][0], batch.logits[i] = sequence, chosen
                indices += [i] if chosen else []
            batch.n_tokens = len(some)
            if code := self._of.llama_decode(self._context, batch):
                sys.exit(f"llama_decode of {len(some)} tokens returned {code}")
            likeliest += [self._likeliest(i) for i in indices]
        return likeliest

    def _likeliest(self, place: int) -> int:
        numpy = importlib.import_module("numpy")
        logits = self._of.llama_get_logits_ith(self._context, place)
        return int(numpy.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())

    def _forget(self, sequence: int, kept: int) -> None:
        self._of.llama_memory_seq_rm(self._memory, sequence, kept, -1)


def _common(lists: list[list[int]]) -> int:
    """How many items all begin with. The last token of a prompt is read anew: its logits are wanted."""
    most = min(len(items) for items in lists)
    most = min([most, *(len(items) - 1 for items in lists[1:])])
    return next((i for i in range(most) if len({items[i] for items in lists}) > 1), most)


if __name__ == "__main__":
    main(*sys.argv[1:])
