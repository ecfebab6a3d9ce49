"""Which of transformers' model types kvshelf takes, as docs/internals/model-types.md lists them: a small
random model of each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from kvshelf.engine.engine import Engine
from kvshelf.errors import PolicyUnsupported
from kvshelf_bench.models.small import TYPES, small_model
from kvshelf_bench.models.trial import EXACT, NOT_BUILT, REFUSED, tried
from tests.amounts import amount

PAGE: Final = (Path(__file__).resolve().parents[2] / "docs" / "internals" / "model-types.md").read_text()
OUTCOMES: Final = {"taken": EXACT, "refused": REFUSED, "not tried": NOT_BUILT}
ROWS: Final = [
    (OUTCOMES[said], why, re.findall(r"`(\S+?)`", types))
    for said, why, types in re.findall(r"^\| (taken|refused|not tried) \| (.*?) ?\| (.*?) \|$", PAGE, re.M)
]
"""Outcome, reason and types of each row of the page."""

(TRIED_WITH,) = re.findall(r"^With transformers (\S+):", PAGE, re.M)
HERE: Final = Version(transformers.__version__)
OLDER: Final = Version(TRIED_WITH) > HERE

LATENT: Final = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "youtu"}
WITH_STATES: Final = {
    "bamba", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "minimax", "nemotron_h", "olmo_hybrid",
    "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zaya",
}  # fmt: skip
LATER: Final = {"codegen", "ctrl", "gemma3n_text", "gptj"} | LATENT | WITH_STATES
"""Types that the page calls taken and kvshelf refuses with the oldest transformers allowed, whose attention differs, or
whose cache does."""

STRIDE: Final = amount(4, 1)
SAMPLE: Final = [(what, why, each) for what, why, types in ROWS for each in types[::STRIDE]]
"""The first type of each row and each fourth after it; all in a soak."""


@pytest.mark.slow
@pytest.mark.parametrize(("what", "why", "model_type"), SAMPLE, ids=[each for *_, each in SAMPLE])
def test_a_type_is_taken_or_refused_as_the_page_says(what: str, why: str, model_type: str) -> None:
    if model_type not in TYPES:
        pytest.skip(f"transformers {HERE} does not know this type")
    found = tried(model_type, limit_s=10 if OLDER else 100)
    if OLDER and (found.what == NOT_BUILT or (model_type in LATER and found.what == REFUSED)):
        pytest.skip(f"with transformers {HERE} it is {found.what}: {found.why}")
    assert found.what == what, found
    if Version(TRIED_WITH) == HERE and what == REFUSED:
        assert found.why == why


def test_the_page_lists_every_type() -> None:
    listed = [each for *_, types in ROWS for each in types]
    assert len(listed) == len(set(listed)) > 190
    if Version(TRIED_WITH) == HERE:
        assert set(listed) == set(TYPES)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "phi", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "opt"])
def test_a_reduced_cache_answers(model_type: str) -> None:
    engine = Engine(small_model(model_type))
    document = torch.randint(5, 500, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    half = engine.compress(document, policy="keydiff", compression_ratio=0.5)
    assert half.kept_tokens == 50
    assert len(engine.answer(half, [7, 300, 12], max_new_tokens=3).token_ids) == 3


def test_an_encoder_decoder_is_refused() -> None:
    config = AutoConfig.for_model("t5", vocab_size=512, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    with pytest.raises(PolicyUnsupported, match="is an encoder-decoder"):
        Engine(AutoModelForSeq2SeqLM.from_config(config).eval())


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("roberta", "does not count positions from 0"),
        ("jetmoe", "works on cached keys or values before it attends"),
        ("dory", "layer 0 attends more than once in a pass"),
        ("nemotron", r"only the layers \[\] of 4 ran through"),
        ("moshi", "layer 0 attends with a sliding window of None"),
    ],
)
def test_what_only_a_pass_shows_is_refused_before_any_document(model_type: str, said: str) -> None:
    """Also where a replica asks for it, at its start; the model is as it was."""
    if model_type not in TYPES or (OLDER and model_type in ("nemotron", "moshi")):
        pytest.skip(f"transformers {HERE} does not know this type, or refuses it for another reason")
    model = small_model(model_type)
    engine, before = Engine(model, name="m"), model.config._attn_implementation
    job, layers = engine.prepare(list(range(5, 50)), policy="full"), list[int]()
    with pytest.raises(PolicyUnsupported, match=said):
        _ = engine.passes.layer_shapes
    with pytest.raises(PolicyUnsupported, match=said):
        engine.run(job, checkpoint=lambda: layers.append(0))
    assert layers == []
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("gemma3", "is made of several models"),
        ("gemma4_text", "has layers that differ in head_dim"),
        ("blt", r"says no number of layers \(num_hidden_layers\)"),
        ("xlstm", r"says no longest sequence \(max_position_embeddings\)"),
    ],
)
def test_what_a_configuration_tells_is_refused_when_the_engine_is_made(model_type: str, said: str) -> None:
    if model_type not in TYPES:
        pytest.skip(f"transformers {HERE} does not know this type")
    with pytest.raises(PolicyUnsupported, match=said):
        Engine(small_model(model_type))
