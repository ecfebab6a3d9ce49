"""Estimates: the bytes and seconds of a creation, without running the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from kvshelf.api import Estimate, EstimateObject, PolicyEstimate, Timings
from kvshelf.artifact.codecs import Codec
from kvshelf.engine.engine import Engine
from kvshelf.engine.inputs.job import Job
from kvshelf.errors import CallerError
from kvshelf.methods.catalog import compress_share, cost_name
from kvshelf.methods.policies import POLICIES, build
from kvshelf.model.text import EncodedDocument
from kvshelf.workers.replica.create.auto import candidates
from kvshelf.workers.replica.create.sizes import ASSUMED_FLOPS, Dimensions
from kvshelf.workers.replica.create.spec import AUTO

Basis = Literal["measured", "other_policies", "assumed"]
"""The source of seconds: compressions of this policy, of other policies, or the assumption below."""

CODECS: Final = ("none", "lossless", "int8", "int4", "int2", "mixed", "klt")
"""Estimated where a request names none; klt only where the model has transforms."""


class Rates:
    """Measured seconds of compression per document token, by policy, since this process began.

    One thread adds, and others read meanwhile: what they read is replaced as a whole.
    """

    def __init__(self) -> None:
        self._measured: Mapping[str, tuple[int, float]] = {}
        """Tokens and seconds by `cost_name`."""

    def add(self, policy: str, params: Mapping[str, Any], tokens: int, timings: Timings) -> None:
        cost = cost_name(policy, params)
        before, seconds = self._measured.get(cost, (0, 0.0))
        now = before + tokens, seconds + timings.prefill_s + timings.compress_s
        self._measured = {**self._measured, cost: now}

    def seconds(self, cost: str, tokens: int, shape: Dimensions) -> tuple[float, Basis] | None:
        """Seconds for a document, from the best source; None if nothing tells what the policy takes.

        cost: `cost_name` of the policy. If it has not run here, the time of a prefill that keeps everything is taken
        from the policies that have, or assumed, and what the policy adds to it from the quality bench. Proportional to
        the tokens, so it is too low for a document much longer than those measured: attention grows with the square.
        """
        measured = self._measured
        if cost in measured:
            of_tokens, seconds = measured[cost]
            return tokens * seconds / of_tokens, "measured"
        share = compress_share(cost)
        if share is None:
            return None
        shares = {name: of for name in measured if (of := compress_share(name)) is not None}
        if shares:
            plain = sum(measured[name][1] / (1 + of) for name, of in shares.items())
            return tokens * plain / sum(measured[name][0] for name in shares) * (1 + share), "other_policies"
        flops_per_s = ASSUMED_FLOPS.get(shape.device, ASSUMED_FLOPS["cpu"])
        return tokens * shape.flops / flops_per_s * (1 + share), "assumed"

    @property
    def measured_tokens(self) -> int:
        return sum(tokens for tokens, _ in self._measured.values())


def estimate(engine: Engine, rates: Rates, document: EncodedDocument, spec: Estimate) -> EstimateObject:
    """What compressing `document` would take, without running the model. Thread-safe.

    Levels that share a prefill each report the whole of it. Raises as `Engine.prepare` does; where several policies are
    estimated, a refusal becomes a row instead.
    """
    shape = Dimensions.of(engine.model)
    if engine.coders.has_own:
        shape = replace(shape, coded=engine.coders.own.transforms.bits)
    any_codec = spec.codec is None and all(codec is None for _, codec in spec.ways)
    rows = []
    for way in _ways(engine, spec, _codecs(engine, spec)):
        try:
            job = engine.prepare(document, policy=way.policy, compression_ratio=way.compression_ratio, **way.more)
            if any_codec:
                codecs = _usable(engine, job, way.codecs)
            else:  # refuses what a creation would refuse
                codecs = tuple(engine.compressor.level(job, codec).codec for codec in way.codecs)
        except CallerError as error:
            if way.policy == spec.policy:
                raise
            rows.append(
                PolicyEstimate(policy=way.policy, compression_ratio=way.compression_ratio, refused=error.message)
            )
        else:
            rows.append(_row(job, shape, rates, codecs))
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
    return CODECS if engine.coders.writes_klt else CODECS[:-1]


def _usable(engine: Engine, job: Job, codecs: Iterable[str]) -> tuple[str, ...]:
    usable = []
    for codec in codecs:
        with suppress(CallerError):
            usable.append(engine.compressor.level(job, codec).codec)
    return tuple(usable)


def _ways(engine: Engine, spec: Estimate, codecs: tuple[str, ...]) -> list[_Way]:
    """The candidates of "auto", or the levels of one policy or of all policies."""
    if spec.policy == AUTO:
        tried = candidates(engine.coders.writes_klt)
        ways = dict.fromkeys((policy, ratio) for policy, ratio, _ in tried)
        return [_Way(*way, tuple(codec for *other, codec in tried if tuple(other) == way)) for way in ways]
    by_ratio: dict[float | None, tuple[str, ...]] = {}
    for ratio, codec in spec.ways:
        by_ratio[ratio] = (*by_ratio.get(ratio, ()), *(codecs if codec is None else (str(Codec.parse(codec)),)))
    budget = {"budget_tokens": spec.budget_tokens}
    if spec.policy is not None:
        more = budget | {"policy_params": spec.policy_params, "expected_questions": spec.expected_questions}
        return [_Way(spec.policy, ratio, of_ratio, more) for ratio, of_ratio in by_ratio.items()]
    rows = []
    for policy in POLICIES:
        # A policy without a budget refuses one if asked for alone; among all policies it is estimated without.
        if build(policy, {}).takes_budget:
            rows += [_Way(policy, ratio, of_ratio, budget) for ratio, of_ratio in by_ratio.items()]
        else:
            rows.append(_Way(policy, None, codecs))
    return rows


def _row(job: Job, shape: Dimensions, rates: Rates, codecs: Iterable[str]) -> PolicyEstimate:
    kept, params = job.budget.tokens, job.policy.parameters()
    cost = cost_name(job.policy.name, params)
    seconds, basis = rates.seconds(cost, job.num_tokens, shape) or (None, None)
    return PolicyEstimate(
        policy=job.policy.name,
        kept=kept,
        compression_ratio=job.budget.compression_ratio,
        bytes_stored={
            codec: shape.policy_bytes(job.num_tokens, kept, codec, job.policy.stored_beside) for codec in codecs
        },
        compress_share=compress_share(cost),
        seconds=seconds,
        basis=basis,
    )
