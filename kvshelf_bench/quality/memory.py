"""Peak memory of compressing one long document under each policy, against a prefill that keeps everything."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from kvshelf.engine.engine import Engine
from kvshelf.errors import InvalidRequest, KvshelfError
from kvshelf.methods.policies import build
from kvshelf.samples.suite import make_case
from kvshelf_bench.engines import EngineOptions
from kvshelf_bench.measure import with_peak
from kvshelf_bench.quality.grid import BASELINE, Variant
from kvshelf_bench.quality.retrieval import EVALUATION_SEED, counter

_WARM_UP_TOKENS = 512


@dataclass(frozen=True)
class Peak:
    """One compression in a process of its own.

    phase: when the policy acts, on which the peak depends: "during" the prefill, in "cascade" or "after" it.
    peak_bytes: the most that was allocated (GPU) or resident (CPU) beyond the loaded, warm model. cache_bytes: the size
    of the compressed cache. refused: why there is no result.
    """

    policy: str
    phase: str
    removed: float
    tokens: int = 0
    peak_bytes: int = 0
    cache_bytes: int = 0
    prefill_s: float = 0.0
    compress_s: float = 0.0
    refused: str | None = None


def peaks(options: EngineOptions, tokens: int, policies: Sequence[str], removed: float) -> Iterator[Peak]:
    """The baseline, then every policy, each in a fresh process, as the allocator keeps the memory of earlier ones.

    `tokens` counts the chat template too. Raises `InvalidRequest` for an unknown policy, before any work.
    """
    if not 0 <= removed < 1:
        raise InvalidRequest(f"--removed is {removed}; it must be a fraction from 0 to below 1", param="removed")
    for variant in dict.fromkeys(map(Variant.parse, (BASELINE, *policies))):
        share = removed if variant.takes_budget else 0.0
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
            try:
                yield alone.submit(_peak, options, tokens, variant, share).result()
            except BrokenProcessPool:
                killed = "the process was killed: there was not enough memory"
                yield Peak(variant.label, _phase(variant), share, tokens, refused=killed)


def _peak(options: EngineOptions, tokens: int, variant: Variant, removed: float) -> Peak:
    engine, phase = options.load(), _phase(variant)
    try:
        _compress(engine, min(tokens, _WARM_UP_TOKENS), variant, removed)
        compression, peak_bytes = with_peak(engine.model.device, lambda: _compress(engine, tokens, variant, removed))
    except KvshelfError as error:
        return Peak(variant.label, phase, removed, tokens, refused=error.message)
    cache = compression.cache
    seconds = compression.prefill_s, compression.compress_s
    return Peak(variant.label, phase, removed, cache.num_tokens, peak_bytes, cache.nbytes, *seconds)


def _phase(variant: Variant) -> str:
    return build(variant.policy, dict(variant.params)).phase


def _compress(engine: Engine, tokens: int, variant: Variant, removed: float) -> Any:
    template = engine.prepare("x", policy=BASELINE).num_tokens - 1
    text = make_case("multikey", "prose", tokens - template, EVALUATION_SEED, counter(engine)).text
    ratio = removed if variant.takes_budget else None
    job = engine.prepare(text, policy=variant.policy, compression_ratio=ratio, policy_params=dict(variant.params))
    return engine.run(job)
