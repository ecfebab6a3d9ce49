"""Estimates: the bytes and seconds of a creation, without running the model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from kvshelf.api import Estimate, EstimateObject, PolicyEstimate, Timings
from kvshelf.errors import CallerError
from kvshelf.store.artifact.codecs import BITS, Codec, Precision
from kvshelf.store.artifact.coded import RUN_ROWS
from kvshelf.workers.engine.engine import Engine
from kvshelf.workers.engine.inputs.job import Job
from kvshelf.workers.model.loading import head_size, kv_heads
from kvshelf.workers.model.text import EncodedDocument
from kvshelf.workers.policies import POLICIES, build
from kvshelf.workers.replica.create.auto import candidates
from kvshelf.workers.replica.create.spec import AUTO

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Basis = Literal["measured", "other_policies", "assumed"]
"""The source of seconds: compressions of this policy, of other policies, or the assumption below."""

ASSUMED_FLOPS: Final[Mapping[str, float]] = {"cpu": 5e10, "cuda": 1e14}
"""Floating-point operations per second of a device that has compressed nothing yet. Low on purpose."""

CODECS: Final = ("none", "int8", "int4", "int2", "mixed", "klt")
"""Estimated where a request names none; klt only where the model has transforms."""

_FIRST_ROWS, _RUN_BYTES, _BYTES_PER_FLAG = 4, 16, 1 / 8  # of codec klt, which docs/format.md describes

_LAYER_BYTES, _PIECE_BYTES = 250, 175  # of header, padding and trailer, which docs/format.md describes


@dataclass(frozen=True)
class Shape:
    """The dimensions behind a cache's size. `itemsize`: bytes of a number. `flops`: of one token's prefill."""

    layers: int
    kv_heads: int
    head_dim: int
    itemsize: int
    device: str
    flops: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> Shape:
        config = model.config
        # Two operations for each weight, as is usual. Attention is left out: it counts in long documents only.
        flops = 2.0 * model.num_parameters(exclude_embeddings=True)
        return cls(
            config.num_hidden_layers,
            kv_heads(config),
            head_size(config),
            model.dtype.itemsize,
            model.device.type,
            flops,
        )

    def full_bytes(self, num_tokens: int) -> int:
        """Keys and values of all tokens, uncompressed."""
        return self.layers * self.kv_heads * num_tokens * 2 * self.head_dim * self.itemsize

    def full_16bit_bytes(self, num_tokens: int) -> int:
        """The same in 16-bit numbers."""
        return replace(self, itemsize=2).full_bytes(num_tokens)

    def stored_bytes(self, num_tokens: int, kept: int, codec: str) -> int:
        """Approximate bytes of the blob of a cache with `kept` entries in each head; `docs/format.md` has the sum."""
        chosen = Codec.parse(codec)
        if chosen.name == "klt":
            return self._streams(num_tokens, kept, chosen)
        pieces = _pieces(chosen, kept)
        head = sum(self._rows(count, precision, chosen.group) for precision, count in pieces)
        head += sum(_positions(count, num_tokens) for _, count in pieces)
        return self.layers * (self.kv_heads * head + _LAYER_BYTES + _PIECE_BYTES * len(pieces))

    def _streams(self, num_tokens: int, kept: int, codec: Codec) -> int:
        """Bytes under codec klt, which depend on the text: about a fifth more or less, and a third where it repeats
        itself. Up to a third more under `steps=kl` where a policy keeps most in the layers with fine steps. Bits per
        number fitted to kvshelf-tiny at steps of 0.25 to 8; its heads alone take a third more."""
        alone = codec.heads == "each" or kept < num_tokens
        numbers = 2 * self.layers * self.kv_heads * self.head_dim  # of a token
        total = float(numbers * 2 * min(kept, _FIRST_ROWS))
        for step, count in _classes(codec, num_tokens, kept):
            bits = 0.42 * math.log2(1 + (2.6 / step) ** 1.6) * (1.37 if alone else 1.0)
            runs = math.ceil(count / RUN_ROWS)
            total += runs * 2 * self.layers * (self.kv_heads if alone else 1) * _RUN_BYTES
            total += numbers * (runs * _BYTES_PER_FLAG + max(0, count - _FIRST_ROWS) * bits / 8)
            total += self.layers * (self.kv_heads * _positions(count, num_tokens) + _LAYER_BYTES)
        return round(total)

    def _rows(self, count: int, precision: Precision, group: int) -> int:
        """Keys and values of `count` entries of one head, scales and zeros included."""
        if precision == "none":
            return count * 2 * self.head_dim * self.itemsize
        codes = 2 * count * math.ceil(self.head_dim * BITS[precision] / 8)
        # A scale and a zero in bfloat16: by channel for each group of entries, by entry for each group of channels.
        return codes + 4 * (math.ceil(count / group) * self.head_dim + count * math.ceil(self.head_dim / group))


def _pieces(codec: Codec, kept: int) -> list[tuple[Precision, int]]:
    """How many entries of a head are stored in which precision."""
    if codec.name == "none":
        return [("none", kept)]
    if codec.name == "mixed":
        high = int(kept * codec.share + 1e-9)
        split: list[tuple[Precision, int]] = [(codec.high, high), (codec.low, kept - high)]
    else:
        last = min(kept, codec.residual)
        split = [(codec.name, kept - last), ("none", last)]
    return [(precision, count) for precision, count in split if count]


def _classes(codec: Codec, num_tokens: int, kept: int) -> list[tuple[float, int]]:
    """The steps of codec klt, and how many entries of a head have each."""
    if not codec.classes:
        return [(codec.step, kept)]
    finer = [min(kept, int(num_tokens * share / 100)) for share in codec.shares[:-1]]
    return list(zip(codec.classes, (*finer, max(0, kept - sum(finer))), strict=True))


def _positions(count: int, num_tokens: int) -> int:
    """Bytes of the positions of one head: none, a bitmap, or deltas of one byte each, two if gaps are wide."""
    if count == num_tokens:
        return 0
    return min(math.ceil(num_tokens / 8), count * (1 if num_tokens < 128 * count else 2))


class Rates:
    """Measured seconds of compression per document token, by policy, since this process began."""

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}

    def add(self, policy: str, tokens: int, timings: Timings) -> None:
        """Record a compression."""
        self._tokens[policy] += tokens
        self._seconds[policy] = self._seconds.get(policy, 0.0) + timings.prefill_s + timings.compress_s

    def seconds(self, policy: str, tokens: int, shape: Shape) -> tuple[float, Basis]:
        """Seconds for a document, from the best source. Proportional to its tokens, so it is too low for a document
        much longer than those measured: attention grows with the square."""
        if self._tokens[policy]:
            return tokens * self._seconds[policy] / self._tokens[policy], "measured"
        if measured := self._tokens.total():
            return tokens * sum(self._seconds.values()) / measured, "other_policies"
        return tokens * shape.flops / ASSUMED_FLOPS.get(shape.device, ASSUMED_FLOPS["cpu"]), "assumed"

    @property
    def measured_tokens(self) -> int:
        """Tokens of all measured documents."""
        return self._tokens.total()


def estimate(engine: Engine, rates: Rates, document: EncodedDocument, spec: Estimate) -> EstimateObject:
    """What compressing `document` would take, without running the model. Thread-safe.

    Levels that share a prefill each report the whole of it. Raises as `Engine.prepare` does; where several policies are
    estimated, a refusal becomes a row instead.
    """
    shape = Shape.of(engine.model)
    rows = []
    for way in _ways(engine, spec, _codecs(engine, spec)):
        try:
            job = engine.prepare(document, policy=way.policy, compression_ratio=way.compression_ratio, **way.more)
            for codec in way.codecs:
                engine.level(job, codec)  # refuses what a creation would refuse
        except CallerError as error:
            if way.policy == spec.policy:
                raise
            rows.append(
                PolicyEstimate(policy=way.policy, compression_ratio=way.compression_ratio, refused=error.message)
            )
        else:
            rows.append(_row(job, shape, rates, way.codecs))
    num_tokens = len(document.token_ids)
    return EstimateObject(
        model=engine.name,
        layout=document.layout,
        tokens=num_tokens,
        bytes_full=shape.full_bytes(num_tokens),
        bytes_full_16bit=shape.full_16bit_bytes(num_tokens),
        measured_tokens=rates.measured_tokens,
        policies=rows,
    )


@dataclass(frozen=True)
class _Way:
    """The inputs of one row. `more`: further arguments of `Engine.prepare`."""

    policy: str
    compression_ratio: float | None
    codecs: tuple[str, ...]
    more: Mapping[str, Any] = field(default_factory=dict)


def _codecs(engine: Engine, spec: Estimate) -> tuple[str, ...]:
    if spec.codec is not None:
        return (str(Codec.parse(spec.codec)),)
    return CODECS if engine.has_transforms else CODECS[:-1]


def _ways(engine: Engine, spec: Estimate, codecs: tuple[str, ...]) -> list[_Way]:
    """The candidates of "auto", or the levels of one policy or of all policies."""
    if spec.policy == AUTO:
        tried = candidates(engine.has_transforms)
        ways = dict.fromkeys((policy, ratio) for policy, ratio, _ in tried)
        return [_Way(*way, tuple(codec for *other, codec in tried if tuple(other) == way)) for way in ways]
    each: dict[float | None, tuple[str, ...]] = {}
    for ratio, codec in spec.ways:
        each[ratio] = (*each.get(ratio, ()), *(codecs if codec is None else (str(Codec.parse(codec)),)))
    budget = {"budget_tokens": spec.budget_tokens}
    if spec.policy is not None:
        more = budget | {"policy_params": spec.policy_params, "expected_questions": spec.expected_questions}
        return [_Way(spec.policy, ratio, chosen, more) for ratio, chosen in each.items()]
    found = []
    for policy in POLICIES:
        # A policy without a budget refuses one if asked for alone; among all policies it is estimated without.
        taken = build(policy, {}).takes_budget
        rows = each if taken else {None: codecs}
        found += [_Way(policy, ratio, chosen, budget if taken else {}) for ratio, chosen in rows.items()]
    return found


def _row(job: Job, shape: Shape, rates: Rates, codecs: Iterable[str]) -> PolicyEstimate:
    kept = job.budget.tokens
    seconds, basis = rates.seconds(job.policy.name, job.num_tokens, shape)
    return PolicyEstimate(
        policy=job.policy.name,
        kept=kept,
        compression_ratio=job.budget.compression_ratio,
        bytes_stored={codec: shape.stored_bytes(job.num_tokens, kept, codec) for codec in codecs},
        seconds=seconds,
        basis=basis,
    )
