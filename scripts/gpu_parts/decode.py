"""Decode steps of many answers on one document, and on documents of their own; where their time goes."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.decode.batch import DecodeBatch
from kvshelf.engine.decode.slots.slots import GraphRecorder, Slots
from kvshelf.kernels.prefix_attention import BatchLayout, LogitRules, PackedPrefix, SuffixRows, prefix_attention
from kvshelf.kernels.rates import copy_bandwidth
from kvshelf_bench.kernels.baselines import attention_of_full_cache
from kvshelf_bench.speed.decode import step_bytes
from kvshelf_bench.speed.selecting import stepping
from kvshelf_bench.speed.subject import Subject
from scripts.gpu_parts.models import llama_8b
from scripts.gpu_parts.part import Part, mapped

_TOKENS, _SHORT = 32768, 2048
_ANSWERS = (1, 8, 32)
_COPIES = 8
_STEPS = 16


def measure(part: Part) -> None:
    subject = llama_8b(part)
    rate = copy_bandwidth(part.device)
    tokens, short = (256, 64) if part.toy else (_TOKENS, _SHORT)
    answers = (1, 2) if part.toy else _ANSWERS
    copies, most = (2, 2) if part.toy else (_COPIES, _ANSWERS[-1])
    whole = subject.engine.compress(subject.tokens(tokens, seed=10), policy="full")
    shared: dict[int, float] = {}
    for count in answers:
        with part.trying(f"{count} answers on one document"):
            shared[count] = _report(
                part, subject, [whole] * count, 1, rate, f"{count} answers on one document of {tokens}"
            )
        with part.trying(f"{count} answers without a graph"):
            _recorded(part, subject, [whole] * count, f"{count} answers on one document of {tokens}")
    with part.trying("modules"):
        _by_modules(part, subject, whole)
    with part.trying("profile"):
        _profiled(part, subject, [whole] * answers[-1])
    attention: dict[int, tuple[float, float]] = {}
    for count in answers:
        with part.trying(f"attention of {count} answers"):
            part.require_s(4)
            attention[count] = _attention(part, subject, tokens, count)
    count = answers[-1]
    if count in shared and count in attention:
        ours, naive = (seconds * len(whole.layers) for seconds in attention[count])
        apart = shared[count] - ours + naive
        note = f"a step of {apart * 1e3:.1f} ms: ours, with the attention over a copy for each answer in place of ours"
        part.row(f"{count} answers on one document: the naive way over ours", apart / shared[count], "times",
                 at_least=5, note=note)  # fmt: skip
    with part.trying("a copy of the document for each answer"):
        part.require_s(8)
        copies_of_whole = [_copied(whole) for _ in range(copies)]
        seconds = _report(
            part, subject, copies_of_whole, copies, rate, f"{copies} answers, a copy of the document each"
        )
        if copies in shared:
            part.row(f"{copies} answers: a copy each over one document", seconds / shared[copies], "times")
        del copies_of_whole
    with part.trying("short documents"):
        part.require_s(8)
        caches = [subject.engine.compress(subject.tokens(short, seed=20 + i), policy="full") for i in range(most)]
        _report(part, subject, caches, most, rate, f"{most} answers on {most} documents of {short}")
        _profiled(part, subject, caches)


def _report(
    part: Part, subject: Subject, caches: list[CompressedCache], documents: int, rate: float, name: str
) -> float:
    """The seconds of a step, and a row for its share of the limit: every byte that it must read, once."""
    part.require_s(4)
    with stepping(subject, caches) as step:
        spread = part.seconds(lambda: [step() for _ in range(4)], rounds=_STEPS // 4)
    seconds = spread.median / 4
    needed = step_bytes(subject, caches[:documents], len(caches))
    note = f"{seconds * 1e3:.2f} ms a step, {len(caches) / seconds:,.0f} tokens/s, reads {needed / 1e9:.2f} GB at least"
    part.row(f"{name}: share of the byte limit", needed / seconds / rate, "of the limit", at_least=0.6, note=note)
    return seconds


def _recorded(part: Part, subject: Subject, caches: list[CompressedCache], name: str) -> None:
    """A step that is made anew, one in slots and, on a card, the recorded one."""
    part.require_s(8)
    passes, device = subject.engine.passes, part.device
    ways = {"anew": None, "in slots": Slots(device)}
    if device.type == "cuda":
        ways["recorded"] = Slots(device, GraphRecorder(device))
    seconds: dict[str, float] = {}
    for way, slots in ways.items():
        with stepping(subject, caches, batch=DecodeBatch(passes, slots)) as step:
            seconds[way] = part.seconds(lambda: [step() for _ in range(4)], rounds=_STEPS // 4).median / 4
    note = ", ".join(f"{way} {step_s * 1e3:.2f} ms" for way, step_s in seconds.items())
    last = list(seconds)[-1]
    part.row(f"{name}: a step made anew over one {last}", seconds["anew"] / seconds[last], "times", note=note)


def _by_modules(part: Part, subject: Subject, cache: CompressedCache) -> None:
    """What the program of the model's layers saves of a step of one answer: time and launches."""
    part.require_s(8)
    passes = subject.engine.passes
    program, seconds, kernels = passes.program, [], []
    try:
        for passes.program in (program, None):
            with stepping(subject, [cache], batch=DecodeBatch(passes)) as step:
                seconds.append(part.seconds(step, rounds=5).median)
                kernels.append(part.profiled(step, steps=4).kernels)
    finally:
        passes.program = program
    layers = len(cache.layers)
    note = f"{seconds[0] * 1e3:.2f} ms by the program, {seconds[1] * 1e3:.2f} by the model's modules"
    part.row("1 answer: a step by modules over one by the program", seconds[1] / seconds[0], "times", note=note)
    note = f"{kernels[0]:.0f} kernels a step, with those beside the layers; {kernels[1]:.0f} by the model's modules"
    part.row("1 answer: launches of a step by the program", kernels[0] / layers, "a layer", note=note)


