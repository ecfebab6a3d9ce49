"""The cases of `kvshelf bench kernels`: each operation on one layer, with the bytes and FLOPs it needs at least."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvshelf.errors import InvalidRequest
from kvshelf.kernels.column_sums import column_sums
from kvshelf.kernels.groups import Axis
from kvshelf.kernels.lag_scores import lag_scores
from kvshelf.kernels.mean_cosines import mean_cosines
from kvshelf.kernels.merge import merge_weighted, nearest_pair
from kvshelf.kernels.prefix_attention import BatchLayout, LogitRules, PackedPrefix, SuffixRows, prefix_attention
from kvshelf.kernels.quantize import Coded, dequantize, quantize
from kvshelf.kernels.rotate import rotate
from kvshelf.kernels.row_norms import row_norms
from kvshelf.kernels.select import pack, select
from kvshelf.kernels.window_scores import window_scores
from kvshelf_bench.kernels import baselines

WINDOW, LAG = 64, 128
_KEPT = 8  # one entry of this many stays
_BITS, _GROUP = 4, 64
_SUFFIX = 64
_ROWS = 16
PREFILL, ATTENTION = "prefill of the layer", "causal attention"


@dataclass(frozen=True)
class LayerSize:
    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int


LLAMA_8B = LayerSize(q_heads=32, kv_heads=8, head_dim=128, hidden=4096, intermediate=14336)


@dataclass(frozen=True)
class Case:
    """A call of `run` on fresh arguments from `make`. nbytes: bytes it must read and write at least; flops: FLOPs it
    must compute; `beside` names the case that computes the same result in another way."""

    name: str
    make: Callable[[], tuple[Any, ...]]
    run: Callable[..., object]
    nbytes: float
    flops: float
    beside: str = ""


class Layer:
    """Random states of a layer for a document of `tokens`, token-major in memory as models have them.

    kept: entries that stay in a head. row_bytes: bytes of one key. kv_bytes: bytes of all keys, or of all values.
    """

    def __init__(self, shape: LayerSize, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        if tokens < _KEPT * WINDOW or tokens % LAG:
            raise InvalidRequest(
                f"{tokens} tokens: give a multiple of {LAG} from {_KEPT * WINDOW}, so that what is kept holds a window",
                param="lengths",
            )
        self.shape, self.tokens, self.dtype, self.device = shape, tokens, dtype, device
        self.kept = tokens // _KEPT
        self.counts = [self.kept] * shape.kv_heads
        self.scale = shape.head_dim**-0.5
        self.row_bytes = shape.head_dim * dtype.itemsize
        self.kv_bytes = shape.kv_heads * tokens * self.row_bytes

    def random(self, *size: int) -> Tensor:
        """Normally distributed, in the layer's dtype."""
        return torch.randn(*size, device=self.device).to(self.dtype)

    def states(self, heads: int, tokens: int) -> Tensor:
        """`[heads, tokens, D]`, a view."""
        return self.random(tokens, heads, self.shape.head_dim).transpose(0, 1)

    def packed(self, rows: int) -> Tensor:
        """`[rows, D]`, contiguous."""
        return self.random(rows, self.shape.head_dim)

    def keys(self) -> tuple[Tensor]:
        return (self.states(self.shape.kv_heads, self.tokens),)

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        return (*self.keys(), *self.keys())

    def window(self) -> tuple[Tensor, Tensor, Tensor]:
        """The last queries, and the keys and values of the document."""
        return (self.states(self.shape.q_heads, WINDOW), *self.keys_and_values())

    def protected(self) -> Tensor:
        """`[tokens]` bool: the window."""
        return torch.arange(self.tokens, device=self.device) >= self.tokens - WINDOW

    def int4_bytes(self, rows: int) -> float:
        """Bytes of rows of keys or values as codes, with a scale and a zero of two bytes a group."""
        return rows * self.shape.head_dim * (_BITS / 8 + 4 / _GROUP)


def cases(layer: Layer) -> list[Case]:
    """All cases, each baseline after the case that it is compared with."""
    families = (prefills, scoring, keeping, snapkv, merging, quantizing, attending)
    return [case for family in families for case in family(layer)]


def prefills(layer: Layer) -> list[Case]:
    """A layer's prefill, of which the other cases are a share, and the attention in it."""
    shape, n = layer.shape, layer.tokens
    q_size, kv_size = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = [(shape.hidden, q_size), (shape.hidden, kv_size), (shape.hidden, kv_size), (q_size, shape.hidden)]
    sizes += [(shape.hidden, shape.intermediate)] * 2 + [(shape.intermediate, shape.hidden)]
    weights = sum(a * b for a, b in sizes)
    nbytes = (weights + 2 * n * shape.hidden) * layer.dtype.itemsize
    attention = 2.0 * n * n * q_size

    def make() -> tuple[Tensor, list[Tensor]]:
        return layer.random(n, shape.hidden), [layer.random(*size).mul_(0.02) for size in sizes]

    def make_states() -> tuple[Tensor, ...]:
        return (layer.states(shape.q_heads, n), *layer.keys_and_values())

    run = partial(baselines.layer_prefill, head_dim=shape.head_dim)
    states_bytes = 2 * n * (shape.q_heads + shape.kv_heads) * layer.row_bytes
    return [
        Case(PREFILL, make, run, nbytes, 2.0 * n * weights + attention),
        Case(ATTENTION, make_states, baselines.causal_attention, states_bytes, attention),
    ]


