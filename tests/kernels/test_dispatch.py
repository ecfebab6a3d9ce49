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
from kvshelf.kernels import dispatch
from kvshelf.kernels.column_sums import column_sums
from kvshelf.kernels.dispatch import implementation
from kvshelf.kernels.native import library
from kvshelf.kernels.rowwise import available
from tests.kernels.tensors import error, random

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

WHOLE_JOB = """
import json, os, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from kvshelf import Engine

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=64, max_position_embeddings=256, eos_token_id=None))
engine = Engine(model.eval())
document = torch.randint(64, (40,)).tolist()
policies = {"snapkv": {"window": 8}, "lagkv": {"lag": 8}, "h2o": {}, "ems": {"window": 8, "tau": 0.3},
            "ada": {"window": 8}, "keydiff": {}}
for form in sys.argv[1:]:
    name, _, threads = form.partition(" on ")
    os.environ["KVSHELF_KERNELS"] = name
    torch.set_num_threads(int(threads or 1))
    results = {}
    for policy, params in policies.items():
        cache = engine.compress(document, policy=policy, budget_tokens=20, **params)
        answers = [engine.answer(c, [5, 6], max_new_tokens=2).token_ids for c in (cache, cache.encoded("int4"))]
        results[policy] = [[head.tolist() for layer in cache.layers for head in layer.positions], answers]
    print(json.dumps(results))
"""
"""Answers under the kernels of each argument, a line each: a form, or "native on 2", with threads."""


def test_cuda_gets_triton_a_cpu_what_was_compiled_and_everything_else_torch():
    native = "eager" if library() is None else "native"
    assert implementation("prefix_attention", CPU).__name__ == f"kvshelf.kernels.prefix_attention.{native}"
    assert implementation("merge", torch.device("meta")).__name__ == "kvshelf.kernels.merge.eager"
    pytest.importorskip("triton")
    assert implementation("merge", CUDA).__name__ == "kvshelf.kernels.merge.triton"


def test_a_gpu_without_triton_computes_by_torch_and_one_warning_says_so(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "find_spec", lambda _: None)
    dispatch.gpu_form.cache_clear()
    assert [dispatch.gpu_form(), dispatch.gpu_form()] == ["eager", "eager"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Triton is not installed" in caplog.text
    dispatch.gpu_form.cache_clear()


def test_a_form_can_be_forced(monkeypatch):
    queries, keys = random(4, 9, 8), random(2, 9, 8, seed=1)
    expected, _ = column_sums(queries, keys, 0.3)
    for form in ("eager", *(["triton"] if _has_triton() else [])):
        monkeypatch.setenv("KVSHELF_KERNELS", form)
        assert implementation("column_sums", CPU).__name__.endswith(form)
        ours, _ = column_sums(queries, keys, 0.3)
        assert ours.dtype == torch.float32
        assert error(ours, expected) < 1e-5


@pytest.mark.skipif(library() is None, reason="no library was compiled for this CPU")
def test_an_empty_setting_forces_no_form(monkeypatch):
    """As a compose file gives it for a variable that is not set."""
    for forced, name in {"": "native", "native": "native", "eager": "eager"}.items():
        monkeypatch.setenv("KVSHELF_KERNELS", forced)
        assert implementation("column_sums", CPU).__name__.endswith(name)
        assert available() == (name == "native")


def test_what_cannot_be_forced_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("KVSHELF_KERNELS", "cuda")
    with pytest.raises(InternalError, match="'cuda'; it must be one of eager, native, triton"):
        implementation("merge", CPU)
    monkeypatch.setenv("KVSHELF_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(InternalError, match="TRITON_INTERPRET=1"):
        implementation("select", torch.device("meta"))
    monkeypatch.setenv("KVSHELF_KERNELS", "native")
    with pytest.raises(InternalError, match="compiled kernels were forced on a meta tensor"):
        implementation("prefix_attention", torch.device("meta"))


@pytest.mark.slow
def test_the_whole_job_is_the_same_under_every_form():
    """Compressed, quantized, attached and asked: the same entries and the same answers from torch's operations, from
    what was compiled, on one thread and on two, and from Triton's kernels under the interpreter."""
    compiled = ["native", "native on 2"] if library() is not None else []
    triton = ["triton"] if _has_triton() else []
    expected, *others = _run("eager", *compiled, *triton, TRITON_INTERPRET="1")
    assert len(expected) == 6
    if compiled:
        others += _run("native", KVSHELF_CPU_LEVEL="avx2")
    for results in others:
        for policy, result in expected.items():
            assert results[policy] == result, policy


def _run(*forms, **settings):
    done = subprocess.run(
        [sys.executable, "-c", WHOLE_JOB, *forms],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | settings,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return list(map(json.loads, done.stdout.splitlines()))


def _has_triton():
    return find_spec("triton") is not None
