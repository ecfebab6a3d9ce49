"""Answers of kvpress, in a Python that has it: a task as JSON on standard input, a line of JSON for each document under
each press on standard output. Imports nothing of kvshelf, which need not be there."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any


def main() -> None:
    with contextlib.redirect_stdout(sys.stderr):  # whatever the packages print is no answer
        import kvpress
        import torch
        from transformers import DynamicCache, pipeline
        from transformers.utils import logging

    task = json.loads(sys.stdin.read())
    torch.set_num_threads(task["threads"] or torch.get_num_threads())
    logging.disable_progress_bar()
    with contextlib.redirect_stdout(sys.stderr):
        asked = pipeline(
            "kv-press-text-generation",
            model=task["model"],
            device=task["device"],
            dtype=getattr(torch, task["dtype"]),
        )

    def answer(press: Any, context: str, question: dict[str, Any]) -> dict[str, Any]:
        cache, started = DynamicCache(), time.perf_counter()
        output = asked(
            context + (question["text"] if task["known"] else ""),
            question="" if task["known"] else question["text"],
            answer_prefix=question["prefix"],
            press=press,
            max_new_tokens=question["max_new_tokens"],
            cache=cache,
        )
        stored = sum(
            tensor.numel() * tensor.element_size() for layer in cache.layers for tensor in (layer.keys, layer.values)
        )
        return {"answer": output["answer"], "bytes": stored, "seconds": time.perf_counter() - started}

    for document in task["documents"]:
        for press in task["presses"]:
            made = getattr(kvpress, press["class"])(compression_ratio=press["ratio"]) if press["class"] else None
            told: dict[str, Any] = {"document": document["id"], "row": press["row"]}
            told["tokens"] = len(asked.tokenizer.encode(document["context"], add_special_tokens=False))
            try:
                with torch.inference_mode(), contextlib.redirect_stdout(sys.stderr):
                    told["answers"] = [answer(made, document["context"], one) for one in document["questions"]]
            except Exception as error:  # of one document; the others go on
                told["refused"] = f"{type(error).__name__}: {error}"
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
