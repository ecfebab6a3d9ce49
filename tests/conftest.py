"""What several rooms' tests share: small real models."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TOKENIZER = Path(__file__).parent.parent / "kvshelf" / "models" / "kvshelf-tiny"


def save_random_model(folder: Path, *, layers: int = 2, width: int = 64, positions: int = 16384, seed: int = 0) -> Path:
    """A random Qwen2 with the bundled tokenizer and chat template, as a Hugging Face folder. It says nothing sensible,
    and as it has no end token its answers are as long as they may be."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len_tokenizer(),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.5,
        eos_token_id=None,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    return folder


def len_tokenizer() -> int:
    from tokenizers import Tokenizer

    size: int = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")).get_vocab_size()
    return size


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 2 layers: a forward takes milliseconds."""
    return save_random_model(tmp_path_factory.mktemp("models") / "random-tiny")


@pytest.fixture(scope="session")
def soak() -> bool:
    """Whether the full counts are run (KVSHELF_SOAK=1, `make soak`) instead of the reduced ones."""
    return os.environ.get("KVSHELF_SOAK") == "1"
