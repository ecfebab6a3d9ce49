"""Every kernel against the naive form in fp64 on the CPU: the tests' oracles, at the head sizes of Llama-3.1-8B.

Operations and dtypes are checked side by side: most of the time goes to compiling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from kvshelf.engine.forward.calls import trace
from kvshelf.engine.forward.lowering import lower
from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels import ans
from kvshelf.kernels.choose import Choice, Chosen, Units, choose
from kvshelf.kernels.column_sums import column_sums
from kvshelf.kernels.lag_scores import lag_scores
from kvshelf.kernels.mean_cosines import mean_cosines
from kvshelf.kernels.merge import merge_weighted, nearest_pair
from kvshelf.kernels.prefix_attention import (
    BatchLayout,
    LogitRules,
    MergedPrefix,
    PackedPrefix,
    Prefix,
    SelectedPrefix,
    StackedPrefix,
    StreamedPrefix,
    SuffixRows,
    attention_by_document,
    causal_attention,
    prefix_attention,
)
from kvshelf.kernels.quantize import Coded, dequantize, quantize
from kvshelf.kernels.quantize.rows import QuantizedRows
from kvshelf.kernels.rotate import rotate
from kvshelf.kernels.row_norms import row_norms
from kvshelf.kernels.rowwise import row_programs
from kvshelf.kernels.rowwise.instructions import Buffer, Instruction
from kvshelf.kernels.select import keep_best, pack, select
from kvshelf.kernels.window_scores import pass_scores, window_scores
from scripts.gpu_parts.part import Part, mapped
from tests.kernels.references import choose as choose_reference
from tests.kernels.references import column_sums as column_sums_reference
from tests.kernels.references import lag_scores as lag_reference
from tests.kernels.references import mean_cosines as cosines_reference
from tests.kernels.references import merge as merge_reference
from tests.kernels.references import prefix_attention as attention_reference
from tests.kernels.references import quantize as quantize_reference
from tests.kernels.references import rotate as rotate_reference
from tests.kernels.references import row_norms as norms_reference
from tests.kernels.references import rowwise as rowwise_reference
from tests.kernels.references import select as select_reference
from tests.kernels.references import window_scores as window_reference
from tests.kernels.streams import DEVIATIONS, TABLES, drawn

_CPU = torch.device("cpu")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_EXACT = 1e-5
"""Largest error of sums in fp32 of given numbers, of the largest result: units of the card's `ex2` included."""
_ROUNDED = {torch.float32: _EXACT, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of results that are rounded to the dtype of the states, and of weights that are before they meet the values."""


@dataclass
class Check:
    """The comparisons of one operation in one dtype. sizes: q_heads, kv_heads and head size of this run."""

    device: torch.device
    dtype: torch.dtype
    q_heads: int
    kv_heads: int
    dim: int
    count: int = 0
    worst: float = 0.0
    """The largest error in units of what is allowed."""
    wrong: list[str] = field(default_factory=list)

    @property
    def full(self) -> bool:
        """Whether this is no toy."""
        return self.dim == 128

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    def random(self, *shape: int, seed: int = 0, dtype: torch.dtype | None = None) -> Tensor:
        """On the CPU, the same on every machine."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype or self.dtype)

    def states(self, heads: int, tokens: int, seed: int = 0) -> Tensor:
        """`[heads, tokens, D]`, token-major in memory as models have them."""
        return self.random(tokens, heads, self.dim, seed=seed).transpose(0, 1)

    def here(self, *arguments: Any) -> Any:
        """The same on the device, with the same strides."""
        moved = tuple(_moved(argument, self.device) for argument in arguments)
        return moved if len(moved) > 1 else moved[0]

    def near(self, what: str, result: Tensor, expected: Tensor, allowed: float = _EXACT) -> None:
        """Compare with an fp64 reference; errors are relative to its largest number."""
        result, expected = result.detach().cpu().double(), expected.detach().cpu().double()
        self.count += 1
        if result.shape != expected.shape or bool(result.isnan().any()):
            self.wrong.append(f"{what}: shape {list(result.shape)} for {list(expected.shape)}, or not numbers")
            return
        if not expected.numel():
            return
        error = float((result - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
        self.worst = max(self.worst, error / allowed)
        if error > allowed:
            self.wrong.append(f"{what}: {error:.1e}, allowed {allowed:.0e}")

    def equal(self, what: str, result: Tensor, expected: Tensor) -> None:
        """Compare bit by bit."""
        self.count += 1
        result, expected = result.cpu(), expected.cpu()
        if result.shape != expected.shape or not torch.equal(result, expected):
            differing = int((result != expected).sum()) if result.shape == expected.shape else -1
            self.wrong.append(f"{what}: {differing} of {expected.numel()} differ")

    def twice(self, what: str, run: Callable[[], Any]) -> Any:
        """The result, which two runs must give with the same bits."""
        first, second = run(), run()
        for one, other in zip(_tensors(first), _tensors(second), strict=True):
            self.equal(f"{what}, twice", one.view(torch.uint8), other.view(torch.uint8))
        return first


def measure(part: Part) -> None:
    """A row for each operation and dtype: how many comparisons are wrong."""
    checks = [(name, dtype) for name in OPERATIONS for dtype in (list(_DTYPES)[:2] if part.toy else _DTYPES)]
    with part.workers() as pool:
        running = {pool.submit(checked, *case, str(part.device), part.toy): case for case in checks}
        for done in as_completed(running):
            name, dtype = running[done]
            with part.trying(f"{name}, {dtype}"):
                count, worst, wrong = done.result()
                note = f"{count} comparisons, largest error {worst:.2f} of what is allowed; {'; '.join(wrong[:6])}"
                part.row(f"{name}, {dtype}: wrong", len(wrong), at_most=0, note=note.rstrip("; "))


def checked(name: str, dtype: str, device: str, toy: bool) -> tuple[int, float, list[str]]:
    """One operation in one dtype, in this process: comparisons, the largest error, and what was wrong."""
    torch.set_num_threads(1)
    sizes = (4, 2, 16) if toy else (32, 8, 128)
    check = Check(torch.device(device), _DTYPES[dtype], *sizes)
    try:
        OPERATIONS[name](check)
    except Exception as error:  # a launch that fails is as wrong as a number
        check.wrong.append(f"after {check.count} comparisons: {type(error).__name__}: {str(error)[:300]}")
    return check.count, check.worst, check.wrong


# Scores


def _window_scores(check: Check) -> None:
    many = 1030 if check.full else 300
    for rows, tokens, own, reduce, kernel, pooling in (
        (64, many, 0, "mean", 5, "avg"), (1, 200, 0, "mean", 1, "avg"), (20, 333, 25, "max", 7, "max"),
        (7, 65, 0, "mean", 3, "max"),
    ):  # fmt: skip
        queries, keys = check.states(check.q_heads, rows), check.states(check.kv_heads, tokens, 1)
        own_keys = check.states(check.kv_heads, own, 2) if own else None
        how = (0.1, own_keys, reduce, kernel, pooling)
        here = check.here(queries, keys)
        scores = check.twice(
            "window_scores",
            lambda h=here, o=own_keys, w=(reduce, kernel, pooling): window_scores(
                *h, 0.1, own_keys=_moved(o, check.device), reduce=w[0], kernel=w[1], pooling=w[2]
            ),
        )
        expected = window_reference.window_scores(queries, keys, *how)
        check.near(f"window_scores {rows} rows, {tokens} tokens, {reduce} {pooling} {kernel}", scores, expected)


def _pass_scores(check: Check) -> None:
    queries = check.random(3, check.q_heads, 5, check.dim)
    keys, own = check.states(check.kv_heads, 130, 1), check.random(3, check.kv_heads, 9, check.dim, seed=2)
    scores = pass_scores(*check.here(queries, keys), 0.1, check.here(own))
    check.near("pass_scores", scores, window_reference.pass_scores(queries, keys, 0.1, own), _ROUNDED[check.dtype])


def _column_sums(check: Check) -> None:
    tokens = 700 if check.full else 140
    for rows, local, every in ((tokens, 64, 1), (tokens, 20, 8), (33, 33, 2)):
        queries, keys = check.states(4, rows), check.states(2, tokens, 1)
        expected = column_sums_reference.column_sums(queries, keys, 0.1, local, every)
        here = check.here(queries, keys)
        sums = check.twice("column_sums", lambda h=here, n=local, e=every: column_sums(*h, 0.1, n, every=e))
        for name, one, other in zip(("total", "local"), sums, expected, strict=True):
            check.near(f"column_sums {rows} rows, every {every}, {name}", one, other)


def _lag_scores(check: Check) -> None:
    for lag, partitions, own_scale in ((128, 4, False), (128, 2, True), (50, 3, False)):
        keys, values = (check.states(check.kv_heads, lag * partitions, seed) for seed in (0, 1))
        scores = lag_scores(*check.here(keys, values), lag, own_scale=own_scale, value_weight=0.7)
        check.near(f"lag_scores {lag}", scores, lag_reference.lag_scores(keys, values, lag, own_scale, 0.7))


def _small_scores(check: Check) -> None:
    states = check.states(check.kv_heads, 150)
    here = check.here(states)
    check.near("row_norms", row_norms(here), norms_reference.row_norms(states))
    check.near("mean_cosines", mean_cosines(here), cosines_reference.mean_cosines(states))
    check.twice("mean_cosines", lambda: mean_cosines(here))
    angles = torch.rand(150, check.dim, generator=torch.Generator().manual_seed(3))
    tables = angles.cos(), angles.sin(), torch.arange(check.dim).roll(check.dim // 2)
    check.near("rotate", rotate(here, *check.here(*tables)), rotate_reference.rotate(states, *tables))


# Keeping


def _select(check: Check) -> None:
    tokens, heads = 1100 if check.full else 700, check.kv_heads
    scores = check.random(heads, tokens, dtype=torch.float32)
    scores[0, ::3] = 0.5  # ties
    scores[1, 7] = torch.nan
    protected = torch.arange(tokens) >= tokens - 16
    counts = [16 + 60 * (head % 5) for head in range(heads)]
    keys, values = (check.states(heads, tokens, seed) for seed in (1, 2))
    here_scores, here_protected, here_keys, here_values = check.here(scores, protected, keys, values)
    mask = check.twice("select", lambda: select(here_scores, here_protected, counts))
    expected = select_reference.select(scores, protected, counts)
    check.equal("select", mask, expected)
    packed = pack(here_keys, here_values, mask, counts)
    best = keep_best(here_keys, here_values, here_scores, here_protected, counts)
    wanted = select_reference.pack(keys, values, expected, counts)
    for name, *results, other in zip(("keys", "values", "positions"), packed, best, wanted, strict=False):
        for one in results:
            check.equal(f"packed {name}", one, other)


def _merge(check: Check) -> None:
    tokens, centers = [90, 0, 37], [20, 5, 33]
    keys, values = (check.random(sum(tokens), check.dim, seed=seed) for seed in (0, 1))
    center_keys, center_values = (check.random(sum(centers), check.dim, seed=seed) for seed in (2, 3))
    tensors = (keys, values, center_keys, center_values)
    similarity, nearest = nearest_pair(*check.here(*tensors), tokens, centers)
    expected, center = merge_reference.nearest_pair(*tensors, tokens, centers)
    check.near("nearest_pair: similarity", similarity, expected)
    # Of two centers that are equally near, either is right up to rounding.
    apart = nearest.cpu() != center
    at = nearest.cpu()[apart]
    own = [
        merge_reference.cosine(keys[i], center_keys[j]) * merge_reference.cosine(values[i], center_values[j])
        for i, j in zip(apart.nonzero().flatten().tolist(), at.tolist(), strict=True)
    ]
    check.near("nearest_pair: centers", torch.tensor(own), expected[apart])
    classes = torch.randint(40, (sum(tokens),), generator=torch.Generator().manual_seed(5))
    weights = torch.rand(sum(tokens), generator=torch.Generator().manual_seed(6)) + 0.1
    here = check.here(keys, values, weights, classes)
    merged = check.twice("merge_weighted", lambda: merge_weighted(*here, 40))
    for name, one, other in zip(
        ("directions", "means"), merged, merge_reference.merge_weighted(keys, values, weights, classes, 40), strict=True
    ):
        check.near(f"merge_weighted: {name}", one, other)


def _quantize(check: Check) -> None:
    rows = check.random(70, check.dim)
    for bits in (8, 4, 2):
        for axis in ("tokens", "channels"):
            for group in (64, 32, 24) if check.full else (24,):
                coded = quantize(check.here(rows), bits, group, axis)  # type: ignore[arg-type]
                expected = quantize_reference.quantize(rows.float(), bits, group, axis)  # type: ignore[arg-type]
                for name, one, other in zip(("codes", "scales", "zeros"), coded, expected, strict=True):
                    check.equal(f"quantize int{bits} {axis} {group}: {name}", one, other)
                how = (bits, group, axis, check.dim)
                restored = dequantize(Coded(*check.here(*expected), *how, check.dtype), 3, 67)  # type: ignore[arg-type]
                wanted = quantize_reference.dequantize(*expected, *how)[3:67]  # type: ignore[arg-type]
                what = f"dequantize int{bits} {axis} {group}"
                check.near(what, restored, wanted, _ROUNDED[check.dtype] if check.dtype != torch.float32 else 1e-6)


def _choose(check: Check) -> None:
    heads = check.kv_heads
    ends, counts = [], []
    for head in range(heads):
        own = [*range(16, 300 - 9 * head, 16), 300 - 9 * head]
        ends += own
        counts.append(len(own))
    low, span = (check.random(sum(counts), check.dim, seed=seed) for seed in (1, 2))
    forced = torch.zeros(sum(counts), dtype=torch.bool)
    forced[torch.tensor(counts).cumsum(0) - 1] = True
    queries = check.random(check.q_heads, check.dim, seed=3)
    choices = []
    for device in (check.device, _CPU):
        tables = [_moved(tensor, device) for tensor in (low, span.abs(), torch.tensor(ends, dtype=torch.int32), forced)]
        units = Units(*tables, tuple(counts), scale=0.7)
        choice = Choice((units,), (Chosen.room([300] * heads, 96, device),), 96, relu=1.0)
        (choose if device == check.device else choose_reference.choose)(_moved(queries, device), choice)
        choices.append(choice.chosen[0])
    result, expected = choices
    check.equal("choose: counts", result.counts, expected.counts)
    for head, count in enumerate(expected.counts.tolist()):
        check.equal("choose: rows", result.rows[head, :count], expected.rows[head, :count])


def _ans(check: Check) -> None:
    """Streams with entries and without, of several arrays, and one with a bit flipped. Their numbers have no dtype."""
    if not ans.can_encode():
        raise PolicyUnsupported("constriction, which encodes, is not installed")
    rows, channels = ([600, 600, 70], 300) if check.full else ([3, 2], 40)
    order = [channel % len(DEVIATIONS) for channel in range(channels)]
    arrays, expected = [], []
    for seed in range(2):
        numbers = drawn(order, sum(rows), seed=seed, spread=3)
        numbers[1::3] = 0
        parts = np.split(numbers, np.cumsum(rows)[:-1], axis=1)
        streams = [ans.encode(part, TABLES, order, entry_rows=ans.ENTRY_ROWS if check.full else 3) for part in parts]
        data = torch.frombuffer(bytearray(b"".join(streams)), dtype=torch.uint8)
        arrays.append(ans.Runs(data, list(map(len, streams)), rows, order))
        expected.append(torch.from_numpy(numbers).float())
    for (codes, sound), numbers in zip(ans.decode(arrays, TABLES, check.device), expected, strict=True):
        check.equal("ans: which are sound", torch.tensor(sound), torch.ones(len(rows), dtype=torch.bool))
        check.equal("ans: numbers", codes, numbers)
    arrays[0].data[arrays[0].sizes[0] - 3] ^= 1
    (_, sound), _ = ans.decode(arrays, TABLES, check.device)
    check.equal("ans: the flipped one", torch.tensor(sound[:2]), torch.tensor([False, True]))


def _layer(check: Check) -> None:
    """What lies before and behind the attention of a layer with biases or norms of heads, as its model's program has
    it: norms, residual, rotation, gate and products."""
    for family in ("qwen2", "qwen3"):
        width, more = check.q_heads * check.dim, {"num_hidden_layers": 1, "vocab_size": 64, "head_dim": check.dim}
        config = AutoConfig.for_model(
            family, hidden_size=width, intermediate_size=3 * width // 2, num_attention_heads=check.q_heads,
            num_key_value_heads=check.kv_heads, **more,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config, dtype=check.dtype).eval().requires_grad_(False)
        lowered = lower(trace(model), plain=True)
        ends = [[*values[:3]] for values in lowered.attended] + [lowered.leavings]
        for number, (instructions, values) in enumerate(zip(lowered.segments, ends, strict=True)):
            _listed(
                check, f"{family}, list {number}", instructions, lowered.buffers, [value.buffer for value in values]
            )


def _listed(
    check: Check, what: str, instructions: list[Instruction], buffers: list[Buffer], left: Sequence[int]
) -> None:
    """What a list leaves of random values in the buffers that it only reads."""
    written = {instruction.out.buffer for instruction in instructions}
    read = {place.buffer for instruction in instructions for place in instruction.places[1:]} - written
    values = [number for number in read if buffers[number].constant is None]
    inputs = {n: check.random(3, buffers[n].width, seed=n, dtype=buffers[n].dtype) for n in values}
    out = [number for number in left if number in written]
    program = row_programs(check.device)
    assert program is not None
    here = program(*(_moved(part, check.device) for part in (instructions, buffers)), [*inputs, *out])

    def run() -> list[Tensor]:
        made = {n: torch.empty(3, buffers[n].width, dtype=buffers[n].dtype, device=check.device) for n in out}
        tensors = {n: _moved(tensor, check.device) for n, tensor in inputs.items()} | made
        here.run(tensors, 3)
        return [tensors[number] for number in out]

    expected = rowwise_reference.run(instructions, buffers, inputs)
    for number, result in zip(out, check.twice(what, run), strict=True):
        check.near(what, result, expected[number], _ROUNDED[check.dtype])


# Attention


def _packed(
    check: Check, lengths: Sequence[int], bits: int | None = None, group: int = 32, seed: int = 0
) -> PackedPrefix:
    keys, values = (check.random(sum(lengths), check.dim, seed=seed + 100 * n) for n in range(2))
    if bits is None:
        return PackedPrefix(keys, values, tuple(lengths))
    return PackedPrefix(
        QuantizedRows.quantize(keys, lengths, bits=bits, group=group, axis="tokens"),
        QuantizedRows.quantize(values, lengths, bits=bits, group=group, axis="channels"),
        tuple(lengths),
    )


def _merged(check: Check, classes: Sequence[int], slots: Sequence[int], bits: int | None = None) -> MergedPrefix:
    whole, generator = _packed(check, classes, bits), torch.Generator().manual_seed(7)
    of = [torch.randint(own, (count,), generator=generator) for own, count in zip(classes, slots, strict=True)]
    scales = torch.rand(sum(slots), generator=generator) * 3
    return MergedPrefix(whole.keys, whole.values, whole.lengths, scales, torch.cat(of).int(), tuple(slots))


def _selected(base: PackedPrefix) -> SelectedPrefix:
    counts = [min(length, 40) - head % 3 for head, length in enumerate(base.lengths)]
    generator = torch.Generator().manual_seed(8)
    rows = torch.zeros(len(counts), 50, dtype=torch.int32)
    for head, (length, count) in enumerate(zip(base.lengths, counts, strict=True)):
        rows[head, :count] = torch.randperm(length, generator=generator)[:count].sort().values
    return SelectedPrefix(base, Chosen(rows, torch.tensor(counts, dtype=torch.int32)))


def _pruned(check: Check, lengths: Sequence[int], kept: int, bits: int | None = None) -> PackedPrefix:
    narrow = replace(check, dim=kept)
    generator = torch.Generator().manual_seed(9)
    channels = [torch.randperm(check.dim, generator=generator)[:kept].sort().values for _ in lengths]
    whole = _packed(check, lengths, bits)
    keys = _packed(narrow, lengths, bits).keys
    return replace(whole, keys=keys, channels=torch.stack(channels).int())


def _kinds(check: Check) -> Iterator[tuple[str, Prefix]]:
    """Every kind of prefix, ragged, on the CPU."""
    ragged = [(130 if check.full else 66) + 37 * head for head in range(check.kv_heads)]
    even = [150] * check.kv_heads
    for name, bits, group in (
        ("plain", None, 0), ("int8", 8, 64), ("int4", 4, 32), ("int3", 3, 32), ("int2", 2, 32), ("groups of 12", 4, 12)
    ):  # fmt: skip
        yield name, _packed(check, ragged, bits, group)
    stacked = _packed(check, even)
    yield "stacked", StackedPrefix(*(rows.view(check.kv_heads, 150, -1)[:, :140] for rows in _plain(stacked)))
    yield "merged", _merged(check, ragged, [300] * check.kv_heads)
    yield "merged int4", _merged(check, ragged, [300] * check.kv_heads, 4)
    yield "selected", _selected(_packed(check, ragged))
    yield "selected int4", _selected(_packed(check, ragged, 4))
    kept = check.dim * 6 // 10
    yield "pruned", _pruned(check, ragged, kept)
    for bits in (4, 3):
        yield f"pruned int{bits}", _pruned(check, ragged, kept, bits)


def _plain(prefix: PackedPrefix) -> tuple[Tensor, Tensor]:
    assert isinstance(prefix.keys, Tensor)
    assert isinstance(prefix.values, Tensor)
    return prefix.keys, prefix.values


def _prefix_kinds(check: Check) -> None:
    layout = ((1, 1), (SuffixRows((3, 9), (0, 1)),))
    for name, prefix in _kinds(check):
        _attend(check, name, [[prefix], [prefix]], *layout)
    # Rows that exist only while they are read: keys that are rotated then.
    base = _packed(check, [40 + head for head in range(check.kv_heads)])
    streams = []
    for device in (check.device, _CPU):
        heads = _moved(base, device).heads
        streams.append(StreamedPrefix(base.lengths, lambda h, i, j, of=heads: (of[h][0][i:j], of[h][1][i:j])))
    _attend(
        check,
        "streamed",
        [[streams[1]], [streams[1]]],
        *layout,
        here=[[streams[0]], [streams[0]]],
    )


def _prefix_batches(check: Check) -> None:
    heads = check.kv_heads
    one, two = (
        _packed(check, [(600 if check.full else 150) - 50 * head for head in range(heads)]),
        _packed(check, [70] * heads, 4, seed=3),
    )
    merged = _merged(check, [30] * heads, [90] * heads)
    for rows in (1, 8, 32) if check.full else (1, 8):
        lengths = tuple(1 + row % 7 for row in range(rows))
        _attend(check, f"{rows} rows on one document", [[one]], (rows,), (SuffixRows(lengths, tuple(range(rows))),))
    # Several documents, one without a prefix, rows that take no part, and a question among them.
    rows = SuffixRows((3, 7, 70, 9, 2, 1), (0, -1, 1, 8, 9, 7))
    _attend(
        check, "a mixed batch", [[one, two], [], [merged, two], [one]], (2, 5, 2, 1), (rows, SuffixRows((11,), (2,), 5))
    )
    new = 70 if check.full else 20
    _attend(check, f"a question of {new} tokens", [[one]], (new,), (SuffixRows((90,), (0,), new),))


def _prefix_rules(check: Check) -> None:
    """What is left to torch's operations on a card, too."""
    prefix = _packed(check, [90] * check.kv_heads)
    stacked = StackedPrefix(*(rows.view(check.kv_heads, 90, -1) for rows in _plain(prefix)))
    sinks = check.random(check.q_heads, dtype=torch.float32)
    layout = ((1, 1), (SuffixRows((3, 9), (0, 1)),))
    for name, rules in (
        ("softcap", LogitRules(0.1, softcap=3.0)), ("sinks", LogitRules(0.1, sinks=sinks)),
        ("window", LogitRules(0.1, window=40)),
    ):  # fmt: skip
        states: Prefix = stacked if name == "window" else prefix
        _attend(check, name, [[states], [states]], *layout, rules=rules)
    queries, keys, values = (
        check.random(1, heads, 65, check.dim, seed=seed)
        for seed, heads in enumerate((check.q_heads, check.kv_heads, check.kv_heads))
    )
    attended, lse = causal_attention(*check.here(queries, keys, values), LogitRules(0.1))
    logits = torch.einsum("ghtd,gsd->ghts", _grouped(queries, check), keys[0].double()) * 0.1
    logits = logits.masked_fill(torch.ones(65, 65, dtype=torch.bool).triu(1), -torch.inf)
    out = torch.einsum("ghts,gsd->ghtd", logits.softmax(-1), values[0].double())
    check.near("causal_attention", attended[0], out.flatten(0, 1), _ROUNDED[check.dtype])
    check.near("causal_attention: log-sum-exps", lse[0], logits.logsumexp(-1).flatten(0, 1), 1e-4)


def _grouped(queries: Tensor, check: Check) -> Tensor:
    return queries[0].double().view(check.kv_heads, check.group, *queries.shape[2:])


def _by_document(check: Check) -> None:
    documents = [[_packed(check, [60 + 9 * n] * check.kv_heads, seed=n)] for n in range(3)]
    layout, suffixes, queries = _batch(check, (2,), (SuffixRows((5, 8), (0, 1)),))
    here = ([[_moved(p, check.device) for p in document] for document in documents], _moved(suffixes, check.device))
    attended, masses = attention_by_document(
        _moved(queries, check.device), *here, _layout(layout, check.device), LogitRules(0.1)
    )
    every = [[prefix for document in documents for prefix in document]]
    expected = attention_reference.prefix_attention(queries, every, suffixes, layout, LogitRules(0.1))
    check.near("attention_by_document", attended, expected, _ROUNDED[check.dtype])
    check.near("masses are shares", masses.sum(0).clamp(0, 1), masses.sum(0))


def _attend(
    check: Check,
    what: str,
    prefixes: Sequence[Sequence[Prefix]],
    shares: tuple[int, ...],
    rows: tuple[SuffixRows, ...],
    *,
    rules: LogitRules | None = None,
    here: Sequence[Sequence[Prefix]] | None = None,
) -> None:
    """One batch on the device, twice, beside the naive form. here: the prefixes there, if they cannot be moved."""
    rules = rules or LogitRules(0.1)
    layout, suffixes, queries = _batch(check, shares, rows)
    moved_prefixes = here or [[_moved(prefix, check.device) for prefix in of_layer] for of_layer in prefixes]
    there = _layout(layout, check.device)
    moved = (
        _moved(queries, check.device),
        moved_prefixes,
        _moved(suffixes, check.device),
        there,
        _moved(rules, check.device),
    )
    attended = check.twice(what, lambda: prefix_attention(*moved))
    expected = attention_reference.prefix_attention(queries, prefixes, suffixes, layout, rules)
    check.near(what, attended, expected, _ROUNDED[check.dtype])


def _batch(
    check: Check, shares: tuple[int, ...], rows: tuple[SuffixRows, ...]
) -> tuple[BatchLayout, list[tuple[Tensor, Tensor]], Tensor]:
    """The layout on the CPU, suffixes with room that holds large numbers, and queries."""
    layout, suffixes = BatchLayout(shares, rows, _CPU), []
    for number, suffix in enumerate(rows):
        shape = (len(suffix.first), check.kv_heads, max(suffix.lengths) + 3, check.dim)
        keys, values = (check.random(*shape, seed=20 + 10 * number + n) for n in range(2))
        for row, length in enumerate(suffix.lengths):
            keys[row, :, length:], values[row, :, length:] = 50.0, 1000.0
        suffixes.append((keys, values))
    return layout, suffixes, check.random(sum(shares), check.q_heads, check.dim, seed=11)


def _layout(layout: BatchLayout, device: torch.device) -> BatchLayout:
    return BatchLayout(layout.shares, layout.suffixes, device, layout.starts)


def _moved(value: Any, device: torch.device) -> Any:
    """The same on a device, with the same strides."""

    def there(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)

    return mapped(value, there)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.contiguous()]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


OPERATIONS: dict[str, Callable[[Check], None]] = {
    "prefix attention, kinds": _prefix_kinds,
    "prefix attention, batches": _prefix_batches,
    "prefix attention, rules": _prefix_rules,
    "attention by document": _by_document,
    "quantize": _quantize,
    "window scores": _window_scores,
    "column sums": _column_sums,
    "pass scores": _pass_scores,
    "lag scores": _lag_scores,
    "lists of a layer": _layer,
    "norms, cosines, rotation": _small_scores,
    "select, pack": _select,
    "merge": _merge,
    "choose": _choose,
    "ans": _ans,
}
"""Those that take longest first."""
