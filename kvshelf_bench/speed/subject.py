"""The model that a bench of speed measures, in a folder from which another process can load it too."""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest
from kvshelf.model.devices import chosen_dtype
from kvshelf.model.loading import chosen_device, readable
from kvshelf.model.prepacking import prepack
from kvshelf.model.source import source_of
from kvshelf.model.weights.adapter import require_none
from kvshelf.model.weights.int8 import require_int8, round_to_int8
from kvshelf_bench.engines import EngineOptions

QUESTION_TOKENS = 32
"""Tokens of every question that a bench of speed asks."""

ANSWER_TOKENS = 64
"""Tokens of its longest answers, but for those of the part `suffix`."""


_NAME = re.compile(r"random:(\d+)")


@dataclass(frozen=True)
class Subject:
    """An engine, and the source from which another process loads the same model: a local folder or a hub id. gguf: the
    file that the folder was converted from."""

    engine: Engine
    source: str
    gguf: str | None = None

    @property
    def device(self) -> torch.device:
        return torch.device(self.engine.model.device)

    @property
    def dtype(self) -> str:
        return str(self.engine.model.dtype).removeprefix("torch.")

    def tokens(self, count: int, seed: int) -> list[int]:
        """Random token ids. The content of a document does not change the cost of its prefill."""
        return random.Random(seed).choices(range(self.engine.model.config.vocab_size), k=count)


@contextmanager
def load_subject(options: EngineOptions) -> Iterator[Subject]:
    """Its model is a bundled one, a local folder, a hub id, or "random:8" for a random Llama of 8 layers.

    It is prepacked as in replicas, for everything that is measured, including what kvshelf is compared with.
    """
    name, weights, layers = options.model, options.weights, random_layers(options.model)
    with tempfile.TemporaryDirectory(prefix="kvshelf-bench-") as folder:
        if layers is None:
            require_none(name, "what kvshelf is compared with")
            engine, origin = options.load(), source_of(name)
            source = readable(name)
            gguf = origin if origin != source else None
        else:
            options.configure()
            save_random_model(Path(folder), layers)
            model = load_random_model(Path(folder), chosen_device(options.device), options.dtype)
            if weights == "int8":
                require_int8(model, name, device=options.device, dtype=options.dtype)
                round_to_int8(model, name)
            engine, source, gguf = Engine(model, name=name), folder, None
            prepack(engine.model, weights)
        yield Subject(engine, source, gguf)


def fitting(
    subject: Subject, lengths: Sequence[int] | None, usual: Sequence[int], part: str, left_out: list[str]
) -> list[int]:
    """Tokens of the documents of a part of the bench: `lengths`, or where these are None the `usual` ones that the
    model takes with a question and an answer, and at least its longest. left_out: gets a line for the usual ones that
    it does not take. Raises `InvalidRequest` for one of `lengths` that it does not take."""
    engine = subject.engine
    most = engine.max_tokens - QUESTION_TOKENS - ANSWER_TOKENS
    if lengths and max(lengths) > most:
        raise InvalidRequest(
            f"--lengths {max(lengths)}: {engine.name!r} takes {engine.max_tokens:,} tokens, and a question and an "
            f"answer need {QUESTION_TOKENS + ANSWER_TOKENS} of them; give {most} at most",
            param="lengths",
        )
    if lengths:
        return list(lengths)
    if longer := [f"{length:,}" for length in usual if length > most]:
        left_out.append(f"{part} of {' and '.join(longer)} tokens: {engine.name!r} takes {engine.max_tokens:,}")
    return [length for length in usual if length <= most] or [most]


def random_layers(name: str) -> int | None:
    """The layers that a model's name asks for: 8 of "random:8". None for every other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layers = int(match[1])
    if not 1 <= layers <= 64:
        raise InvalidRequest(f"{name!r} has {layers} layers; give 1 to 64", param="model")
    return layers


def save_random_model(folder: Path, layers: int) -> None:
    """Write the model into `folder` as safetensors, in fp32: hidden 512, 8 query and 2 KV heads of 64 channels.

    Equal `layers` give equal weights. It has no tokenizer, so documents and questions are token ids, and no end token.
    """
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=65536,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder, safe_serialization=True)


def load_random_model(folder: Path, device: torch.device, dtype: str) -> LlamaForCausalLM:
    """The model that `save_random_model` wrote, its weights rounded to `dtype`."""
    chosen = chosen_dtype(dtype, auto=torch.float32)
    return LlamaForCausalLM.from_pretrained(folder, dtype=chosen).to(device).eval()
