"""Attention of a flat batch of tokens over read-only, shared, possibly ragged prefixes, and over each row's own suffix.

    out_t = softmax(scale * q_t [prefix_keys; suffix_keys_<=t]^T) [prefix_values; suffix_values_<=t]

and by the other rules of `LogitRules`. It is computed over each of the two parts separately and combined by
log-sum-exp, so that prefixes are read in place: nothing is padded, copied or repeated.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvshelf.kernels.checks import require, require_states
from kvshelf.kernels.dispatch import implementation
from kvshelf.kernels.prefix_attention import eager
from kvshelf.kernels.prefix_attention.native import Scratch, attention_part
from kvshelf.kernels.prefix_attention.prefixes import (
    BatchLayout,
    LogitRules,
    MergedPrefix,
    PackedPrefix,
    Prefix,
    PrefixWeights,
    SelectedPrefix,
    StackedPrefix,
    StreamedPrefix,
    SuffixRows,
    channels_of,
)

__all__ = [
    "BatchLayout",
    "LogitRules",
    "MergedPrefix",
    "PackedPrefix",
    "Prefix",
    "PrefixWeights",
    "Scratch",
    "SelectedPrefix",
    "StackedPrefix",
    "StreamedPrefix",
    "SuffixRows",
    "attention_by_document",
    "attention_part",
    "causal_attention",
    "channels_of",
    "prefix_attention",
]


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor, rules: LogitRules) -> tuple[Tensor, Tensor]:
    """Causal attention of a whole document, on a CPU, and its log-sum-exps.

    queries: `[B, q_heads, T, D]`, keys and values `[B, kv_heads, T, D]`, as torch's flash attention takes them; with
    rules beside the scale on any device, and then there may be more keys before those of the queries. Returns
    `[B, q_heads, T, D]` and the log-sum-exps of the scaled logits, `[B, q_heads, T]` fp32. FLOPs: 2 * B * q_heads * T^2
    * D. Share of the limit on an EPYC with AVX-512 in fp32, one thread, D = 64: 0.87; of torch's own 0.64 to 0.66.
    """
    form = implementation("prefix_attention", queries.device)
    attend = getattr(form, "causal_attention", eager.causal_attention)  # two forms are for prefixes alone
    results: tuple[Tensor, Tensor] = attend(queries, keys, values, rules)
    return results


def attention_by_document(
    queries: Tensor,
    documents: Sequence[Sequence[Prefix]],
    suffixes: Sequence[tuple[Tensor, Tensor]],
    layout: BatchLayout,
    rules: LogitRules,
) -> tuple[Tensor, Tensor]:
    """Attention of tokens that all see several documents, and each document's share of it.

    queries: `[N, q_heads, D]`. documents: the prefixes of each, all visible to every token: the rules have no window
    and no chunk. suffixes and layout as in `prefix_attention`. Returns the output `[N, q_heads, Dv]` in the dtype of
    the queries and masses `[documents, N, q_heads]` fp32, which add up to 1 with those of suffix and sinks.

    Bytes and FLOPs are those of `prefix_attention`, and N * q_heads * Dv numbers written for each document. On a GPU
    torch's operations compute it.
    """
    form = implementation("prefix_attention", queries.device)
    over_prefixes = getattr(form, "attend_shares", eager.attend_shares)  # two forms give no log-sum-exps
    out, masses = eager.attend_by_document(over_prefixes, queries, documents, suffixes, layout, rules)
    return out.to(queries.dtype), masses


def prefix_attention(
    queries: Tensor,
    prefixes: Sequence[Sequence[Prefix]],
    suffixes: Sequence[tuple[Tensor, Tensor]],
    layout: BatchLayout,
    rules: LogitRules,
    weights: Sequence[Tensor | None] = (),
) -> Tensor:
    """Attention of every token of a batch over the prefixes of its share and the suffix of its row.

    queries: `[N, q_heads, D]`, the new tokens of all rows. layout: which tokens share what. prefixes: for each of
    `layout.shares` the prefixes of its document at this layer; their tokens are disjoint, and all visible to every
    token of the share. A share may have no prefix or an empty one, and a head no entries. suffixes: for each of
    `layout.suffixes` keys `[rows, kv_heads, capacity, D]` and values `[rows, kv_heads, capacity, Dv]`, new tokens
    included; new token t of a row sees the row's first length - new + t + 1 tokens. Memory beyond a row's length is not
    attended to, but must be finite. Query head h reads KV head h // (q_heads // kv_heads). Returns `[N, q_heads, Dv]`
    in the dtype of the queries; logits and sums in fp32. Raises `InvalidTensor` for other shapes.

    weights: where given, for each of `layout.suffixes` `[rows, q_heads, capacity]` fp32, or None. There the `observed`
    rows get the weights that their new token gave to each token of their suffix, of its attention to prefixes, suffix
    and sinks together. A prefix with `weights` gets those that the one token of its share gave to its entries. Nobody
    reads the other rows. The rules have no window and no chunk then.

    Bytes: every prefix once per share, whatever the number of its tokens, every suffix once. FLOPs: 2 * N * q_heads *
    (K + S) * (D + Dv) for plain prefixes; `prefixes.py` says what the other kinds cost. Share of the limit on a GPU:
    not measured. On the CPU a decode step reads plain prefixes as fast as a sum over them does; torch's own operations
    reach half that rate. A quantized prefix takes 1 to 1.5 times as long as a plain one; with torch's, 4 to 7 times.
    """
    keys, values = suffixes[0]
    states = {"queries": queries, "keys": keys, "values": values}
    require_states("prefix_attention", {"queries": 3, "keys": 4, "values": 4}, **states)
    require(
        queries.shape[0] == layout.num_tokens
        and queries.shape[1] % keys.shape[1] == 0
        and queries.shape[2] == keys.shape[3]
        and len(prefixes) == len(layout.shares)
        and len(suffixes) == len(layout.suffixes)
        and all(k.shape[0] == len(rows.first) for rows, (k, _) in zip(layout.suffixes, suffixes, strict=True))
        and all(k.shape[2] >= max(rows.lengths) for rows, (k, _) in zip(layout.suffixes, suffixes, strict=True))
        and all(
            into is None or into.shape == (k.shape[0], queries.shape[1], k.shape[2])
            for into, (k, _) in zip(weights, suffixes, strict=False)
        ),
        "prefix_attention",
        f"queries must be [N, q_heads, D] and suffixes [rows, kv_heads, capacity, D] of a batch of {layout.num_tokens} "
        f"tokens in {len(layout.shares)} shares and {len(layout.suffixes)} suffixes",
        **states,
    )
    pairs = zip(layout.suffixes, suffixes, strict=True)
    hiding = [(rows, rows.hidden.shape, k.shape[:3]) for rows, (k, _) in pairs if rows.hidden is not None]
    require(
        all(shape == size and len(set(rows.lengths)) == 1 and not any(rows.observed) for rows, shape, size in hiding),
        "prefix_attention",
        "hidden tokens must be [rows, kv_heads, capacity], of rows of one length of which none asks for its weights",
        **states,
    )
    form = eager if hiding else implementation("prefix_attention", queries.device)
    out: Tensor = form.prefix_attention(queries, prefixes, suffixes, layout, rules, weights=weights)
    return out.to(queries.dtype)
