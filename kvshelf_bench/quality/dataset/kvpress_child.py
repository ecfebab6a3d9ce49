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

    def answer(press: Any, context: str, alike: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Of questions with one prefix and one length, which share a prefill, as kvpress's `evaluate.py` has it."""
        cache, started = DynamicCache(), time.perf_counter()
        known = alike[0]["text"] if task["known"] else ""
        output = asked(
            context + known,
            questions=[""] if known else [one["text"] for one in alike],
            answer_prefix=alike[0]["prefix"],
            press=press,
            max_new_tokens=alike[0]["max_new_tokens"],
            cache=cache,
        )
        stored = sum(
            tensor.numel() * tensor.element_size() for layer in cache.layers for tensor in (layer.keys, layer.values)
        )
        seconds = (time.perf_counter() - started) / len(alike)
        return [{"answer": text, "bytes": stored, "seconds": seconds} for text in output["answers"]]

    def answers(press: Any, document: dict[str, Any]) -> list[dict[str, Any]]:
        groups: dict[Any, list[int]] = {}
        for at, one in enumerate(document["questions"]):
            groups.setdefault((at if task["known"] else None, one["prefix"], one["max_new_tokens"]), []).append(at)
        found: dict[int, dict[str, Any]] = {}
        for places in groups.values():
            of_group = answer(press, document["context"], [document["questions"][at] for at in places])
            found |= dict(zip(places, of_group, strict=True))
        return [found[at] for at in range(len(found))]

    for document in task["documents"]:
        for press in task["presses"]:
            made = getattr(kvpress, press["class"])(compression_ratio=press["ratio"]) if press["class"] else None
            told: dict[str, Any] = {"document": document["id"], "row": press["row"]}
            told["tokens"] = len(asked.tokenizer.encode(document["context"], add_special_tokens=False))
            try:
                with torch.inference_mode(), contextlib.redirect_stdout(sys.stderr):
                    told["answers"] = answers(made, document)
            except Exception as error:  # of one document; the others go on
                told["refused"] = f"{type(error).__name__}: {error}"
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
