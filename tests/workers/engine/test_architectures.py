"""Which of transformers' model types kvshelf takes, as docs/models.md lists them: a small random model of each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from kvshelf.errors import PolicyUnsupported
from kvshelf.workers.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.workers.engine.engine import Engine

PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"
LISTED = {
    row[0]: re.findall(r"`(\w+)`", row[1])
    for row in re.findall(r"^\| (taken|refused) \| (.*?) \|", PAGE.read_text(), re.M)
}

USUAL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
GPT2 = {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "eos_token_id": None}
SPARSE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "first_k_dense_replace": 2}
SLIDING = {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]}
SIZES: dict[str, dict[str, Any]] = {
    "codegen": GPT2 | {"rotary_dim": 8},
    "deepseek_v3": USUAL | LATENT,
    "falcon": {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "cohere2": USUAL | SLIDING,
    "exaone4": USUAL | SLIDING,
    "gemma2": USUAL | SLIDING,
    "gemma3_text": USUAL | SLIDING,
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "gpt_neo": {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "gpt_oss": USUAL | SPARSE | SLIDING,
    "gptj": GPT2 | {"rotary_dim": 8},
    "llama4_text": USUAL | SPARSE | {"intermediate_size_mlp": 128},
    "bloom": {"vocab_size": 512, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "mamba": {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2},
    "ministral": USUAL | SLIDING,
    "mistral": USUAL | {"sliding_window": None},
    "mixtral": USUAL | SPARSE | {"sliding_window": None},
    "mpt": {"vocab_size": 512, "d_model": 64, "n_layers": 2, "n_heads": 4},
    "olmo3": USUAL | SLIDING,
    "opt": USUAL | {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "phi": {name: value for name, value in USUAL.items() if name != "head_dim"},
    "phi3": USUAL | {"sliding_window": None},
    "qwen2_moe": USUAL | SPARSE | {"shared_expert_intermediate_size": 64},
    "qwen3_moe": USUAL | SPARSE,
    "qwen3_next": USUAL | SPARSE | {"shared_expert_intermediate_size": 64},
    "starcoder2": USUAL | {"sliding_window": None},
    "t5": {"vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
}


LATER: Final = {"gptj", "codegen"}
"""Types whose attention runs through transformers' interface in the newest version, but not in the oldest allowed."""


def random_model(model_type: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES.get(model_type, USUAL))
    maker = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model: PreTrainedModel = maker.from_config(config).eval()
    return model


@pytest.fixture
def document() -> list[int]:
    return torch.randint(5, 500, (100,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("model_type", LISTED["taken"])
def test_a_model_that_is_taken_says_what_it_says_without_kvshelf(model_type: str, document: list[int]) -> None:
    if model_type in LATER and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("its attention does not run through the interface of this version of transformers")
    model = random_model(model_type)
    engine, question = Engine(model), [7, 300, 12]
    with torch.no_grad():
        expected = model(torch.tensor([document + question])).logits[0, -len(question) :]
        with engine.attached(engine.compress(document, policy="full")) as past:
            found = model(torch.tensor([question]), **{CACHE_ARGUMENT: past}).logits[0]
    assert float(expected.std()) > 1e-3  # these models do not say the same about every token
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    half = engine.compress(document, policy="keydiff", compression_ratio=0.5)
    assert half.kept_tokens == 50
    assert len(engine.answer(half, question, max_new_tokens=3).token_ids) == 3


@pytest.mark.parametrize("model_type", LISTED["refused"])
def test_a_model_that_is_refused_is_refused_by_name(model_type: str, document: list[int]) -> None:
    with pytest.raises(PolicyUnsupported):
        Engine(random_model(model_type)).compress(document, policy="full")
