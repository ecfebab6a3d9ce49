"""Run by the Python that has mlx-lm: answers questions from exported files, as JSON on stdout.

Arguments: a folder of weights, a folder with `asked.json`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache


def main(weights: str, folder: Path) -> list[dict]:
    model, _ = load(weights)
    results, prefilled = [], set()
    for asked in json.loads((folder / "asked.json").read_text()):
        began = time.perf_counter()
        cache = load_prompt_cache(str(folder / f"{asked['name']}.safetensors"))
        before = cache[0].offset
        steps = generate_step(mx.array(asked["question"]), model, max_tokens=len(asked["answer"]), prompt_cache=cache)
        said = [int(next(steps)[0])]
        begun = 1  # mlx-lm gives a token when the pass of the next one has begun
        result = {"first_s": time.perf_counter() - began, "evaluated": cache[0].offset - before - begun}
        said += [int(token) for token, _ in steps]
        if asked["whole"] and asked["name"] not in prefilled:
            prefilled.add(asked["name"])
            began = time.perf_counter()
            ids = mx.array([*asked["document"], *asked["question"]])
            again = next(generate_step(ids, model, max_tokens=1, prompt_cache=make_prompt_cache(model)))
            result |= {"prefill_s": time.perf_counter() - began, "prefill_first": int(again[0])}
        results.append(result | {"tokens": said})
    return results


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
