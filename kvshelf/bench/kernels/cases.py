"""What `kvshelf bench kernels` times: every operation on one layer, with what it must move and compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvshelf.bench.kernels import baselines as others
from kvshelf.bench.kernels.column_sums import column_sums_of_whole_weights
from kvshelf.bench.kernels.layer import LAG, WINDOW, Case, Layer
from kvshelf.kernels.column_sums import column_sums
from kvshelf.kernels.lag_scores import lag_scores
from kvshelf.kernels.mean_cosines import mean_cosines
from kvshelf.kernels.merge import merge_weighted, nearest_pair
from kvshelf.kernels.prefix_attention import BatchLayout, PackedPrefix, SuffixRows, prefix_attention
from kvshelf.kernels.quantize import dequantize_channels, dequantize_tokens, quantize_channels, quantize_tokens
from kvshelf.kernels.rotate import rotate
from kvshelf.kernels.row_norms import row_norms
from kvshelf.kernels.select import pack, select
from kvshelf.kernels.window_scores import window_scores

BITS, GROUP = 4, 64
_SUFFIX = 64
_ROWS = 16


def cases(layer: Layer) -> list[Case]:
    """All of them, a baseline after the case that it stands beside."""
    families = (prefills, scoring, keeping, snapkv, merging, quantizing, attending)
    return [case for family in families for case in family(layer)]


def prefills(layer: Layer) -> list[Case]:
    """What scoring is a share of: a layer's prefill, and the attention in it."""
    shape, n = layer.shape, layer.tokens
    q_size, kv_size = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = [(shape.hidden, q_size), (shape.hidden, kv_size), (shape.hidden, kv_size), (q_size, shape.hidden)]
    sizes += [(shape.hidden, shape.intermediate)] * 2 + [(shape.intermediate, shape.hidden)]
    weights = sum(a * b for a, b in sizes)
    attention = 2.0 * n * n * q_size

    def make() -> tuple[Tensor, list[Tensor]]:
        made = [torch.randn(size, device=layer.device).mul_(0.02).to(layer.dtype) for size in sizes]
        return torch.randn(n, shape.hidden, device=layer.device).to(layer.dtype), made

    def make_states() -> tuple[Tensor, ...]:
        return tuple(layer.states(heads, n) for heads in (shape.q_heads, shape.kv_heads, shape.kv_heads))

    return [
        Case(
            PREFILL,
            make,
            lambda hidden, made: others.layer_prefill(hidden, made, shape.head_dim),
            (weights + 2 * n * shape.hidden) * layer.dtype.itemsize,
            2.0 * n * weights + attention,
        ),
        Case(
            ATTENTION,
            make_states,
            others.causal_attention,
            n * (2 * shape.q_heads + 2 * shape.kv_heads) * layer.row_bytes,
            attention,
        ),
    ]


PREFILL, ATTENTION = "prefill of the layer", "causal attention"


