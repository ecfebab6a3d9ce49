"""An engine whose questions llama.cpp answers, from a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

from kvshelf.engine.asker import Asker
from kvshelf.engine.decode.batch import DecodeBatch
from kvshelf.engine.engine import Engine
from kvshelf.engine.files import llamacpp
from kvshelf.engine.files.prefix import require_alike
from kvshelf.engine.llama.batch import LlamaBatch
from kvshelf.engine.llama.sequences import Sequences
from kvshelf.errors import InvalidRequest
from kvshelf.model.source import is_gguf, source_of
from kvshelf.model.weights.adapter import require_none

NAME: Final = llamacpp.NAME

MEMORY: Final = 1 << 30
"""Bytes of llama.cpp's keys and values, unless told otherwise."""

_TRIAL_CELLS: Final = 3

_SCALES: Final = (".rope.scaling.type", ".rope.scaling.factor", ".rope.scale_linear")


class LlamaAsker(Asker):
    """Begins answers that llama.cpp computes."""

    answers_from = "llama.cpp answers from one cache, and from all of it"
    lacks = {
        "route": ("the route {}", "route"),
        "several": ("several caches together", "cache_ids"),
        "part": ("a part of a cache", "select"),
        "suffix": ("answers that drop entries", "suffix"),
        "passages": ("the passages that an answer read", "passages"),
        "likelihood": ("how likely a question is", "route"),
        "routes": ("routes among several caches", "route"),
    }

    sequences: Sequences

    def open(self, sequences: Sequences) -> None:
        """Use these from now on, once llama.cpp has shown that it reads a cache as it is written."""
        if sequences.vocabulary < self._encoder.vocab_size:
            raise InvalidRequest(
                f"llama.cpp has {sequences.vocabulary} tokens of the model, and its tokenizer more", param="model"
            )
        self.sequences = sequences
        random = torch.Generator().manual_seed(0)
        halves = [
            (
                torch.randn(shape.kv_heads, _TRIAL_CELLS, shape.key_dim, generator=random).half(),
                torch.randn(shape.kv_heads, _TRIAL_CELLS, shape.value_dim, generator=random).half(),
            )
            for shape in self._passes.layer_shapes
        ]
        sequences.require_alike(llamacpp.state_of(halves, self._facts.model.config.model_type, first=0), _TRIAL_CELLS)

    def batch(self) -> DecodeBatch:
        return LlamaBatch(self._passes, self._attachments, self.sequences)


class LlamaEngine(Engine):
    """One model of a GGUF file. kvshelf's own passes, on its dequantized weights, read, compress and measure documents.
    llama.cpp runs the tokens of question and answer: the entries of the cache become the cells of a sequence, at the
    places where kvshelf's own answers read them. It answers from one cache at a time, and from all of its entries."""

    _asker: ClassVar = LlamaAsker
    asker: LlamaAsker

    @classmethod
    def load(cls, name: str, *, memory: int = MEMORY, weights: str = "plain", **options: Any) -> LlamaEngine:
        """As `Engine.load`, of a GGUF file or a name that stands for one. memory: bytes for keys and values of open
        questions and of the documents that they are about, in float16.

        Raises `InvalidRequest` for another kind of file, `PolicyUnsupported` for a type of model that was not compared
        with llama.cpp's, `MissingExtra` where llama-cpp-python cannot do what is needed.
        """
        file = gguf_of(name)
        if weights != "plain":
            raise InvalidRequest("llama.cpp runs the weights of its file; take weights plain", param="weights")
        engine: LlamaEngine = super().load(name, **options)  # type: ignore[assignment]
        require_alike(engine, NAME, llamacpp.PERMUTED)
        cell = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in engine.passes.layer_shapes) * 2
        cells = min(max(memory // cell, 512), 4 * engine.max_tokens)
        engine.asker.open(Sequences(file, cells=cells, threads=torch.get_num_threads()))
        return engine

    @property
    def sequences(self) -> Sequences:
        return self.asker.sequences

    def link(self, makers: Mapping[str, float]) -> None:
        """Answer from caches of linked models, too. makers: the agreement with each, by its fingerprint."""
        self.attachments.readable = replace(self.attachments.readable, linked=makers)


def gguf_of(name: str) -> Path:
    """The GGUF file of a model's name. Raises `InvalidRequest` for none, for a scaled rotation, and as `source_of`."""
    require_none(name, "--engine llama.cpp")
    file = Path(source_of(name))
    if not file.is_file() or not is_gguf(file):
        raise InvalidRequest(
            f"--engine llama.cpp needs a GGUF file, and {name!r} is none; convert the weights with llama.cpp's "
            "convert_hf_to_gguf.py",
            param="model",
        )
    if (scaled := _scaling(file)) is not None:
        raise InvalidRequest(
            f"{file.name!r} scales its RoPE ({scaled}), which llama.cpp does and the passes that read documents from a "
            "GGUF file do not: they would disagree; take a model without it, or kvshelf's own engine on the weights "
            "that were converted",
            param="model",
        )
    return file


def _scaling(file: Path) -> str | None:
    """What in a GGUF file changes the rotation that its base alone gives: transformers reads none of it from there."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        named = [tensor.name for tensor in reader.tensors if tensor.name.startswith(("rope_freqs", "rope_factors"))]
        scales = {name: field.contents() for name, field in reader.fields.items() if name.endswith(_SCALES)}
    except (OSError, ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file.name!r} cannot be read as GGUF: {error}", param="model") from error
    named += [f"{name} {value}" for name, value in scales.items() if value not in ("none", 0.0, 1.0)]
    return ", ".join(named) or None
