"""Answers by vLLM on request: a program for an interpreter that has vLLM, and need not have kvshelf.

    python -I vllm_worker.py FOLDER DTYPE THREADS LONGEST

It writes one JSON line when the model of FOLDER is loaded and compiled: the versions of vLLM, transformers and torch.
Each line of input then asks for answers to prompts of token ids, {"prompts", "new_tokens"}, all at once and greedy, and
is answered with {"wall_s", "seconds", "tokens"}: wall time, processor time of this process, and the new tokens of all
answers. No token ends an answer. What prompts have in common with earlier ones vLLM takes from its prefix cache. The
worker ends when its standard input does.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_CACHE_GB = "4"
"""More than the documents of the bench take, in fp32."""


def main(folder: str, dtype: str, threads: str, longest: str) -> None:
    # Libraries that print would break the protocol.
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": _CACHE_GB,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    os.environ.update(settings | ({"OMP_NUM_THREADS": threads} if int(threads) else {}))
    vllm = importlib.import_module("vllm")  # not installed where the types are checked
    engine = vllm.LLM(
        model=folder,
        dtype=dtype,
        max_model_len=int(longest),
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        max_num_seqs=64,
    )
    versions = {name: _version(name) for name in ("vllm", "transformers", "torch")}
    print(json.dumps({"versions": versions}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(answered(vllm, engine, request["prompts"], request["new_tokens"])), file=answers, flush=True)


def answered(vllm: Any, engine: Any, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
    sampling = vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    started_wall, started = time.perf_counter(), time.process_time()
    outputs = engine.generate(inputs, sampling, use_tqdm=False)
    costs = {"wall_s": time.perf_counter() - started_wall, "seconds": time.process_time() - started}
    return costs | {"tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # the package for CPUs has another name than its module
        return version(f"{package}-cpu")


if __name__ == "__main__":
    main(*sys.argv[1:])
