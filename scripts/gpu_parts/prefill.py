"""A prefill that compresses beside a plain one, of 8k and 32k tokens, and one of 128k in chunks: time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from kvshelf.kernels.rates import Cost, cost
from kvshelf.methods.policies import build
from kvshelf.workers.replica.create.plan import MemoryPlan
from kvshelf.workers.replica.ticket import out_of_memory
from kvshelf_bench.measure import allocated_peak, interleaved
from kvshelf_bench.speed.compression import compress, plain_prefill
from kvshelf_bench.speed.subject import Subject
from scripts.gpu_parts.models import llama_8b
from scripts.gpu_parts.part import OutOfTime, Part

_LOCAL = ("keydiff", "lagkv", "snapkv")
_OTHERS = ("ems", "kvzip")
_REMOVED = 0.75
_WANTED = {8192: 1.02, 32768: 1.01}
_PLANNED = 0.15
"""How far a plan may be from what a prefill holds."""

_CHUNKED, _CHUNKED_POLICY = 131072, "lagkv"


def measure(part: Part) -> None:
    started = time.perf_counter()
    subject = llama_8b(part)
    part.row("model made and identified", time.perf_counter() - started, "s", note="its digest copies all weights")
    lengths = (256, 512) if part.toy else (8192, 32768)
    for tokens in lengths:
        with part.trying(f"local policies, {tokens} tokens"):
            _beside_plain(part, subject, tokens, _LOCAL, 3 if tokens == lengths[0] else 2)
    with part.trying("memory"):
        part.require_s(6)
        _memory(part, subject, lengths[1])
    for tokens in lengths:
        with part.trying(f"the plan of {tokens} tokens"):
            part.require_s(6 if tokens > 8192 else 2)
            _planned(part, subject, tokens)
    for tokens in lengths:
        for policy in _OTHERS:
            with part.trying(f"{policy}, {tokens} tokens"):
                part.require_s(12 if tokens > 8192 else 3)
                _beside_plain(part, subject, tokens, (policy,), 1)
    with part.trying("in chunks"):
        part.require_s(3)
        _in_chunks(part, subject, 1024 if part.toy else _CHUNKED)


def _beside_plain(part: Part, subject: Subject, tokens: int, policies: Sequence[str], rounds: int) -> None:
    """Whole compressions over plain prefills in interleaved rounds, and the hooks by themselves, once more."""
    ids = subject.tokens(tokens, seed=1)
    ways = {"": partial(plain_prefill, subject, ids)} | {
        policy: partial(_whole, part, subject, ids, policy) for policy in policies
    }
    seconds = {name: [spent.seconds for spent in costs] for name, costs in interleaved(ways, rounds).items()}
    plain = median(seconds[""])
    if policies == _LOCAL:
        part.row(f"plain prefill, {tokens} tokens", plain, "s", note=f"{tokens / plain:,.0f} tokens/s")
    for policy in policies:
        whole = median(seconds[policy])
        hook_s = compress(subject, ids, policy, _REMOVED).hook_s
        goal = _WANTED.get(tokens) if policy in _LOCAL else None
        note = f"{whole:.3f} s; hooks {hook_s * 1e3:.1f} ms, {hook_s / plain:.2%} of the plain prefill"
        part.row(f"{policy} over plain, {tokens} tokens", whole / plain, "times", at_most=goal, note=note)


def _whole(part: Part, subject: Subject, ids: list[int], policy: str) -> Cost:
    """Ends with an `OutOfTime` where the part would be killed."""
    engine = subject.engine

    def run() -> object:
        job = engine.prepare(ids, policy=policy, compression_ratio=_REMOVED)
        return engine.run(job, checkpoint=lambda: part.require_s(2))

    return cost(run, subject.device)


def _memory(part: Part, subject: Subject, tokens: int) -> None:
    """The most that a compression holds beside what a prefill without a cache does: what stays, and one layer."""
    model, ids = subject.engine.model, subject.tokens(tokens, seed=1)
    input_ids = torch.tensor([ids], device=model.device)
    with torch.no_grad():
        _, without = part.peak(lambda: model.base_model(input_ids=input_ids, use_cache=False))
    for policy in _LOCAL:
        compressed = partial(subject.engine.compress, ids, policy=policy, compression_ratio=_REMOVED)
        cache, most = part.peak(compressed)
        if without is None or most is None:
            part.row(f"{policy}: memory", None, note="only told on a card")
            continue
        layer = subject.engine.kv_bytes_per_token * tokens // len(cache.layers)
        allowed = without + cache.nbytes + layer
        note = f"{most / 1e9:.2f} GB, allowed {allowed / 1e9:.2f}: prefill without a cache, what stays, and one layer"
        part.row(f"{policy}: most memory over what is allowed, {tokens} tokens", most / allowed, "times", at_most=1.0,
                 note=note)  # fmt: skip


def _planned(part: Part, subject: Subject, tokens: int) -> None:
    """What a replica plans for a document in one pass, beside what that held; and that one with too small a share ends
    with an error that gives all of it back."""
    engine, ids = subject.engine, subject.tokens(tokens, seed=1)
    plan = MemoryPlan.of(engine.model, engine.name, part.device).loaded(engine)
    planned = plan.prefill_bytes(tokens)
    whole = partial(engine.compress, ids, policy="full")
    _, most = allocated_peak(part.device, whole)
    note = f"{planned / 1e6:,.1f} MB planned, {most / 1e6:,.1f} held"
    part.row(f"the plan from what was held, {tokens} tokens", abs(planned / most - 1), at_most=_PLANNED, note=note)
    if part.device.type != "cuda":
        return
    before = torch.cuda.memory_allocated(part.device)
    torch.cuda.empty_cache()
    replace(plan, there=before + planned // 2).keep()
    try:
        error = out_of_memory(_raised(whole))
    finally:
        plan.keep()
    left = torch.cuda.memory_allocated(part.device) - before
    part.row("bytes that a prefill beyond its share keeps", None if error is None else left, at_most=0)


def _raised(run: Callable[[], object]) -> BaseException:
    """The error that a call ends with."""
    try:
        run()
    except Exception as error:  # whatever it is, for the caller to judge
        return error
    return RuntimeError("it ended without an error")


def _in_chunks(part: Part, subject: Subject, tokens: int) -> None:
    """A document that is read chunk by chunk. It ends where the part does, and tells how far it came."""
    engine = subject.engine
    params = {"prefill": "chunked"}
    job = engine.prepare(
        subject.tokens(tokens, seed=1), policy=_CHUNKED_POLICY, compression_ratio=0.875, policy_params=params
    )
    assert job.absorber is not None, build(_CHUNKED_POLICY, params)
    total, done = len(job.absorber.chunks) * len(engine.kinds), 0

    def checkpoint() -> None:
        nonlocal done
        done += 1
        part.require_s(2)

    started = time.perf_counter()
    name = f"{_CHUNKED_POLICY} in {len(job.absorber.chunks)} chunks, {tokens} tokens"
    try:
        compression, most = part.peak(lambda: engine.run(job, checkpoint=checkpoint))
    except OutOfTime:
        spent = time.perf_counter() - started
        note = f"ended with the part after {spent:.1f} s at {done} of {total} layers of chunks"
        part.row(name, None, note=f"{note}: at least {spent * total / done:.0f} s in all")
        return
    spent = time.perf_counter() - started
    part.row(name, spent, "s", note=f"{tokens / spent:,.0f} tokens/s")
    if most is not None:
        weights = sum(parameter.nbytes for parameter in engine.model.parameters())
        buffered = max(job.absorber.chunks) * engine.kv_bytes_per_token
        nbytes = weights + compression.cache.nbytes + buffered
        note = f"{most / 1e9:.2f} GB; weights, what stays and a chunk of every layer are {nbytes / 1e9:.2f}"
        part.row(
            "in chunks: most memory over weights, kept and a chunk", most / nbytes, "times", at_most=1.1, note=note
        )