def scoring(layer: Layer) -> list[Case]:
    """Scores of the document's tokens."""
    shape, n, scale = layer.shape, layer.tokens, layer.scale
    kv_bytes = shape.kv_heads * n * layer.row_bytes
    sums_bytes = kv_bytes * (1 + shape.q_heads / shape.kv_heads) + 8 * shape.q_heads * n
    # One causal product. A form that cannot hold a whole row computes a second one for the log-sum-exps.
    sums_flops = 1.0 * shape.q_heads * n * n * shape.head_dim

    def make() -> tuple[Tensor, Tensor]:
        return layer.states(shape.q_heads, n), layer.states(shape.kv_heads, n)

    half = torch.arange(shape.head_dim, device=layer.device).roll(shape.head_dim // 2)
    tables = (*torch.rand(2, n, shape.head_dim, device=layer.device), half)  # cos, sin, partners

    return [
        Case("column_sums", make, lambda q, k: column_sums(q, k, scale, WINDOW), sums_bytes, sums_flops),
        Case(
            "column sums in three steps",
            make,
            lambda q, k: column_sums_of_whole_weights(q, k, scale),
            sums_bytes,
            sums_flops,
            beside="column_sums",
        ),
        Case(
            "column_sums, every=8",
            make,
            lambda q, k: column_sums(q, k, scale, WINDOW, every=8),
            kv_bytes * (1 + shape.q_heads / shape.kv_heads / 8) + 8 * shape.q_heads * n,
            sums_flops / 8,
        ),
        Case(
            "window_scores",
            layer.window,
            lambda q, k, _: window_scores(q, k, scale, kernel=5),
            kv_bytes + 4 * shape.kv_heads * n,
            2.0 * shape.q_heads * WINDOW * n * shape.head_dim,
        ),
        Case(
            "lag_scores",
            lambda: layer.window()[1:],
            lambda k, v: lag_scores(k, v, LAG),
            2 * kv_bytes + 4 * shape.kv_heads * n,
            2 * 9.0 * shape.kv_heads * n * shape.head_dim,
        ),
        Case(
            "row_norms",
            lambda: layer.window()[1:2],
            row_norms,
            kv_bytes + 4 * shape.kv_heads * n,
            2.0 * shape.kv_heads * n * shape.head_dim,
        ),
        Case(
            "mean_cosines",
            lambda: layer.window()[1:2],
            mean_cosines,
            2 * kv_bytes + 4 * shape.kv_heads * n,
            6.0 * shape.kv_heads * n * shape.head_dim,
        ),
        Case(
            "rotate",
            lambda: (*layer.window()[1:2], *tables),
            rotate,
            kv_bytes + (shape.kv_heads + 2) * n * shape.head_dim * 4,
            3.0 * shape.kv_heads * n * shape.head_dim,
        ),
    ]


def keeping(layer: Layer) -> list[Case]:
    """Selection and gather, each by itself."""
    shape, n, kept = layer.shape, layer.tokens, layer.kept
    counts = [kept] * shape.kv_heads
    protected = _protected(layer)
    kept_bytes = 2 * shape.kv_heads * kept * layer.row_bytes

    def scores() -> Tensor:
        return torch.rand(shape.kv_heads, n, device=layer.device)

    def make_mask() -> tuple[Tensor, Tensor, Tensor]:
        return (*layer.window()[1:], select(scores(), protected, counts))

    def make_indices() -> tuple[Tensor, Tensor, Tensor]:
        return (*layer.window()[1:], scores().topk(kept, dim=1).indices)

    return [
        Case("select", lambda: (scores(),), lambda s: select(s, protected, counts), 6.0 * shape.kv_heads * n, 0),
        Case(
            "pack",
            make_mask,
            lambda k, v, mask: pack(k, v, mask, counts),
            2 * kept_bytes + shape.kv_heads * (n + 4 * kept),
            0,
        ),
        Case(
            "gather by an expanded index",
            make_indices,
            lambda k, v, chosen: (others.gather_expanded(k, chosen), others.gather_expanded(v, chosen)),
            2 * kept_bytes,
            0,
            beside="pack",
        ),
    ]


def snapkv(layer: Layer) -> list[Case]:
    """All that SnapKV does to a layer."""
    shape, n, kept = layer.shape, layer.tokens, layer.kept
    counts = [kept] * shape.kv_heads
    protected = _protected(layer)
    kept_bytes = 2 * shape.kv_heads * kept * layer.row_bytes
    nbytes = shape.kv_heads * n * layer.row_bytes + 2 * kept_bytes
    flops = 2.0 * shape.q_heads * WINDOW * n * shape.head_dim

    def run(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        found = window_scores(queries, keys, layer.scale, kernel=5)
        kept_keys, kept_values, _, _ = pack(keys, values, select(found, protected, counts), counts)
        return kept_keys, kept_values

    def run_int4(queries: Tensor, keys: Tensor, values: Tensor) -> object:
        kept_keys, kept_values = run(queries, keys, values)
        return quantize_tokens(kept_keys, BITS, GROUP), quantize_channels(kept_values, BITS, GROUP)

    return [
        Case("snapkv: scores, select, pack", layer.window, run, nbytes, flops),
        Case(
            "snapkv as kvpress computes it",
            layer.window,
            lambda q, k, v: others.snapkv_by_expansion(q, k, v, kept),
            nbytes,
            flops,
            beside="snapkv: scores, select, pack",
        ),
        Case(
            "snapkv and int4",
            layer.window,
            run_int4,
            nbytes + kept_bytes + 2 * _int4_bytes(layer, shape.kv_heads * kept),
            flops,
        ),
    ]


def _protected(layer: Layer) -> Tensor:
    """`[tokens]` bool: the window."""
    return torch.arange(layer.tokens, device=layer.device) >= layer.tokens - WINDOW


def merging(layer: Layer) -> list[Case]:
    """EMS's merge: in each head half of the tokens look for their center among those that stay."""
    heads, dim = layer.shape.kv_heads, layer.shape.head_dim
    token_counts, center_counts = [layer.tokens // 2] * heads, [layer.kept] * heads
    members, centers = sum(token_counts), sum(center_counts)

    def make_pairs() -> tuple[Tensor, ...]:
        return tuple(layer.packed(rows) for rows in (members, members, centers, centers))

    def make_classes() -> tuple[Tensor, ...]:
        weights = torch.rand(members, device=layer.device) + 0.1
        classes = torch.randint(centers, (members,), device=layer.device)
        return layer.packed(members), layer.packed(members), weights, classes

    return [
        Case(
            "nearest_pair",
            make_pairs,
            lambda k, v, center_k, center_v: nearest_pair(k, v, center_k, center_v, token_counts, center_counts),
            2 * (members + centers) * layer.row_bytes + 12 * members,
            4.0 * members * layer.kept * dim,
        ),
        Case(
            "merge_weighted",
            make_classes,
            lambda k, v, weights, classes: merge_weighted(k, v, weights, classes, centers),
            members * (2 * layer.row_bytes + 12) + 8 * centers * dim,
            6.0 * members * dim,
        ),
    ]


def quantizing(layer: Layer) -> list[Case]:
    """All keys or all values of the document, to int4 and back."""
    shape, dim = layer.shape, layer.shape.head_dim
    rows = shape.kv_heads * layer.tokens
    nbytes = rows * layer.row_bytes + _int4_bytes(layer, rows)
    settings: dict[str, Any] = {"bits": BITS, "group": GROUP}
    back = settings | {"num_channels": dim, "dtype": layer.dtype}

    def make_codes(quantize: Callable[..., Any]) -> tuple[Any, ...]:
        return tuple(quantize(layer.packed(rows), **settings))

    found = []
    for name, quantize, dequantize in (
        ("tokens", quantize_tokens, dequantize_tokens),
        ("channels", quantize_channels, dequantize_channels),
    ):
        store, restore = partial(quantize, **settings), partial(dequantize, **back)
        found.append(Case(f"quantize_{name}", lambda: (layer.packed(rows),), store, nbytes, 8.0 * rows * dim))
        found.append(Case(f"dequantize_{name}", partial(make_codes, quantize), restore, nbytes, 2.0 * rows * dim))
    return found


def attending(layer: Layer) -> list[Case]:
    """One decode step: over a whole document, over what was kept of it, and of a batch."""
    shape, n = layer.shape, layer.tokens
    whole = _attending(layer, "prefix_attention, 1 row, all kept", rows=1, documents=1, kept=n)

    def make_static() -> tuple[Tensor, ...]:
        cache = (shape.kv_heads, n + _SUFFIX, shape.head_dim)
        return tuple(layer.random(size) for size in ((shape.q_heads, 1, shape.head_dim), cache, cache))

    static = others.attention_of_full_cache
    return [
        whole,
        Case("attention over a static cache", make_static, static, whole.nbytes, whole.flops, whole.name),
        _attending(layer, "prefix_attention, 1 row, 1/8 kept", rows=1, documents=1, kept=layer.kept),
        _attending(layer, "prefix_attention, 16 documents", rows=_ROWS, documents=_ROWS, kept=layer.kept),
        _attending(layer, "prefix_attention, 16 rows, 1 document", rows=_ROWS, documents=1, kept=layer.kept),
    ]


def _attending(layer: Layer, name: str, *, rows: int, documents: int, kept: int) -> Case:
    shape = layer.shape
    share = rows // documents
    suffix = SuffixRows(lengths=(_SUFFIX,) * rows, first=tuple(range(rows)))
    layout = BatchLayout((share,) * documents, (suffix,), layer.device)

    def make() -> tuple[Any, ...]:
        lengths = (kept,) * shape.kv_heads
        entries = sum(lengths)
        prefixes = [[PackedPrefix(layer.packed(entries), layer.packed(entries), lengths)] for _ in range(documents)]
        size = (rows, shape.kv_heads, _SUFFIX, shape.head_dim)
        return (
            layer.random((rows, shape.q_heads, shape.head_dim)),
            prefixes,
            [(layer.random(size), layer.random(size))],
        )

    read = 2 * shape.kv_heads * (documents * kept + rows * _SUFFIX) * layer.row_bytes
    return Case(
        name,
        make,
        lambda queries, prefixes, suffixes: prefix_attention(queries, prefixes, suffixes, layout, layer.scale),
        read + 2 * rows * shape.q_heads * layer.row_bytes,
        4.0 * rows * shape.q_heads * (kept + _SUFFIX) * shape.head_dim,
    )


def _int4_bytes(layer: Layer, rows: int) -> float:
    """Rows of keys or values as codes, with a scale and a zero of two bytes a group."""
    return rows * layer.shape.head_dim * (BITS / 8 + 4 / GROUP)
