"""vLLM with its own prefill beside vLLM that reads the shelf: first tokens, and many questions at once.

    python -m scripts.measure_vllm --tokens 1000 2000 4000      # the first token of one question
    python -m scripts.measure_vllm --documents 32               # as many questions at once, on a document each

The second one also asks kvshelf's own engine, which reads the same shelf, in the same process and in turn. The model is
the random one of 8 layers of `kvshelf bench speed`, in fp32. Needs the environment of `make test-vllm`.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from kvshelf import Engine, open_store
from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.decode.generation import Sampling
from kvshelf.integrations.vllm.request import PAGE, ShelfRequest, is_ragged, places_of
from kvshelf.model.source import bundled_folder
from kvshelf.store.base import Store
from kvshelf.store.manifest import Manifest
from kvshelf.workers.replica.scheduler import Scheduler, SchedulerLimits
from kvshelf_bench.engines import endless_answers
from kvshelf_bench.speed.subject import save_random_model

Draw = Callable[[int], list[int]]

QUESTION = 32
DOCUMENT = 1024
ANSWER = 32
ROUNDS = 5
"""Of which the fastest counts, because neighbours only add time."""
WAYS: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "full, int4": {"policy": "full", "codec": "int4"},
    "keydiff, 75 % removed": {"policy": "keydiff", "compression_ratio": 0.75},
    "ada, 75 % removed": {"policy": "ada", "compression_ratio": 0.75},
}


def first_token_s(llm: LLM, prompt: dict[str, Any], extra: dict[str, Any]) -> float:
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, extra_args=extra)
    started = time.perf_counter()
    (output,) = llm.generate(prompt, sampling, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    return time.perf_counter() - started


def request_to(manifest: Manifest, question: Sequence[int]) -> ShelfRequest:
    return ShelfRequest(manifest.id, places_of(manifest, PAGE), tuple(question), ragged=is_ragged(manifest))


def first_tokens(llm: LLM, engine: Engine, store: Store, draw: Draw, lengths: Sequence[int]) -> None:
    for tokens in lengths:
        times: dict[str, list[tuple[float, float]]] = {}
        for _ in range(ROUNDS + 1):  # the first one warms up
            document = draw(tokens)
            prompts = [{"prompt_token_ids": document + draw(QUESTION)} for _ in range(2)]
            first, again = (first_token_s(llm, prompt, {}) for prompt in prompts)
            times.setdefault("vLLM", []).append((first, again))
            for name, how in WAYS.items():
                cache = stored(engine, store, document, how)
                requests = [request_to(cache, draw(QUESTION)) for _ in range(2)]
                first, again = (first_token_s(llm, *request.offline) for request in requests)
                times.setdefault(name, []).append((first, again))
        for name, pairs in times.items():
            first, again = (1000 * min(seconds) for seconds in zip(*pairs[1:], strict=True))
            print(f"{tokens} tokens, {name}: {first:.0f} ms, again {again:.0f} ms", flush=True)


def questions_at_once(llm: LLM, engine: Engine, store: Store, draw: Draw, count: int) -> None:
    """New tokens a second of all answers. The first questions find nothing in a prefix cache or in the engine's memory,
    the second ones find all documents there."""
    scheduler = Scheduler(engine, SchedulerLimits(max_open=count, max_waiting=count))
    scheduler.start()
    seconds_by_way: dict[str, list[tuple[float, float]]] = {}
    for _ in range(ROUNDS + 1):
        documents = [draw(DOCUMENT) for _ in range(count)]
        asks: dict[str, Callable[[list[list[int]]], None]] = {"vLLM alone": by_vllm(llm, documents)}
        for name, how in WAYS.items():
            manifests = [stored(engine, store, document, how) for document in documents]
            asks[f"vLLM, shelf: {name}"] = by_connector(llm, manifests)
            asks[f"kvshelf: {name}"] = by_engine(scheduler, store, manifests)
        for name, ask in asks.items():
            pair = []
            for _ in range(2):
                questions = [draw(QUESTION) for _ in range(count)]
                started = time.perf_counter()
                ask(questions)
                pair.append(time.perf_counter() - started)
            seconds_by_way.setdefault(name, []).append((pair[0], pair[1]))
    scheduler.stop()
    for name, pairs in seconds_by_way.items():
        first, again = (count * ANSWER / min(seconds) for seconds in zip(*pairs[1:], strict=True))
        print(f"{count} questions, {name}: {first:.0f} tokens/s, again {again:.0f} tokens/s", flush=True)


def by_vllm(llm: LLM, documents: Sequence[list[int]]) -> Callable[[list[list[int]]], None]:
    def ask(questions: list[list[int]]) -> None:
        prompts = [
            {"prompt_token_ids": document + question} for document, question in zip(documents, questions, strict=True)
        ]
        outputs = llm.generate(prompts, answers({}), use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == ANSWER for output in outputs)

    return ask


def by_connector(llm: LLM, manifests: Sequence[Manifest]) -> Callable[[list[list[int]]], None]:
    def ask(questions: list[list[int]]) -> None:
        pairs = zip(manifests, questions, strict=True)
        requests = [request_to(manifest, ids).offline for manifest, ids in pairs]
        prompts, extras = zip(*requests, strict=True)
        outputs = llm.generate(list(prompts), [answers(extra) for extra in extras], use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == ANSWER for output in outputs)

    return ask


def by_engine(scheduler: Scheduler, store: Store, manifests: Sequence[Manifest]) -> Callable[[list[list[int]]], None]:
    resident: dict[str, CompressedCache] = {}

    def ask(questions: list[list[int]]) -> None:
        tickets = []
        for manifest, question in zip(manifests, questions, strict=True):
            if manifest.id not in resident:
                resident[manifest.id] = store.get(manifest.id)
            tickets.append(scheduler.generate(resident[manifest.id], question, Sampling(max_tokens=ANSWER)))
        assert all(len(ticket.future.result().token_ids) == ANSWER for ticket in tickets)

    return ask


def answers(extra: dict[str, Any]) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False, extra_args=extra)


def stored(engine: Engine, store: Store, document: list[int], how: dict[str, Any]) -> Manifest:
    options = {"codec": "none"} | how
    codec = options.pop("codec")
    with torch.no_grad():
        return store.put(engine.compress(document, **options), codec=codec)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 2000, 4000])
    parser.add_argument("--documents", type=int, help="how many documents, and questions at once")
    options = parser.parse_args()
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
        longest = max([DOCUMENT + ANSWER] if options.documents else options.tokens) + 2 * QUESTION
        llm = LLM(str(folder), dtype="float32", max_model_len=longest, kv_transfer_config=connector, seed=0)
        drawn = random.Random(0)

        def ids(count: int) -> list[int]:
            return [drawn.randrange(5, engine.model.config.vocab_size) for _ in range(count)]

        if options.documents:
            with endless_answers(engine):
                questions_at_once(llm, engine, store, ids, options.documents)
        else:
            first_tokens(llm, engine, store, ids, options.tokens)


if __name__ == "__main__":
    main()
