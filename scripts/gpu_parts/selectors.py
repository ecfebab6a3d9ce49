"""A decode step that reads 1/16 of a document of 128k tokens, beside one that reads all."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvshelf.artifact.cache import CompressedCache
from kvshelf.artifact.records import Kept
from kvshelf.kernels.quantize.rows import QuantizedRows
from kvshelf_bench.speed.selecting import SELECTORS, selecting
from kvshelf_bench.speed.subject import Subject
from scripts.gpu_parts.models import llama_8b
from scripts.gpu_parts.part import Part

_TOKENS = 131072
_WANTED = 0.3


def measure(part: Part) -> None:
    subject = llama_8b(part)
    tokens = 1024 if part.toy else _TOKENS
    for count, codec in ((1, "none"), (2, "none"), (4, "int4")):
        caches: list[CompressedCache] = []
        for selector in SELECTORS:
            with part.trying(f"{selector}, {count} answers, {codec}"):
                part.require_s(6)
                caches = caches or [_document(part, subject, tokens, codec) for _ in range(count)]
                row = selecting(subject, caches, selector, 2)
                step, choice = row.selected_s.median, row.choice_s.median
                read = f"{row.read_tokens:,} of {tokens:,} entries a head"
                times = f"{row.dense_s.median * 1e3:.2f} ms dense, {step * 1e3:.2f} selected"
                note = f"{times}, of which {choice * 1e3:.2f} choose; {read}"
                part.row(f"{selector}, {count} documents, {codec}: a step over a dense one", row.ratio.median,
                         "times", at_most=_WANTED, note=note)  # fmt: skip
        del caches


def _document(part: Part, subject: Subject, tokens: int, codec: str) -> CompressedCache:
    """A cache of random keys and values, in place of a prefill that takes longer than the whole part: those of a short
    document, with other entries."""
    short = subject.engine.compress(subject.tokens(64, seed=10), policy="full")
    positions, layers = torch.arange(tokens, dtype=torch.int32, device=part.device), []
    for record in short.layers:
        assert isinstance(record, Kept)
        heads, dim = record.kv_heads, record.key_dim
        entries = heads * tokens
        rows = [torch.randn(entries, dim, device=part.device, dtype=part.dtype) for _ in range(2)]
        if codec == "int4":
            sizes = {"lengths": [tokens] * heads, "bits": 4, "group": 32}
            rows = [
                QuantizedRows.quantize(tensor, axis=axis, **sizes)  # type: ignore[arg-type]
                for tensor, axis in zip(rows, ("tokens", "channels"), strict=True)
            ]
        offsets = tuple(range(0, entries + 1, tokens))
        layers.append(
            replace(record, keys=rows[0], values=rows[1], entries_at=positions.repeat(heads), offsets=offsets,
                    importance=None)
        )  # fmt: skip
    identity = replace(short.identity, num_tokens=tokens, budget_tokens=tokens)
    return replace(
        short, layers=tuple(layers), num_tokens=tokens, next_position=tokens, identity=identity, codec=codec, summary=()
    )
