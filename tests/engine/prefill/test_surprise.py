"""Surprisals of a document's tokens: the model's own, in parts, behind a cache, too, and only for who needs them."""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version

from kvshelf.engine.engine import Engine
from kvshelf.engine.inputs.job import Level
from kvshelf.engine.prefill import surprise
from kvshelf.engine.prefill.surprise import surprisals
from kvshelf.engine.progress import nothing
from kvshelf.engine.quality import rows_at_once
from kvshelf_bench.models.small import small_model
from tests.methods.policies.shaped import random_ids, shaped_model

OLD = Version(transformers.__version__) < Version("5.24")
NEW_ALONE = [
    pytest.param(kind, marks=pytest.mark.skipif(OLD, reason="this transformers caches no latents and states"))
    for kind in ("deepseek_v3", "qwen3_next")
]


def by_the_model(model, ids):
    """All but the first, fp64."""
    with torch.no_grad():
        log_probs = model(torch.tensor([ids]), use_cache=False).logits[0, :-1].double().log_softmax(dim=-1)
    return -log_probs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def of(engine, job):
    return surprise.Surprise.of(engine.passes, job, nothing).values


@pytest.mark.parametrize("parts", [[7], [1] * 7, [3, 4]])
def test_of_logits_in_parts(parts):
    generator = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(7, 20, generator=generator), torch.arange(8) * 2
    values = surprisals(iter(torch.split(logits, parts)), ids)
    expected = -logits.double().log_softmax(-1)[torch.arange(7), ids[1:]]
    torch.testing.assert_close(values[1:].double(), expected, rtol=1e-6, atol=1e-6)
    assert values[0] == values[1:].max()
    assert values.dtype == torch.float32


def test_of_one_token():
    assert surprisals(iter(()), torch.tensor([5])).tolist() == [0.0]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "falcon_h1", "gpt2", "gemma3n_text", *NEW_ALONE])
def test_they_are_the_models_own(kind):
    """Of models with soft caps, windows, latents, states, no RoPE, and layers that share keys, too."""
    model, document = small_model(kind), random_ids(60)
    engine = Engine(model, name="m")
    values = of(engine, engine.prepare(document, policy="sirllm"))
    torch.testing.assert_close(values[1:].double(), by_the_model(model, document), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", *NEW_ALONE])
def test_appended_tokens_surprise_as_they_do_behind_the_whole_document(kind):
    model, document, more = small_model(kind), random_ids(60), random_ids(30, seed=1)
    engine = Engine(model, name="m")
    job = engine.prepare_append(engine.compress(document, policy="full"), more, policy="sirllm", compression_ratio=0.5)
    values = of(engine, job)
    expected = by_the_model(model, document + more)[-29:]
    torch.testing.assert_close(values[1:].double(), expected, rtol=1e-4, atol=1e-4)
    assert values[0] == values[1:].max()
    cache = engine.run(job).cache
    if kind == "llama":
        assert {*(expected.topk(10).indices + 61).tolist()} <= {*cache.layers[-1].positions[0].tolist()}


def test_logits_are_never_all_in_memory(monkeypatch):
    model = shaped_model("llama", 1, vocab_size=200_000, num_hidden_layers=1)
    engine, document, parts = Engine(model, name="m"), random_ids(250), []

    def watched(logits, token_ids):
        def counted():
            for part in logits:
                parts.append(len(part))
                yield part

        return surprisals(counted(), token_ids)

    monkeypatch.setattr(surprise, "surprisals", watched)
    engine.compress(document, policy="sirllm", compression_ratio=0.5)
    assert sum(parts) == 249
    assert max(parts) == rows_at_once(model) == 83


def test_the_model_reads_twice_for_all_levels_together_and_once_for_others(llama):
    def turns(*policies):
        count = 0

        def checkpoint():
            nonlocal count
            count += 1

        jobs = [llama.engine.prepare(llama.ids[:90], policy=name, compression_ratio=ratio) for name, ratio in policies]
        llama.engine.run_levels([Level(job) for job in jobs], cues=0, checkpoint=checkpoint)
        return count

    once = turns(("keydiff", 0.5))
    assert turns(("sirllm", 0.5)) == 2 * once + 1, "and a turn behind the logits"
    assert (
        turns(("sirllm", 0.5), ("sirllm", 0.75), ("keydiff", 0.5)) - turns(("keydiff", 0.5), ("keydiff", 0.75))
        <= once + 1
    )
    assert turns(("sirllm", 0.0)) == once, "there is no work"


def test_the_second_reading_is_time_of_compression(llama):
    jobs = [llama.engine.prepare(llama.ids, policy="sirllm", compression_ratio=ratio) for ratio in (0.5, 0.75)]
    told = []
    levels = [Level(job) for job in jobs]
    both = llama.engine.run_levels(levels, cues=0, progress=lambda *step: told.append(step))
    assert min(compression.compress_s for compression in both) > 0.1 * both[0].prefill_s
    assert [step for step in told if step[0] == "prefill"] == [
        ("prefill", done, 2 * len(llama.engine.facts.kinds)) for done in range(2 * len(llama.engine.facts.kinds) + 1)
    ]


def test_scores_need_them_whatever_stays(llama):
    job = llama.engine.prepare(llama.ids[:60], policy="sirllm", compression_ratio=0.0)
    assert len(llama.engine.compressor.scores(job)) == len(llama.engine.facts.kinds)


def test_a_protected_span_stays_whatever_surprises(llama):
    document = llama.ids[:120]
    options = {"policy": "sirllm", "compression_ratio": 0.75}
    plain = llama.engine.compress(document, **options)
    cache = llama.engine.compress(document, **options, protect=["first:10"])
    values = of(llama.engine, llama.engine.prepare(document, **options))
    judged = values[10:].topk(15).indices + 10
    positions = {*cache.layers[0].positions[0].tolist()}
    assert {*range(10)} <= positions
    assert {*judged.tolist()} <= positions
    assert not {*range(10)} <= {*plain.layers[0].positions[0].tolist()}
