"""The prefixes of one layer, which tokens of a batch attend to before their own suffix, and the layout of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from kvshelf.kernels.choose import Choice, Chosen
from kvshelf.kernels.quantize.rows import HeadRows, Rows, by_head
from kvshelf.kernels.transfer import upload

Block = Callable[[int, int, int], tuple[Tensor, Tensor]]
"""`block(head, start, stop)` makes the keys `[stop - start, D]` and values `[stop - start, Dv]` of these rows of a KV
head, in the dtype and on the device of the queries. It is called at every attention; its results are not kept."""


@dataclass(eq=False)
class PrefixWeights:
    """`of_token`: the weights that the one token of a share gave to each of the K entries of a prefix that no other
    share has, `[kv_heads, group, K]` fp32, of the last attention that filled them."""

    of_token: Tensor | None = None


@dataclass(frozen=True, eq=False)
class PackedPrefix:
    """Entries packed by KV head: keys `[entries, D]`, values `[entries, Dv]`, head h owning `lengths[h]` rows.

    Plain tensors are read in place, in the dtype of the queries; quantized rows are dequantized where they are used.
    channels: where keys are pruned to D' of the D channels of a query, the channels of each head, `[kv_heads, D']`
    int32; the scale of logits stays that of D channels. weights: of plain entries, equally many a head, to be filled by
    attentions that give weights. Bytes: every key and value once per share, whatever the number of queries. FLOPs: 2 *
    R * K * (D + Dv) for R queries of a KV head with K entries.
    """

    keys: Rows
    values: Rows
    lengths: tuple[int, ...]
    channels: Tensor | None = None
    weights: PrefixWeights | None = None

    @cached_property
    def heads(self) -> list[tuple[Tensor | HeadRows, Tensor | HeadRows]]:
        """Keys and values of each head, as views."""
        return list(zip(by_head(self.keys, self.lengths), by_head(self.values, self.lengths), strict=True))

    @cached_property
    def stacked(self) -> StackedPrefix | None:
        """The same entries as stacked views; None unless they are plain and every head has equally many."""
        if not isinstance(self.keys, Tensor) or not isinstance(self.values, Tensor) or len(set(self.lengths)) > 1:
            return None
        shape = (len(self.lengths), self.lengths[0])
        return StackedPrefix(self.keys.view(*shape, self.keys.shape[1]), self.values.view(*shape, self.values.shape[1]))


@dataclass(frozen=True, eq=False)
class StackedPrefix:
    """Plain entries, equally many a head: keys `[kv_heads, K, D]`, values `[kv_heads, K, Dv]`, views of any stride with
    a contiguous last dimension. The document of a probe pass, or the entries that a chunked prefill has kept so far."""

    keys: Tensor
    values: Tensor

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each head."""
        return (self.keys.shape[1],) * self.keys.shape[0]

    @cached_property
    def batched(self) -> tuple[Tensor, Tensor]:
        """Keys `[1, kv_heads, K, D]` and values, made once: a decode step reads hundreds of prefixes."""
        return self.keys.unsqueeze(0), self.values.unsqueeze(0)


@dataclass(frozen=True, eq=False)
class StreamedPrefix:
    """Rows that exist only while they are read: keys that are still to be rotated. `lengths[h]` rows of head h.

    Bytes: what `block` reads, plus each block written and read once in cache. FLOPs: those of a `PackedPrefix` and
    those of `block`, which do not depend on R. On every device `block` is made of torch's operations.
    """

    lengths: tuple[int, ...]
    block: Block


@dataclass(frozen=True, eq=False)
class MergedPrefix:
    """Tokens (slots) that share the key direction and the value of a class.

    Slot i stands for a token with key `slot_scales[i] * keys[c]` and value `values[c]`, c = `slot_classes[i]`, counted
    within its head:

        logit_i = slot_scales[i] * (scale * q . keys[c]),  mass_c = sum of softmax(logit)_i over the slots of c,
        out = mass @ values.

    This is exact, and nothing of size slots x D is made: the keys are multiplied once per class. keys: `[classes, D]`,
    values: `[classes, Dv]`, head h owning `lengths[h]` classes; slot_scales: `[slots]` fp32 and slot_classes: `[slots]`
    int32, head h owning `slot_lengths[h]` slots. A class without a slot has no mass.
    Bytes: each class once, slots * 8, and on the CPU 3 passes over R * slots fp32 logits. FLOPs: 2 * R * classes * (D +
    Dv) + about 5 * R * slots.
    """

    keys: Rows
    values: Rows
    lengths: tuple[int, ...]
    slot_scales: Tensor
    slot_classes: Tensor
    slot_lengths: tuple[int, ...]

    @cached_property
    def heads(self) -> list[tuple[Tensor | HeadRows, Tensor | HeadRows, Tensor, Tensor]]:
        """Keys, values, slot scales and slot classes (int64) of each head; views but for the classes."""
        slots = list(self.slot_lengths)
        return list(
            zip(
                by_head(self.keys, self.lengths),
                by_head(self.values, self.lengths),
                torch.split(self.slot_scales, slots),
                torch.split(self.slot_classes.long(), slots),
                strict=True,
            )
        )


@dataclass(frozen=True, eq=False)
class SelectedPrefix:
    """Some rows of a packed prefix, read in place: those in `chosen` when the attention runs.

    choice: where given, the attention first chooses by its query, which overwrites `chosen`; several prefixes of a
    share may have one choice. Such a share has one token. Bytes: what is chosen, and the summaries of the choice once.
    """

    base: PackedPrefix
    chosen: Chosen
    choice: Choice | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Most rows of each head."""
        most = self.chosen.rows.shape[1]
        return tuple(min(most, length) for length in self.base.lengths)

    def head(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the chosen rows of a head, dequantized. Waits for the device."""
        keys, values = self.base.heads[index]
        rows = self.chosen.rows[index, : int(self.chosen.counts[index])].long()
        return keys[rows], values[rows]


Prefix = PackedPrefix | StackedPrefix | StreamedPrefix | MergedPrefix | SelectedPrefix


def channels_of(prefix: Prefix) -> Tensor | None:
    """The query channels that the keys of a prefix have; None: all."""
    base = prefix.base if isinstance(prefix, SelectedPrefix) else prefix
    return base.channels if isinstance(base, PackedPrefix) else None


def telling(prefixes: Sequence[Prefix]) -> list[PackedPrefix]:
    """The prefixes whose weights an attention fills."""
    return [prefix for prefix in prefixes if isinstance(prefix, PackedPrefix) and prefix.weights is not None]


def choices_of(prefixes: Sequence[Prefix]) -> list[Choice]:
    """The choices that attention over these prefixes has to make first, each once."""
    choices = {id(p.choice): p.choice for p in prefixes if isinstance(p, SelectedPrefix) and p.choice is not None}
    return list(choices.values())


def additive(hidden: Tensor) -> Tensor:
    """The mask that hides keys: -inf where `hidden` and 0 elsewhere, fp32."""
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)


@dataclass(frozen=True, eq=False)
class LogitRules:
    """How products of queries and keys become the logits of the softmax.

    scale: factor of all. softcap: they become softcap * tanh(logit / softcap) (Gemma 2, arXiv 2408.00118, section 2);
    0: they do not. sinks: `[q_heads]` fp32, a logit of each query head that takes part of the mass and gives no value
    (gpt-oss). window: a token sees the last `window` tokens, itself included; None: all. chunk: a token at position p
    sees those from position p // chunk * chunk on (Llama 4); None: all. With either, a document has one plain prefix of
    its last tokens, equally many in every head.

    since: `window` or `chunk` for the tokens of a batch, as kernels take them: see `BatchLayout.since`.
    """

    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    window: int | None = None
    chunk: int | None = None
    since: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether there is no rule beside the scale."""
        return not self.softcap and self.sinks is None and self.see_all

    @property
    def see_all(self) -> bool:
        """Whether a token sees all before it."""
        return self.window is None and self.chunk is None

    def within(self, layout: BatchLayout) -> LogitRules:
        """The rules for the tokens of a batch."""
        return self if self.see_all else replace(self, since=layout.since(self.window, self.chunk))

    def of(self, tokens: slice) -> LogitRules:
        """The rules of some tokens of the batch."""
        return self if self.since is None else replace(self, since=self.since[tokens])


@dataclass(frozen=True, eq=False)
class SuffixRows:
    """Rows of a batch whose private suffixes lie in one pair of tensors `[rows, kv_heads, capacity, D]`.

    Row r has `lengths[r]` suffix tokens, the last `new` of which are in the batch: tokens `first[r]` to `first[r] +
    new`. A row that takes no part has first -1: its place in the tensors is not read. With `new` above 1 all lengths
    are equal. observed: the rows whose weights the attention fills, each with one new token; empty: none. hidden: the
    suffix tokens that no later token sees, `[rows, kv_heads, capacity]` bool; None: none. All lengths are equal then,
    no row is observed, and torch's operations compute the attention on every device.
    """

    lengths: tuple[int, ...]
    first: tuple[int, ...]
    new: int = 1
    observed: tuple[bool, ...] = ()
    hidden: Tensor | None = None


@dataclass(frozen=True, eq=False)
class BatchLayout:
    """Which tokens of a flat batch belong together; made once per forward pass and shared by all its layers.

    shares: consecutive tokens that see the same prefix, as counts that add up to N, the tokens of the batch. suffixes:
    every token is a new token of exactly one row. starts: the position of each share at which its suffixes begin; only
    chunks need it.
    """

    shares: tuple[int, ...]
    suffixes: tuple[SuffixRows, ...]
    device: torch.device
    starts: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(self.shares)

    @cached_property
    def share_ends(self) -> list[int]:
        return list(accumulate(self.shares))

    @cached_property
    def sights(self) -> dict[tuple[int | None, int | None], Tensor]:
        """The results of `since`, by window and chunk."""
        return {}

    def since(self, window: int | None, chunk: int | None) -> Tensor:
        """The first token that each token of the batch sees, `[N]` int32, counted from the first of its suffix; below
        0 it is one of the document's, whose last is -1. The same tensor at each call."""
        since = self.sights.get((window, chunk))
        if since is None:
            if window is not None:
                begins = self._places - window + 1
            else:
                assert chunk is not None
                assert len(self.starts) == len(self.shares), "chunks are counted from the document's first token"
                starts = torch.tensor(self.starts, dtype=torch.int32).repeat_interleave(torch.tensor(self.shares))
                begins = (self._places + starts) // chunk * chunk - starts
            since = self.sights[window, chunk] = begins.to(self.device)
        return since

    @cached_property
    def _places(self) -> Tensor:
        """Where each token of the batch stands in its suffix, `[N]` int32 on the CPU."""
        places = [0] * self.num_tokens
        for rows in self.suffixes:
            for first, length in zip(rows.first, rows.lengths, strict=True):
                if first >= 0:
                    places[first : first + rows.new] = range(length - rows.new, length)
        return torch.tensor(places, dtype=torch.int32)

    @cached_property
    def gathers(self) -> list[Tensor | None]:
        """For each of `suffixes`, the batch token of every row and new token, `[rows * new]`; None if it is simply the
        whole batch in order. Rows that take no part borrow token 0; their results are dropped."""
        gathers: list[Tensor | None] = []
        for rows in self.suffixes:
            tokens = [max(first, 0) + t for first in rows.first for t in range(rows.new)]
            in_order = tokens == list(range(self.num_tokens)) and min(rows.first) >= 0
            gathers.append(None if in_order else torch.tensor(tokens, device=self.device))
        return gathers

    @cached_property
    def scatter(self) -> Tensor | None:
        """Where each token of the batch stands among the gathered tokens of all suffixes, `[N]`; None if in order."""
        places = [0] * self.num_tokens
        start = 0
        for rows in self.suffixes:
            for r, first in enumerate(rows.first):
                for t in range(rows.new if first >= 0 else 0):
                    places[first + t] = start + r * rows.new + t
            start += len(rows.first) * rows.new
        if start == self.num_tokens and places == list(range(start)):
            return None
        return torch.tensor(places, device=self.device)

    @cached_property
    def tables(self) -> tuple[Tensor, list[Tensor]]:
        """For kernels, int32, in one copy to the device: each token's share, place in the share and the share's token
        count, `[N, 3]`; and for each of `suffixes` the first token and the length of each row, `[rows, 2]`."""
        sizes = torch.tensor(self.shares, dtype=torch.int32)
        share = torch.arange(len(self.shares)).repeat_interleave(sizes)
        starts = torch.tensor(self.share_ends, dtype=torch.int32) - sizes
        places = torch.arange(self.num_tokens) - starts[share]
        of_tokens = torch.stack([share, places, sizes[share]], dim=1).int()
        of_rows = [torch.tensor((rows.first, rows.lengths), dtype=torch.int32).T for rows in self.suffixes]
        tokens, *rows_of = upload([of_tokens, *of_rows], self.device)
        return tokens, rows_of

    @cached_property
    def observed(self) -> list[Tensor | None]:
        """For each of `suffixes`, its observed rows, `[rows]` int32 on the CPU; None if there are none."""
        observed = [rows.observed for rows in self.suffixes]
        return [torch.tensor(rows, dtype=torch.int32) if any(rows) else None for rows in observed]

    @cached_property
    def length_masks(self) -> list[Tensor | None]:
        """For each of `suffixes` with one new token per row: 0 where a row has a token and -inf beyond, `[rows, 1, 1,
        longest]` fp32; None if all are equally long."""
        masks: list[Tensor | None] = []
        for rows in self.suffixes:
            if len(set(rows.lengths)) == 1:
                masks.append(None)
                continue
            lengths = torch.tensor(rows.lengths, device=self.device).clamp_min(1)  # an empty row would give NaN
            beyond = torch.arange(max(rows.lengths), device=self.device) >= lengths.unsqueeze(1)
            masks.append(additive(beyond)[:, None, None])
        return masks
