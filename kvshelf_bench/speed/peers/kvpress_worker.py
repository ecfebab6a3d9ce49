"""Measures kvpress on request: a program for an interpreter that has kvpress, and need not have kvshelf.

    python -I kvpress_worker.py FOLDER DTYPE DEVICE THREADS

It writes one JSON line when the model of FOLDER is loaded: the methods it knows and the versions of kvpress,
transformers and torch. Each line of input then asks for one prefill, {"method", "removed", "token_ids"}, and it answers
with {"total_s", "hook_s", "wall_s", "kept"}. total_s is processor time of this process, on a GPU wall time; hook_s is
wall time, spent in the press's `forward_hook`, which runs after the attention of each layer: it recomputes the queries
it needs from the hidden states, scores, chooses and gathers, which is all that kvpress adds to a prefill. kept: entries
left in a head of the first layer. It ends when its standard input does.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

# With the defaults of kvshelf where kvpress has other ones: ChunkKV observes from 32 tokens.
PRESSES: dict[str, Callable[[Any, float], Any]] = {
    "streaming_llm": lambda kvpress, removed: kvpress.StreamingLLMPress(removed),
    "knorm": lambda kvpress, removed: kvpress.KnormPress(removed),
    "keydiff": lambda kvpress, removed: kvpress.KeyDiffPress(removed),
    "tova": lambda kvpress, removed: kvpress.TOVAPress(removed),
    "snapkv": lambda kvpress, removed: kvpress.SnapKVPress(removed),
    "pyramidkv": lambda kvpress, removed: kvpress.PyramidKVPress(removed),
    "chunkkv": lambda kvpress, removed: kvpress.ChunkKVPress(kvpress.SnapKVPress(removed, window_size=32)),
    "lagkv": lambda kvpress, removed: kvpress.LagKVPress(removed),
    "expected_attention": lambda kvpress, removed: kvpress.ExpectedAttentionPress(removed),
}
"""The press of each method. H2O is missing: kvpress's needs eager attention, whose N x N weights do not fit at 8k."""


def main(folder: str, dtype: str, device: str, threads: str) -> None:
    # Libraries that print would break the protocol.
    answers, sys.stdout = sys.stdout, sys.stderr
    if int(threads):
        torch.set_num_threads(int(threads))
    transformers.utils.logging.disable_progress_bar()
    kvpress = importlib.import_module("kvpress")  # not installed where the types are checked
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), use_safetensors=True)
    model = model.to(device).eval()
    packages = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    print(json.dumps({"methods": sorted(PRESSES), "versions": packages}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        press = PRESSES[asked["method"]](kvpress, asked["removed"])
        print(json.dumps(measure(model, press, asked["token_ids"])), file=answers, flush=True)


def measure(model: Any, press: Any, token_ids: list[int]) -> dict[str, float]:
    """One prefill under `press`."""
    now = _clock(model.device)
    wall = now if model.device.type == "cuda" else time.perf_counter
    hook_s = 0.0
    plain_hook = press.forward_hook

    def timed_hook(*args: Any) -> Any:
        nonlocal hook_s
        started = wall()
        output = plain_hook(*args)
        hook_s += wall() - started
        return output

    press.forward_hook = timed_hook  # the press registers what it finds under this name
    ids = torch.tensor([token_ids], device=model.device)
    cache = DynamicCache()
    started_wall, started = time.perf_counter(), now()
    with torch.no_grad(), press(model):
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    total_s = now() - started
    return {
        "total_s": total_s,
        "hook_s": hook_s,
        "wall_s": time.perf_counter() - started_wall,
        "kept": cache.layers[0].keys.shape[2],
    }


def _clock(device: torch.device) -> Callable[[], float]:
    """The clock of `kvshelf_bench.measure`, which cannot be imported here."""
    if device.type != "cuda":
        return time.process_time

    def when_done() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return when_done


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(*sys.argv[1:])
