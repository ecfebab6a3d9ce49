"""Which form of an operation runs, and that it does not matter to the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from kvshelf.errors import InternalError
from kvshelf.kernels.column_sums import column_sums
from kvshelf.kernels.dispatch import implementation
from tests.kernels.tensors import error, random

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

WHOLE_JOB = """
import json, torch
from transformers import LlamaConfig, LlamaForCausalLM
from kvshelf import Engine

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=64, max_position_embeddings=256, eos_token_id=None))
engine = Engine(model.eval())
document = torch.randint(64, (80,)).tolist()
results = {}
for policy, params in {"snapkv": {"window": 8}, "lagkv": {"lag": 8}, "h2o": {}, "ems": {"window": 8, "tau": 0.3},
                       "ada": {"window": 8}, "keydiff": {}}.items():
    cache = engine.compress(document, policy=policy, budget_tokens=24, **params)
    answers = [engine.answer(c, [5, 6, 7], max_new_tokens=3).token_ids for c in (cache, cache.encoded("int4"))]
    results[policy] = [[head.tolist() for layer in cache.layers for head in layer.positions], answers]
print(json.dumps(results))
"""


def test_cuda_gets_triton_and_everything_else_torch():
    assert implementation("merge", CPU).__name__ == "kvshelf.kernels.merge.eager"
    assert implementation("merge", torch.device("meta")).__name__ == "kvshelf.kernels.merge.eager"
    pytest.importorskip("triton")
    assert implementation("merge", CUDA).__name__ == "kvshelf.kernels.merge.triton"


def test_a_form_can_be_forced(monkeypatch):
    queries, keys = random(4, 9, 8), random(2, 9, 8, seed=1)
    expected, _ = column_sums(queries, keys, 0.3)
    for form in ("reference", *(["triton"] if _has_triton() else [])):
        monkeypatch.setenv("KVSHELF_KERNELS", form)
        assert implementation("column_sums", CPU).__name__.endswith(form)
        ours, _ = column_sums(queries, keys, 0.3)
        assert ours.dtype == torch.float32
        assert error(ours, expected) < 1e-5


def test_what_cannot_be_forced_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("KVSHELF_KERNELS", "cuda")
    with pytest.raises(InternalError, match="'cuda'; it must be one of eager, reference, triton"):
        implementation("merge", CPU)
    monkeypatch.setenv("KVSHELF_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(InternalError, match="TRITON_INTERPRET=1"):
        implementation("select", torch.device("meta"))


def test_the_whole_job_is_the_same_under_every_form():
    """Compressed, quantized, attached and asked: the same entries and the same answers from torch's operations, from
    the naive references and from Triton's kernels under the interpreter. Each in a process of its own."""
    found = {form: _run(form) for form in ("eager", "reference", *(["triton"] if _has_triton() else []))}
    assert len(found["eager"]) == 6
    for form, results in found.items():
        for policy, result in results.items():
            assert result == found["eager"][policy], (form, policy)


def _run(form):
    environment = {**os.environ, "KVSHELF_KERNELS": form, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WHOLE_JOB],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def _has_triton():
    return find_spec("triton") is not None
