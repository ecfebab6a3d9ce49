"""Runs kvpress on request: a program for an interpreter that has kvpress, and need not have kvshelf.

    python -I kvpress_worker.py FOLDER DTYPE DEVICE THREADS

It writes one JSON line when the model of FOLDER is loaded: the methods that it knows, those of them that it can time,
and the versions of kvpress, transformers and torch. Each line of input then asks for one of two things, under a method
that removes a share:

{"method", "removed", "token_ids"} asks for one prefill; the answer is {"total_s", "hook_s", "wall_s", "kept"}. total_s
is processor time of this process, on a GPU wall time; hook_s is wall time, spent in the press's `forward_hook`, which
runs after the attention of each layer: it recomputes the queries it needs from the hidden states, scores, chooses and
gathers, which is all that kvpress adds to a prefill. kept: entries left in a head of the first layer.

{"method", "removed", "context", "questions", "known"} asks questions of a document by kvpress's own pipeline; the
answer is {"tokens", "answers"}, or {"refused"} where the pipeline raises. questions: `text`, `prefix` and
`max_new_tokens` of each. known: each is prefilled for, behind the document. An answer has `text`, the `bytes` of the
cache in memory, and `seconds`.

It ends when its standard input does.
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
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

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

UNTIMED: dict[str, Callable[[Any, float], Any]] = {
    "full": lambda _kvpress, _removed: None,
    "kvzip": lambda kvpress, removed: kvpress.KVzipPress(removed),
}
"""Those that add to a prefill elsewhere than in their hook, or nothing."""


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
    ready = {"methods": sorted(PRESSES | UNTIMED), "timed": sorted(PRESSES), "versions": packages}
    print(json.dumps(ready), file=answers, flush=True)
    pipeline = None
    for line in sys.stdin:
        request = json.loads(line)
        press = (PRESSES | UNTIMED)[request["method"]](kvpress, request["removed"])
        if "token_ids" in request:
            answer = measure(model, press, request["token_ids"])
        else:
            pipeline = pipeline or transformers.pipeline(
                "kv-press-text-generation", model=model, tokenizer=AutoTokenizer.from_pretrained(folder)
            )
            answer = answered(pipeline, press, request)
        print(json.dumps(answer), file=answers, flush=True)


def answered(pipeline: Any, press: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The answers of one document. Questions with one prefix and length share a prefill, as in `evaluate.py`."""
    groups: dict[Any, list[int]] = {}
    for at, one in enumerate(request["questions"]):
        groups.setdefault((at if request["known"] else None, one["prefix"], one["max_new_tokens"]), []).append(at)
    answers: dict[int, dict[str, Any]] = {}
    try:
        for (_, prefix, longest), places in groups.items():
            texts = [request["questions"][at]["text"] for at in places]
            of_group = _answer(pipeline, press, request["context"], texts, request["known"], prefix, longest)
            answers |= dict(zip(places, of_group, strict=True))
    except Exception as error:  # of one document; others are asked
        return {"refused": f"{type(error).__name__}: {error}"}
    tokens = len(pipeline.tokenizer.encode(request["context"], add_special_tokens=False))
    return {"tokens": tokens, "answers": [answers[at] for at in range(len(answers))]}


def _answer(
    pipeline: Any, press: Any, context: str, texts: list[str], known: bool, prefix: str, longest: int
) -> list[dict[str, Any]]:
    cache, started = DynamicCache(), time.perf_counter()
    with torch.inference_mode():
        output = pipeline(
            context + texts[0] if known else context,
            questions=[""] if known else texts,
            answer_prefix=prefix,
            press=press,
            max_new_tokens=longest,
            cache=cache,
        )
    stored = sum(part.numel() * part.element_size() for layer in cache.layers for part in (layer.keys, layer.values))
    seconds = (time.perf_counter() - started) / len(texts)
    return [{"text": text, "bytes": stored, "seconds": seconds} for text in output["answers"]]


def measure(model: Any, press: Any, token_ids: list[int]) -> dict[str, float]:
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
