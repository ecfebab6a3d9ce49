"""What a corpus would take: documents an hour, GPUs, bytes, memory of Redis, network. Nothing is run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from kvshelf.corpus.rates import SharedRates
from kvshelf.errors import InvalidRequest
from kvshelf.store.artifact.codecs import Codec
from kvshelf.workers.model.loading import described, skeleton
from kvshelf.workers.policies import build
from kvshelf.workers.policies.budgets import Budget
from kvshelf.workers.replica.create.estimates import ASSUMED_FLOPS, Shape

Home = Literal["redis", "disk"]

BUILT_IN: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama-3.1-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "mistral-7b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                   "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32768},
    "qwen2.5-7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                   "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                 "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936},
}  # fmt: skip
"""Shapes of models in bfloat16, from their published configurations; biases and norms of heads are left out."""


@dataclass(frozen=True)
class Corpus:
    """Documents by their length: (tokens, how many). The counts are whole numbers from 1."""

    lengths: tuple[tuple[int, int], ...]

    @property
    def documents(self) -> int:
        return sum(count for _, count in self.lengths)

    @property
    def tokens(self) -> int:
        return sum(tokens * count for tokens, count in self.lengths)

    @classmethod
    def read(cls, path: Path, documents: int | None) -> Corpus:
        """A file with a length in tokens on each line, and how many documents have it behind that; without a number it
        is one. `documents`: scale the counts to so many. Raises `InvalidRequest` with the line."""
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{path} cannot be read: {error}", param="--lengths") from error
        found = [_length(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
        if not found:
            raise InvalidRequest(f"{path} has no lengths", param="--lengths")
        corpus = cls(tuple(found))
        return corpus if documents is None else corpus.scaled(documents)

    def scaled(self, documents: int) -> Corpus:
        """As many documents, of the same lengths in proportion; each length stays with one at least."""
        factor = documents / self.documents
        return Corpus(tuple((tokens, max(1, round(count * factor))) for tokens, count in self.lengths))


def _length(path: Path, number: int, line: str) -> tuple[int, int]:
    try:
        tokens, count, *more = (int(word) for word in (*line.replace(",", " ").split(), "1"))
    except ValueError:
        tokens, count, more = 0, 0, []
    if tokens < 1 or count < 1 or more not in ([], [1]):
        raise InvalidRequest(
            f"{path}, line {number}: {line!r:.80} is no length in tokens, nor one with a count behind it",
            param="--lengths",
        )
    return tokens, count


@dataclass(frozen=True)
class Work:
    """What is done with each document; fields as in `CreateCache`."""

    policy: str = "keydiff"
    compression_ratio: float | None = None
    budget_tokens: int | None = None
    codec: str = "none"

    def kept(self, num_tokens: int) -> int:
        """Entries that each head keeps of a document. Raises as a creation does."""
        if not build(self.policy, {}).takes_budget:
            return num_tokens
        budget = Budget.resolve(num_tokens, compression_ratio=self.compression_ratio, budget_tokens=self.budget_tokens)
        return budget.tokens


@dataclass(frozen=True)
class Speed:
    """Document tokens that one GPU takes in a second, compression included, and where that number is from."""

    tokens_per_s: float
    basis: str


@dataclass(frozen=True)
class Plan:
    """What a corpus takes. home_bytes: of manifests, index and ledger. What is per second is so while all GPUs work.

    gpus and hours belong together: with so many GPUs it takes so many hours.
    """

    documents: int
    tokens: int
    tokens_per_s: float
    gpus: int
    hours: float
    gpu_hours: float
    documents_per_hour: float
    bytes_full: int
    bytes_stored: int
    home_bytes: float
    redis_memory_bytes: float | None
    network_bytes_per_s: float
    assumptions: tuple[str, ...]

    @property
    def documents_per_s(self) -> float:
        return self.documents_per_hour / 3600


def make_plan(
    corpus: Corpus,
    shape: Shape,
    work: Work,
    speed: Speed,
    rates: SharedRates,
    *,
    home: Home,
    gpus: int | None,
    hours: float | None,
) -> Plan:
    """Reckon. Of `gpus` and `hours` one is given. Raises `InvalidRequest` for a policy, ratio or codec that is none."""
    Codec.parse(work.codec)
    full = sum(count * shape.full_bytes(tokens) for tokens, count in corpus.lengths)
    stored = sum(count * shape.stored_bytes(tokens, work.kept(tokens), work.codec) for tokens, count in corpus.lengths)
    gpu_hours = corpus.tokens / speed.tokens_per_s / 3600
    gpus = gpus if gpus is not None else max(1, math.ceil(gpu_hours / hours)) if hours is not None else 1
    took = gpu_hours / gpus
    index = corpus.documents * (rates.redis_document_bytes if home == "redis" else rates.disk_document_bytes)
    return Plan(
        documents=corpus.documents,
        tokens=corpus.tokens,
        tokens_per_s=speed.tokens_per_s,
        gpus=gpus,
        hours=took,
        gpu_hours=gpu_hours,
        documents_per_hour=corpus.documents / took,
        bytes_full=full,
        bytes_stored=stored,
        home_bytes=index,
        redis_memory_bytes=stored + index if home == "redis" else None,
        network_bytes_per_s=stored / took / 3600 if home == "redis" else 0.0,
        assumptions=_assumptions(corpus, speed, rates, home),
    )


def _assumptions(corpus: Corpus, speed: Speed, rates: SharedRates, home: Home) -> tuple[str, ...]:
    found = [
        speed.basis,
        "A GPU's tokens per second do not depend on the length: longer documents than those measured take longer.",
        f"{rates.redis_document_bytes if home == 'redis' else rates.disk_document_bytes:,.0f} bytes of index, manifest "
        f"and ledger for each document: {rates.basis}",
        "Sizes are those of docs/format.md; every head keeps as many entries.",
        "No document fails, none is a copy of another, and GPUs never wait: `--simulate` tells what stands in the way.",
    ]
    if len(corpus.lengths) == 1:
        found.append("All documents are of one length; `--lengths FILE` takes a histogram.")
    return tuple(found)


def shape_of(model: str) -> Shape:
    """Of a built-in name, a bundled model, a folder or a hub id. Raises `InvalidRequest`."""
    if (known := BUILT_IN.get(model.lower())) is not None:
        return Shape.of(described("llama", **known, dtype="bfloat16"))
    return Shape.of(skeleton(model))


def assumed_speed(shape: Shape) -> Speed:
    """For a GPU that nobody has measured."""
    flops = ASSUMED_FLOPS["cuda"]
    return Speed(
        flops / shape.flops,
        f"ASSUMED: a GPU does {flops:.0e} operations a second, low on purpose, two for each weight and token. Measure "
        "with `kvshelf bench speed --parts compression --output FILE` and give --rates FILE, or give --tokens-per-s.",
    )


def measured_speed(path: Path, policy: str) -> Speed:
    """From the output of `kvshelf bench speed`. Raises `InvalidRequest` for another file, or without the policy."""
    try:
        report = json.loads(path.read_text())
        rows = [row for length in report["compression"] for row in length["rows"]]
        taken = [row for row in rows if row["policy"] == policy]
        tokens = sum(row["tokens"] for row in taken)
        seconds = sum(row["plain_s"]["median"] * row["whole"]["median"] for row in taken)
        where = (
            f"{report['model']} in {report['dtype']} on {report['machine']['gpu'] or report['machine']['processor']}"
        )
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", param="--rates") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            f"{path} is no output of `kvshelf bench speed --parts compression --output FILE`: {error!r}",
            param="--rates",
        ) from error
    if not taken:
        measured = ", ".join(sorted({row["policy"] for row in rows})) or "none"
        raise InvalidRequest(f"{path} has no measurement of {policy!r}; it has {measured}", param="--rates")
    return Speed(tokens / seconds, f"Measured: {policy} on {where}, {path.name}.")
