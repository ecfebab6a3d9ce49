"""Attention over prefix and suffix separately, combined by log-sum-exp, with torch's own operations.

Quantized and streamed prefixes are made readable 1024 rows at a time: a long prefix never occupies memory at full size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvshelf.kernels.choose import choose
from kvshelf.kernels.prefix_attention.attend import (
    CPU_ATTENTION,
    attend,
    attention_weights,
    capped,
    combine,
    rows_per_block,
)
from kvshelf.kernels.prefix_attention.prefixes import (
    BatchLayout,
    LogitRules,
    MergedPrefix,
    PackedPrefix,
    Prefix,
    SelectedPrefix,
    StackedPrefix,
    StreamedPrefix,
    SuffixRows,
    additive,
    channels_of,
    choices_of,
    telling,
)
from kvshelf.kernels.quantize.rows import HeadRows

_ROWS_PER_BLOCK = 1024
"""Rows of a prefix made at once: keys and values are 512 KiB at D = 128 in bf16, and stay in the L2 cache."""

_QUERIES_PER_BLOCK = 512
"""Longer questions attend to their own suffix in blocks of rows, so that the causal mask stays small."""

_ROWS_OF_DOCUMENTS = 2048
"""Most rows of results at once where a question reads several documents."""

AttendShares = Callable[[Tensor, Sequence[Sequence[Prefix]], int, BatchLayout, LogitRules], tuple[Tensor, Tensor]]
"""`attend_shares` below, or another form of it."""


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor, rules: LogitRules) -> tuple[Tensor, Tensor]:
    batch, q_heads, tokens, dim = queries.shape
    if rules.plain:
        keys, values = (states.repeat_interleave(q_heads // keys.shape[1], dim=1) for states in (keys, values))
        out, lse = CPU_ATTENTION(queries, keys, values, 0.0, True, attn_mask=None, scale=rules.scale)
        return out, lse
    # By the other rules: as suffixes without a prefix.
    rows = SuffixRows((keys.shape[2],) * batch, tuple(range(0, batch * tokens, tokens)), tokens)
    layout = BatchLayout((batch * tokens,), (rows,), queries.device, (0,))
    grouped = queries.transpose(1, 2).reshape(batch * tokens, keys.shape[1], -1, dim)
    out, lse = with_sinks(*_attend_suffixes(grouped, [(keys, values)], layout, rules.within(layout)), rules)
    out = out.to(queries.dtype).reshape(batch, tokens, q_heads, -1).transpose(1, 2)
    return out, lse.reshape(batch, tokens, q_heads).transpose(1, 2).contiguous()


def with_sinks(out: Tensor, lse: Tensor, rules: LogitRules) -> tuple[Tensor, Tensor]:
    """Output `[N, kv_heads, group, Dv]` and log-sum-exps with the sinks' part of the mass."""
    if rules.sinks is None:
        return out, lse
    sinks = rules.sinks.view(lse.shape[1:])
    return out * torch.sigmoid(lse - sinks).unsqueeze(-1), torch.logaddexp(lse, sinks)


