"""`kvshelf bench kernels` on the card: what it copies and multiplies, and how near each operation comes to that."""

from __future__ import annotations

from kvshelf_bench.kernels.cases import LLAMA_8B, PREFILL, Case, Layer, LayerSize, cases
from kvshelf_bench.kernels.kernels import Ceilings, case_time, ceilings
from scripts.gpu_parts.part import Part

_LENGTHS, _ROUNDS = (8192, 32768), 10
_SMALL = LayerSize(q_heads=4, kv_heads=2, head_dim=32, hidden=128, intermediate=256)

_WANTED = 0.6
_WITH_GOAL = ("pack", "window_scores", "prefix_attention")


def measure(part: Part) -> None:
    """The two ceilings, then a row for each operation and length."""
    limits = ceilings(part.device, part.dtype)
    part.row("copy, read and written bytes", limits.copy_bytes_per_s / 1e9, "GB/s")
    part.row("matrix product", limits.matmul_flops / 1e12, "TFLOP/s")
    for tokens in (512,) if part.toy else _LENGTHS:
        medians: dict[str, float] = {}
        for case in cases(Layer(_SMALL if part.toy else LLAMA_8B, tokens, part.dtype, part.device)):
            if tokens > _LENGTHS[0] and case.beside == "column_sums":
                continue  # seconds of all its weights, in memory; the shorter length tells
            with part.trying(f"{case.name}, {tokens} tokens"):
                part.require_s(1.5)
                medians[case.name] = _measured(part, case, tokens, limits, medians)


def _measured(part: Part, case: Case, tokens: int, limits: Ceilings, medians: dict[str, float]) -> float:
    seconds = case_time(case, part.device, 2 if part.toy else _ROUNDS)[0].median
    limit, least_s = limits.limit(case)
    rates = f"{case.nbytes / seconds / 1e9:,.0f} GB/s, {case.flops / seconds / 1e12:,.1f} TFLOP/s, limit {limit}"
    of = f", {seconds / medians[PREFILL]:.2%} of the layer's prefill" if PREFILL in medians else ""
    beside = f", {seconds / medians[case.beside]:.2f} times {case.beside}" if case.beside in medians else ""
    goal = _WANTED if case.name.startswith(_WITH_GOAL) else None
    busy = ""
    if goal is not None and least_s / seconds < goal:  # whether the kernels are slow, or what launches them
        arguments = case.make()
        alone = part.device_ms(lambda: case.run(*arguments))
        busy = "" if alone is None else f", its kernels alone {alone:,.3f} ms"
    note = f"{seconds * 1e3:,.3f} ms{busy}, {rates}{of}{beside}"
    part.row(f"{case.name}, {tokens} tokens", least_s / seconds, "of the limit", at_least=goal, note=note)
    return seconds