def scoring(layer: Layer) -> list[Case]:
    """Scores of the document's tokens."""
    shape, n, scale, kv_bytes = layer.shape, layer.tokens, layer.scale, layer.kv_bytes
    kv_size = 1.0 * shape.kv_heads * n * shape.head_dim
    scored_bytes = kv_bytes + 4 * shape.kv_heads * n
    rotated_bytes = kv_bytes + (shape.kv_heads + 2) * n * shape.head_dim * 4
    window_flops = 2.0 * shape.q_heads * WINDOW * n * shape.head_dim
    half = torch.arange(shape.head_dim, device=layer.device).roll(shape.head_dim // 2)
    tables = (*torch.rand(2, n, shape.head_dim, device=layer.device), half)  # cos, sin, partners
    in_three_steps = baselines.column_sums_of_whole_weights

    def sums(name: str, run: Callable[..., object], every: int = 1, beside: str = "") -> Case:
        nbytes = kv_bytes * (1 + shape.q_heads / shape.kv_heads / every) + 8 * shape.q_heads * n
        # One causal product. A form that cannot hold a whole row computes a second one for the log-sum-exps.
        flops = 1.0 * shape.q_heads * n * n * shape.head_dim / every
        return Case(name, lambda: (layer.states(shape.q_heads, n), *layer.keys()), run, nbytes, flops, beside)

    both, lag = layer.keys_and_values, partial(lag_scores, lag=LAG)
    window = partial(window_scores, scale=scale, kernel=5)
    return [
        sums("column_sums", lambda q, k: column_sums(q, k, scale, WINDOW)),
        sums("column sums in three steps", lambda q, k: in_three_steps(q, k, scale), beside="column_sums"),
        sums("column_sums, every=8", lambda q, k: column_sums(q, k, scale, WINDOW, every=8), every=8),
        Case("window_scores", lambda: layer.window()[:2], window, scored_bytes, window_flops),
        Case("lag_scores", both, lag, scored_bytes + kv_bytes, 18 * kv_size),
        Case("row_norms", layer.keys, row_norms, scored_bytes, 2 * kv_size),
        Case("mean_cosines", layer.keys, mean_cosines, scored_bytes + kv_bytes, 6 * kv_size),
        Case("rotate", lambda: (*layer.keys(), *tables), rotate, rotated_bytes, 3 * kv_size),
    ]


def keeping(layer: Layer) -> list[Case]:
    """Selection and gather, each separately."""
    heads, n, counts = layer.shape.kv_heads, layer.tokens, layer.counts
    protected = layer.protected()
    moved_bytes = 4 * heads * layer.kept * layer.row_bytes

    def scores() -> Tensor:
        return torch.rand(heads, n, device=layer.device)

    def make_mask() -> tuple[Tensor, Tensor, Tensor]:
        return (*layer.keys_and_values(), select(scores(), protected, counts))

    def make_indices() -> tuple[Tensor, Tensor, Tensor]:
        return (*layer.keys_and_values(), scores().topk(layer.kept, dim=1).indices)

    def gather(keys: Tensor, values: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        return baselines.gather_expanded(keys, chosen), baselines.gather_expanded(values, chosen)

    packed_bytes = moved_bytes + heads * (n + 4 * layer.kept)
    return [
        Case("select", lambda: (scores(),), lambda s: select(s, protected, counts), 6.0 * heads * n, 0),
        Case("pack", make_mask, lambda k, v, mask: pack(k, v, mask, counts), packed_bytes, 0),
        Case("gather by an expanded index", make_indices, gather, moved_bytes, 0, beside="pack"),
    ]


def snapkv(layer: Layer) -> list[Case]:
    shape, protected = layer.shape, layer.protected()
    kept_rows = shape.kv_heads * layer.kept
    kept_bytes = 2 * kept_rows * layer.row_bytes
    nbytes = layer.kv_bytes + 2 * kept_bytes
    flops = 2.0 * shape.q_heads * WINDOW * layer.tokens * shape.head_dim
    name = "snapkv: scores, select, pack"

    def run(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        scores = window_scores(queries, keys, layer.scale, kernel=5)
        kept_keys, kept_values, _, _ = pack(keys, values, select(scores, protected, layer.counts), layer.counts)
        return kept_keys, kept_values

    def run_int4(queries: Tensor, keys: Tensor, values: Tensor) -> object:
        kept_keys, kept_values = run(queries, keys, values)
        return quantize(kept_keys, _BITS, _GROUP, "tokens"), quantize(kept_values, _BITS, _GROUP, "channels")

    run_expanded = partial(baselines.snapkv_by_expansion, kept=layer.kept)
    return [
        Case(name, layer.window, run, nbytes, flops),
        Case("snapkv as kvpress computes it", layer.window, run_expanded, nbytes, flops, beside=name),
        Case("snapkv and int4", layer.window, run_int4, nbytes + kept_bytes + 2 * layer.int4_bytes(kept_rows), flops),
    ]


def merging(layer: Layer) -> list[Case]:
    """EMS's merge: in each head half of the tokens look for their center among the tokens that stay."""
    heads, dim = layer.shape.kv_heads, layer.shape.head_dim
    token_counts, center_counts = [layer.tokens // 2] * heads, layer.counts
    members, centers = sum(token_counts), sum(center_counts)
    nearest = partial(nearest_pair, token_counts=token_counts, center_counts=center_counts)

    def make_pairs() -> tuple[Tensor, ...]:
        return tuple(layer.packed(rows) for rows in (members, members, centers, centers))

    def make_classes() -> tuple[Any, ...]:
        weights = torch.rand(members, device=layer.device) + 0.1
        classes = torch.randint(centers, (members,), device=layer.device)
        return layer.packed(members), layer.packed(members), weights, classes, centers

    pair_bytes, pair_flops = 2 * (members + centers) * layer.row_bytes + 12 * members, 4.0 * members * layer.kept * dim
    merged_bytes = members * (2 * layer.row_bytes + 12) + 8 * centers * dim
    return [
        Case("nearest_pair", make_pairs, nearest, pair_bytes, pair_flops),
        Case("merge_weighted", make_classes, merge_weighted, merged_bytes, 6.0 * members * dim),
    ]


def quantizing(layer: Layer) -> list[Case]:
    """All keys or all values of the document, to int4 and back."""
    rows, size = layer.shape.kv_heads * layer.tokens, 1.0 * layer.shape.kv_heads * layer.tokens * layer.shape.head_dim
    nbytes = layer.kv_bytes + layer.int4_bytes(rows)

    def of_axis(axis: Axis) -> list[Case]:
        store = partial(quantize, bits=_BITS, group=_GROUP, axis=axis)

        def restore(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
            return dequantize(Coded(codes, scales, zeros, _BITS, _GROUP, axis, layer.shape.head_dim, layer.dtype))

        return [
            Case(f"quantize_{axis}", lambda: (layer.packed(rows),), store, nbytes, 8 * size),
            Case(f"dequantize_{axis}", lambda: store(layer.packed(rows)), restore, nbytes, 2 * size),
        ]

    return [*of_axis("tokens"), *of_axis("channels")]


def attending(layer: Layer) -> list[Case]:
    """One decode step: over a whole document, over its kept entries, and of a batch."""
    shape, n = layer.shape, layer.tokens
    whole = _attending(layer, "prefix_attention, 1 row, all kept", rows=1, documents=1, kept=n)

    def make_static() -> tuple[Tensor, ...]:
        cache = (shape.kv_heads, n + _SUFFIX, shape.head_dim)
        return layer.random(shape.q_heads, 1, shape.head_dim), layer.random(*cache), layer.random(*cache)

    static = baselines.attention_of_full_cache
    return [
        whole,
        Case("attention over a static cache", make_static, static, whole.nbytes, whole.flops, whole.name),
        _attending(layer, "prefix_attention, 1 row, 1/8 kept", rows=1, documents=1, kept=layer.kept),
        _attending(layer, "prefix_attention, 16 documents", rows=_ROWS, documents=_ROWS, kept=layer.kept),
        _attending(layer, "prefix_attention, 16 rows, 1 document", rows=_ROWS, documents=1, kept=layer.kept),
    ]


def _attending(layer: Layer, name: str, *, rows: int, documents: int, kept: int) -> Case:
    heads, dim = layer.shape.kv_heads, layer.shape.head_dim
    suffix = SuffixRows(lengths=(_SUFFIX,) * rows, first=tuple(range(rows)))
    layout = BatchLayout((rows // documents,) * documents, (suffix,), layer.device)

    def make() -> tuple[Any, ...]:
        lengths = (kept,) * heads
        entries = sum(lengths)
        prefixes = [[PackedPrefix(layer.packed(entries), layer.packed(entries), lengths)] for _ in range(documents)]
        suffixes = [(layer.random(rows, heads, _SUFFIX, dim), layer.random(rows, heads, _SUFFIX, dim))]
        return layer.random(rows, layer.shape.q_heads, dim), prefixes, suffixes

    read = 2 * heads * (documents * kept + rows * _SUFFIX) * layer.row_bytes
    return Case(
        name,
        make,
        lambda queries, prefixes, suffixes: prefix_attention(
            queries, prefixes, suffixes, layout, LogitRules(layer.scale)
        ),
        read + 2 * rows * layer.shape.q_heads * layer.row_bytes,
        4.0 * rows * layer.shape.q_heads * (kept + _SUFFIX) * dim,
    )