def _attention(part: Part, subject: Subject, tokens: int, rows: int) -> tuple[float, float]:
    """Seconds of a layer's attention of so many answers on one document: ours, which reads it once, and torch's over a
    static cache that has a copy of it for each answer."""
    config = subject.engine.model.config
    heads, q_heads, dim = config.num_key_value_heads, config.num_attention_heads, config.head_dim
    random = lambda *size: torch.randn(*size, device=part.device, dtype=part.dtype)  # noqa: E731
    # Two layers' documents in turn: one alone would partly stay in the card's cache.
    documents = [
        PackedPrefix(random(heads * tokens, dim), random(heads * tokens, dim), (tokens,) * heads) for _ in range(2)
    ]
    layout = BatchLayout((rows,), (SuffixRows((64,) * rows, tuple(range(rows))),), part.device)
    suffixes = [(random(rows, heads, 64, dim), random(rows, heads, 64, dim))]
    queries, rules = random(rows, q_heads, dim), LogitRules(dim**-0.5)

    def ours() -> None:
        for document in documents:
            prefix_attention(queries, [[document]], suffixes, layout, rules)

    own_s = part.seconds(ours, rounds=5, warm_up=3).median / 2
    keys, values = (random(rows, heads, tokens + 64, dim) for _ in range(2))
    steps = queries.unsqueeze(2)
    naive_s = part.seconds(lambda: _static(steps, keys, values), rounds=5, warm_up=2).median
    note = f"ours {own_s * 1e3:.3f} ms, torch's {naive_s * 1e3:.3f} ms a layer"
    part.row(f"attention of {rows} answers on one document: torch's static caches over ours", naive_s / own_s, "times",
             note=note)  # fmt: skip
    return own_s, naive_s


def _static(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if len(queries) == 1:
        return attention_of_full_cache(queries[0], keys[0], values[0])
    return torch.nn.functional.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)


def _copied(cache: CompressedCache) -> CompressedCache:
    return replace(cache, layers=mapped(cache.layers, torch.clone))


def _profiled(part: Part, subject: Subject, caches: list[CompressedCache]) -> None:
    """Where the time of a step goes: kernels, launches, and how long the card waits."""
    part.require_s(6)
    documents = len({id(cache) for cache in caches})
    name = f"{len(caches)} answers on {documents} documents"
    with stepping(subject, caches) as step:
        seconds = part.seconds(step, rounds=5).median
        kernels = part.profiled(step, steps=4)
    part.text("profile.txt", f"==== a decode step of {name}, {seconds * 1e3:.2f} ms\n{kernels.table}")
    if kernels.device_s is None:
        return
    note = f"{kernels.kernels:.0f} kernels, {kernels.device_s * 1e3:.2f} of {seconds * 1e3:.2f} ms; profile.txt"
    part.row(f"{name}: the card works", kernels.device_s / seconds, "of a step", note=note)