def attend_both(
    over_prefixes: AttendShares,
    queries: Tensor,
    prefixes: Sequence[Sequence[Prefix]],
    suffixes: Sequence[tuple[Tensor, Tensor]],
    layout: BatchLayout,
    rules: LogitRules,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exps `[N, q_heads]` of `kvshelf.kernels.prefix_attention.prefix_attention`; `over_prefixes`
    computes its first half."""
    rules = rules.within(layout)
    num_tokens, q_heads, dim = queries.shape
    kv_heads, value_dim = suffixes[0][1].shape[1], suffixes[0][1].shape[3]
    grouped = queries.reshape(num_tokens, kv_heads, -1, dim)  # [N, kv_heads, group, D]
    out, lse = _attend_suffixes(grouped, suffixes, layout, rules)
    if any(prefixes):
        out, lse = combine(*over_prefixes(grouped, prefixes, value_dim, layout, rules), out, lse)
    out, lse = with_sinks(out, lse, rules)
    return out.to(queries.dtype).reshape(num_tokens, q_heads, value_dim), lse.reshape(num_tokens, q_heads)


def attend_by_document(
    over_prefixes: AttendShares,
    queries: Tensor,
    documents: Sequence[Sequence[Prefix]],
    suffixes: Sequence[tuple[Tensor, Tensor]],
    layout: BatchLayout,
    rules: LogitRules,
) -> tuple[Tensor, Tensor]:
    """`kvshelf.kernels.prefix_attention.attention_by_document`. Each document is a share of the same tokens."""
    num_tokens, q_heads, dim = queries.shape
    kv_heads, value_dim = suffixes[0][1].shape[1], suffixes[0][1].shape[3]
    grouped = queries.reshape(num_tokens, kv_heads, -1, dim)  # [N, kv_heads, group, D]
    out, lse = _attend_suffixes(grouped, suffixes, layout, rules)
    lses: list[Tensor] = []
    at_once = max(1, _ROWS_OF_DOCUMENTS // num_tokens)
    for first in range(0, len(documents), at_once):
        some = documents[first : first + at_once]
        shares = BatchLayout((num_tokens,) * len(some), (), layout.device)
        outs, of_documents = over_prefixes(grouped.repeat(len(some), 1, 1, 1), some, value_dim, shares, rules)
        lses += torch.split(of_documents, num_tokens)
        for part, part_lse in zip(torch.split(outs, num_tokens), lses[first:], strict=True):
            out, lse = combine(out, lse, part, part_lse)
    out, lse = with_sinks(out, lse, rules)
    masses = torch.stack(lses).sub_(lse).exp_()  # [documents, N, kv_heads, group]
    return out.reshape(num_tokens, q_heads, value_dim), masses.flatten(2)


def attend_shares(
    queries: Tensor, prefixes: Sequence[Sequence[Prefix]], value_dim: int, layout: BatchLayout, rules: LogitRules
) -> tuple[Tensor, Tensor]:
    """Attention of each share's tokens over its prefixes: `[N, kv_heads, group, Dv]` and `[N, kv_heads, group]`.
    queries: `[N, kv_heads, group, D]`."""
    rows = torch.split(queries, list(layout.shares))
    results = [
        attend_share(tokens, parts, value_dim, rules.of(slice(end - len(tokens), end)))
        for tokens, parts, end in zip(rows, prefixes, layout.share_ends, strict=True)
    ]
    if len(results) == 1:
        return results[0]
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


def prefix_attention(
    queries: Tensor,
    prefixes: Sequence[Sequence[Prefix]],
    suffixes: Sequence[tuple[Tensor, Tensor]],
    layout: BatchLayout,
    rules: LogitRules,
    weights: Sequence[Tensor | None] = (),
) -> Tensor:
    out, lse = attend_both(attend_shares, queries, prefixes, suffixes, layout, rules)
    tell_weights(queries, prefixes, suffixes, layout, rules, lse, weights)
    return out


def tell_weights(
    queries: Tensor,
    prefixes: Sequence[Sequence[Prefix]],
    suffixes: Sequence[tuple[Tensor, Tensor]],
    layout: BatchLayout,
    rules: LogitRules,
    lse: Tensor,
    weights: Sequence[Tensor | None],
) -> None:
    """Fill the weights of the observed rows, and of the others beside them. lse: `[N, q_heads]`, of the whole
    attention."""
    for i, (into, rows, (keys, _)) in enumerate(zip(weights, layout.suffixes, suffixes, strict=False)):
        if into is not None:
            tokens, longest = layout.gathers[i], max(rows.lengths)
            of_rows, of_lse = (x if tokens is None else x.index_select(0, tokens) for x in (queries, lse))
            into[:, :, :longest] = attention_weights(of_rows, keys[:, :, :longest], of_lse, rules)
    if weights:
        tell_prefixes(queries, prefixes, layout, rules, lse)


def tell_prefixes(
    queries: Tensor, prefixes: Sequence[Sequence[Prefix]], layout: BatchLayout, rules: LogitRules, lse: Tensor
) -> None:
    """Fill the weights of the prefixes that take some. lse: `[N, q_heads]`, of the whole attention."""
    for parts, end in zip(prefixes, layout.share_ends, strict=True):
        for part in telling(parts):
            assert part.weights is not None
            assert part.stacked is not None, "as many in each head"
            token = slice(end - 1, end)
            (by_head,) = attention_weights(queries[token], part.stacked.keys[None], lse[token], rules)
            part.weights.of_token = by_head.view(len(part.lengths), -1, by_head.shape[1])


def attend_share(queries: Tensor, parts: Sequence[Prefix], value_dim: int, rules: LogitRules) -> tuple[Tensor, Tensor]:
    """`attend_shares` for the tokens of one share; `rules.since` is of these."""
    count, kv_heads, group, dim = queries.shape
    for choice in choices_of(parts):
        assert count == 1, "each token chooses for itself"
        choose(queries.view(kv_heads * group, dim), choice)
    if rules.since is not None:
        assert len(parts) < 2, "the last tokens of a document are one prefix"
        rules = replace(rules, since=rules.since.repeat_interleave(group))
    if count == 1:
        return _attend_all(queries, parts, value_dim, rules)
    # All tokens and query heads of a group read the same keys, and nothing is masked: one list of rows a head.
    rows = queries.transpose(0, 1).reshape(1, kv_heads, count * group, dim)
    out, lse = _attend_all(rows, parts, value_dim, rules)
    return (
        out.view(kv_heads, count, group, value_dim).transpose(0, 1),
        lse.view(kv_heads, count, group).transpose(0, 1),
    )


def _attend_all(rows: Tensor, parts: Sequence[Prefix], value_dim: int, rules: LogitRules) -> tuple[Tensor, Tensor]:
    """Attention of rows `[1, kv_heads, R, D]` over the union of prefixes."""
    if not parts:
        out = rows.new_zeros(*rows.shape[:3], value_dim)
        return out, out.new_full(rows.shape[:3], -torch.inf, dtype=torch.float32)
    out, lse = attend_prefix(rows, parts[0], rules)
    for part in parts[1:]:
        out, lse = combine(out, lse, *attend_prefix(rows, part, rules))
    return out, lse


def attend_prefix(rows: Tensor, prefix: Prefix, rules: LogitRules) -> tuple[Tensor, Tensor]:
    """Attention of rows `[1, kv_heads, R, D]` over one prefix alone: output `[1, kv_heads, R, Dv]`, in fp32 or in the
    dtype of the rows, and log-sum-exp `[1, kv_heads, R]` fp32, -inf (and 0) for a head without entries."""
    channels = channels_of(prefix)
    if channels is not None:
        rows = rows.gather(3, channels.long()[None, :, None].expand(1, -1, rows.shape[2], -1))  # [1, kv_heads, R, D']
    stacked = prefix.stacked if isinstance(prefix, PackedPrefix) else prefix
    if isinstance(stacked, StackedPrefix):
        keys, values = stacked.batched
        mask = None
        if rules.since is not None:
            before = torch.arange(-keys.shape[2], 0, device=keys.device) < rules.since.unsqueeze(1)  # [R, K]
            mask = additive(before)[None, None]
        return attend(rows, keys, values, rules, mask)
    assert rules.since is None, "the last tokens of a document are one plain prefix"
    match prefix:
        case PackedPrefix(lengths=lengths):
            heads = [_attend_packed(rows[0, h], *head, lengths[h], rules) for h, head in enumerate(prefix.heads)]
        case StreamedPrefix(lengths=lengths):
            blocks = [partial(prefix.block, h) for h in range(len(lengths))]
            heads = [_attend_blocks(rows[0, h], block, lengths[h], rules) for h, block in enumerate(blocks)]
        case SelectedPrefix():
            heads = [_attend_head(rows[0, h], *prefix.head(h), rules) for h in range(len(prefix.lengths))]
        case MergedPrefix():
            heads = [_attend_merged(rows[0, h], *head, rules) for h, head in enumerate(prefix.heads)]
    return torch.stack([out.float() for out, _ in heads]).unsqueeze(0), torch.stack([lse for _, lse in heads])[None]


def _attend_packed(
    rows: Tensor, keys: Tensor | HeadRows, values: Tensor | HeadRows, length: int, rules: LogitRules
) -> tuple[Tensor, Tensor]:
    if isinstance(keys, Tensor) and isinstance(values, Tensor):
        return _attend_head(rows, keys, values, rules)
    return _attend_blocks(rows, lambda start, stop: (keys[start:stop], values[start:stop]), length, rules)


def _attend_blocks(
    rows: Tensor, block: Callable[[int, int], tuple[Tensor, Tensor]], length: int, rules: LogitRules
) -> tuple[Tensor, Tensor]:
    """The `length` keys and values of a head that `block(start, stop)` makes readable."""
    out, lse = _attend_head(rows, *block(0, min(_ROWS_PER_BLOCK, length)), rules)
    for start in range(_ROWS_PER_BLOCK, length, _ROWS_PER_BLOCK):
        more = block(start, min(start + _ROWS_PER_BLOCK, length))
        out, lse = combine(out, lse, *_attend_head(rows, *more, rules))
    return out, lse


def _attend_merged(
    rows: Tensor, keys: Tensor | HeadRows, values: Tensor | HeadRows, scales: Tensor, classes: Tensor, rules: LogitRules
) -> tuple[Tensor, Tensor]:
    """All classes of the head at once, for they are few; the queries in blocks of rows."""
    keys_t, values = keys[:].float().T, values[:].float()
    outs, lses = [], []
    for block in torch.split(rows, rows_per_block(scales.shape[0])):
        logits = torch.matmul(block.float() * rules.scale, keys_t)  # [rows, classes]
        slots = capped(logits.index_select(1, classes).mul_(scales), rules)  # [rows, slots]
        lse = slots.logsumexp(dim=-1)
        mass = torch.zeros_like(logits).index_add_(1, classes, slots.sub_(lse.unsqueeze(-1)).exp_())
        outs.append(torch.matmul(mass, values))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _attend_head(rows: Tensor, keys: Tensor, values: Tensor, rules: LogitRules) -> tuple[Tensor, Tensor]:
    """`attend` for one head: rows `[R, D]`, keys `[K, D]`, values `[K, Dv]`."""
    out, lse = attend(rows[None, None], keys[None, None], values[None, None], rules)
    return out[0, 0], lse[0, 0]


def _attend_suffixes(
    queries: Tensor, suffixes: Sequence[tuple[Tensor, Tensor]], layout: BatchLayout, rules: LogitRules
) -> tuple[Tensor, Tensor]:
    """Attention of each token over the suffix of its row up to itself, in the order of the batch."""
    outs, lses = [], []
    for i, (rows, (keys, values)) in enumerate(zip(layout.suffixes, suffixes, strict=True)):
        gather = layout.gathers[i]
        tokens = queries if gather is None else queries.index_select(0, gather)
        longest = max(rows.lengths)
        keys, values = keys[:, :, :longest], values[:, :, :longest]
        of_rows = rules
        if rules.since is not None:
            since = rules.since if gather is None else rules.since.index_select(0, gather)
            of_rows = replace(rules, since=since.view(len(rows.first), rows.new))
        if rows.new == 1 and rows.hidden is None:
            mask = layout.length_masks[i]
            if of_rows.since is not None:
                before = additive(torch.arange(longest, device=keys.device) < of_rows.since)[:, None, None]
                mask = before if mask is None else before + mask
            out, lse = attend(tokens, keys, values, of_rows, mask)
        else:
            out, lse = _attend_causal(tokens, keys, values, rows, of_rows)
        outs.append(out)
        lses.append(lse)
    out, lse = (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs), torch.cat(lses))
    if layout.scatter is not None:
        out, lse = out.index_select(0, layout.scatter), lse.index_select(0, layout.scatter)
    return out, lse


def _attend_causal(
    queries: Tensor, keys: Tensor, values: Tensor, rows: SuffixRows, rules: LogitRules
) -> tuple[Tensor, Tensor]:
    """Rows of equal length with several new tokens each: token t sees the first length - new + t + 1 of its row.

    queries: `[rows * new, kv_heads, group, D]`. The query heads of a group fold into the rows of one product.
    """
    _, kv_heads, group, dim = queries.shape
    num_rows, new = len(rows.first), rows.new
    visible = rows.lengths[0] - new
    by_row = queries.view(num_rows, new, kv_heads, group, dim)
    by_head = by_row.permute(0, 2, 3, 1, 4)  # [rows, kv_heads, group, new, D]
    outs, lses, done = [], [], 0
    # Where tokens are hidden, the mask is another one in each head.
    most = rows_per_block(num_rows * kv_heads * group * rows.lengths[0]) if rows.hidden is not None else new
    for block in torch.split(by_head, min(_QUERIES_PER_BLOCK, most), dim=3):
        count = block.shape[3]
        visible += count
        future = torch.ones(count, visible, dtype=torch.bool, device=keys.device).triu_(visible - count + 1)
        hidden = future[None, None]
        if rules.since is not None:
            since = rules.since[:, None, done : done + count, None]
            hidden = hidden | (torch.arange(visible, device=keys.device) < since)
        if rows.hidden is not None:
            before = torch.ones_like(future).tril_(visible - count - 1)
            hidden = hidden | (rows.hidden[:, :, None, :visible] & before)
        mask = additive(hidden).repeat(1, 1, group, 1)
        flat = block.reshape(num_rows, kv_heads, group * count, dim)
        out, lse = attend(flat, keys[:, :, :visible], values[:, :, :visible], rules, mask)
        done += count
        outs.append(out.view(num_rows, kv_heads, group, count, -1))
        lses.append(lse.view(num_rows, kv_heads, group, count))
    out, lse = torch.cat(outs, dim=3), torch.cat(lses, dim=3)
    return out.permute(0, 3, 1, 2, 4).flatten(0, 1), lse.permute(0, 3, 1, 2).flatten(0, 1)
