"""Times to the first token of a question in vLLM: after its own prefill of the document, and from the shelf.

    python -m scripts.measure_vllm --tokens 1000 2000 4000

The model is the random one of 8 layers of `kvshelf bench speed`, in fp32. Needs the environment of `make test-vllm`.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from kvshelf import Engine, open_store
from kvshelf.bench.speed.subject import save_random_model
from kvshelf.integrations.vllm.request import ShelfRequest
from kvshelf.workers.model.source import bundled_folder

QUESTION = 32
ROUNDS = 5
"""Of which the fastest counts, because neighbours only add time."""
WAYS: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "full, int4": {"policy": "full", "codec": "int4"},
    "keydiff, 75 % removed": {"policy": "keydiff", "compression_ratio": 0.75},
}


def first_token_s(llm: LLM, prompt: dict[str, Any], extra: dict[str, Any]) -> float:
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, extra_args=extra)
    started = time.perf_counter()
    (output,) = llm.generate(prompt, sampling, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 2000, 4000])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home, open_store(f"disk://{home}/shelf") as store:
        folder = Path(home) / "model"
        save_random_model(folder, layers=8)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(bundled_folder("kvshelf-tiny")) / name, folder / name)
        engine = Engine.load(str(folder), device="cpu", dtype="float32")
        connector = KVTransferConfig(
            kv_connector="ShelfConnector",
            kv_connector_module_path="kvshelf.integrations.vllm",
            kv_role="kv_consumer",
            kv_connector_extra_config={"store": f"disk://{home}/shelf"},
        )
        longest = max(given.tokens) + 2 * QUESTION
        llm = LLM(str(folder), dtype="float32", max_model_len=longest, kv_transfer_config=connector, seed=0)
        drawn = random.Random(0)

        def ids(count: int) -> list[int]:
            return [drawn.randrange(5, engine.model.config.vocab_size) for _ in range(count)]

        for tokens in given.tokens:
            times: dict[str, list[tuple[float, float]]] = {}
            for _ in range(ROUNDS + 1):  # the first one warms up
                document = ids(tokens)
                asked = [{"prompt_token_ids": document + ids(QUESTION)} for _ in range(2)]
                first, again = (first_token_s(llm, prompt, {}) for prompt in asked)
                times.setdefault("vLLM", []).append((first, again))
                for name, how in WAYS.items():
                    options = {"codec": "none"} | how
                    codec = options.pop("codec")
                    with torch.no_grad():
                        cache = store.put(engine.compress(document, **options), codec=codec)
                    requests = [ShelfRequest(cache.id, cache.kept_tokens, tuple(ids(QUESTION))) for _ in range(2)]
                    first, again = (first_token_s(llm, *request.offline) for request in requests)
                    times.setdefault(name, []).append((first, again))
            for name, pairs in times.items():
                first, again = (1000 * min(each) for each in zip(*pairs[1:], strict=True))
                print(f"{tokens} tokens, {name}: {first:.0f} ms, again {again:.0f} ms", flush=True)


if __name__ == "__main__":
    main()
