"""Base classes of selectors: which of a stored cache's entries a question reads.

A policy decides once, before any question; a selector decides for each question, and the stored cache does not change.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from kvshelf.artifact.records import PackedRecord
from kvshelf.kernels.choose import Units
from kvshelf.kernels.prefix_attention import PackedPrefix
from kvshelf.kernels.quantize import quantize
from kvshelf.kernels.quantize.rows import HeadRows
from kvshelf.methods.method import SELECTOR, Kind, Method, parameter
from kvshelf.methods.policies.base import Policy
from kvshelf.model.calibration import Chunks, Skews

LEAST_TOKENS = 128
"""The smallest default budget."""


@dataclass(frozen=True)
class Selector(Method):
    """Chooses entries of each layer for one question."""

    kind: ClassVar[Kind] = SELECTOR

    def policy_at(self, question_tokens: int) -> Policy | None:  # noqa: ARG002
        """The policy that chooses for a question of so many tokens; None for a `UnitSelector`."""
        return None

    def default_tokens(self, entries: int) -> int:
        """The default number of entries of a KV head that a question reads. entries: those of the head."""
        return max(LEAST_TOKENS, entries // 8)


@dataclass(frozen=True, eq=False)
class StoredLayer:
    """One layer of a cache. layer: its number in the model. records: those of `prefixes`, with the positions.
    num_tokens, sentence_ends: of the document, as in `CompressedCache`."""

    layer: int
    prefixes: tuple[PackedPrefix, ...]
    records: tuple[PackedRecord, ...]
    num_tokens: int
    sentence_ends: tuple[int, ...]

    @property
    def kv_heads(self) -> int:
        return len(self.prefixes[0].lengths)


@dataclass(frozen=True)
class UnitSelector(Selector):
    """Chooses units of consecutive entries, by products of a query and summaries: see `kernels.choose`. The tokens of
    the question read all entries.

    A selector that needs INDEX chooses by the cache's index (`Indexed`) and the query of a question's last token, for
    all heads of a layer together, and for the tokens of the question, too. Other rows are then not read from the shelf.
    One that needs SENTENCES chooses for a sentence of the answer, by the mean of its queries. One that needs EARLY
    chooses for a layer, but never for the first, by queries that the layer would make of the input of the layer before;
    its units are of guesses, by `basis` and `margin`.
    """

    cut: ClassVar[bool] = False
    """Whether the last unit is cut where the budget ends."""
    relu: ClassVar[float] = 0.0
    """The factor of the positive part of a query beside a unit's range."""

    @property
    def interval(self) -> int:
        """Tokens of the answer that read one choice."""
        return 1

    @property
    def layers_together(self) -> int:
        """Adjacent choosing layers that read one choice, that of the first of them."""
        return 1

    @property
    def each_token(self) -> bool:
        """Whether every token of the answer chooses anew, of a selector that needs INDEX or SENTENCES."""
        return False

    def calibrated(self, measured: Chunks) -> Self:  # noqa: ARG002
        """This selector with the model's frequency chunks, if it needs CHUNKS."""
        return self

    def skewed(self, measured: Skews) -> Self:  # noqa: ARG002
        """This selector with the skews of the model's query heads, if it needs SKEWS."""
        return self

    @property
    def fills(self) -> bool:
        """Whether it fills the budget. If not, it chooses even where the budget has room for all entries."""
        return True

    def basis(self, layer: int, kv_heads: int) -> Tensor | None:  # noqa: ARG002
        """The basis of guesses, `[kv_heads, group, D, V]` fp32: see `Choice`. None without guesses."""
        return None

    @property
    def margin(self) -> float:
        """How far the guess of a critical entry is below the largest, in logits."""
        return math.inf

    def scores(self, query: Tensor, summaries: Tensor) -> Tensor:
        """How well the units of an index fit a query `[kv_heads, group, D]` without its rotation, `[units]` fp32, for a
        selector that needs INDEX. summaries: of the index, `[units, W]`."""
        raise NotImplementedError

    @property
    def linear(self) -> float:
        """The factor of a query beside a unit's range."""
        return 0.0

    @property
    def group(self) -> Literal["max", "mean"]:
        """How the query heads of a KV head are joined."""
        return "max"

    def chooses(self, layer: int, num_layers: int) -> bool:  # noqa: ARG002
        """Whether it chooses in this layer, which is else read whole."""
        return True

    @abstractmethod
    def units(self, stored: StoredLayer) -> list[Units]:
        """The units of each prefix of a layer, made once for all questions; an index has units of one head."""

    def columns(self, layer: int) -> Tensor | None:  # noqa: ARG002
        """The channels of a query that belong to the columns of the summaries; see `Choice`."""
        return None


@dataclass(frozen=True)
class StepSelector(UnitSelector):
    """Chooses within the attention of the answer's tokens."""

    every: int = parameter(1, "tokens of the answer that read one choice, that of the first of them", minimum=1)
    over: str = parameter("max", "how the query heads of a KV head are joined", choices=("max", "mean"))

    @property
    def interval(self) -> int:
        return self.every

    @property
    def group(self) -> Literal["max", "mean"]:
        return "mean" if self.over == "mean" else "max"


def of_pages(prefix: PackedPrefix, page: int, *, exact: bool = False) -> Units:
    """Pages of `page` consecutive entries with bounds of each channel of their keys. The first page of a head, with the
    attention sinks, and the last, with the most recent tokens, are always read.

    The bounds are the zeros and scales that quantized keys have in such groups: the least value, rounded down, and the
    range over the largest code, rounded up. Keys that are quantized in groups of `page` have them already, and these
    tables are views. exact: the least value and the range in fp32, as the paper has them, for twice the bytes.
    """
    keys = prefix.keys
    views = not exact and not isinstance(keys, Tensor) and keys.axis == "tokens" and keys.group == page
    bounds = _extremes if exact else _rounded_bounds
    low, span, codes = (keys.zeros, keys.scales, 2**keys.bits - 1) if views else bounds(prefix, page)  # type: ignore[union-attr]
    counts = tuple(-(-length // page) for length in prefix.lengths)
    ends, forced = [], []
    for length, count in zip(prefix.lengths, counts, strict=True):
        ends.append(torch.arange(1, count + 1, dtype=torch.int32).mul_(page).clamp_max_(length))
        forced.append((ends[-1] <= page) | (ends[-1] == length))
    rows = torch.cat(ends).to(low.device), torch.cat(forced).to(low.device)
    return Units(low, span, *rows, counts, float(codes), views=views)


def of_entries(prefix: PackedPrefix, low: Tensor, always: int) -> Units:
    """A unit of each entry, with summaries `low` `[W, entries]` bf16. The first and last `always` of a head are
    read."""
    ends = torch.cat([torch.arange(1, length + 1, dtype=torch.int32) for length in prefix.lengths])
    last = torch.cat([torch.full((length,), length, dtype=torch.int32) for length in prefix.lengths])
    forced = (ends <= always) | (ends > last - always)
    return Units(low, None, ends.to(low.device), forced.to(low.device), prefix.lengths, by_column=True)


def blocks_of(keys: Tensor | HeadRows, length: int) -> Iterator[Tensor]:
    """The keys of a head in blocks of rows `[n, D]`, at least one: packed keys become readable block by block."""
    return (keys[start : min(length, start + _ROWS_AT_ONCE)] for start in range(0, max(1, length), _ROWS_AT_ONCE))


def _rounded_bounds(prefix: PackedPrefix, page: int) -> tuple[Tensor, Tensor, int]:
    """Zeros and scales `[pages, D]` bf16 of the keys in 8 bits, and the largest code."""
    quantized = [
        quantize(head[start : min(length, start + _PAGES_AT_ONCE * page)], 8, page, "tokens")
        for (head, _), length in zip(prefix.heads, prefix.lengths, strict=True)
        for start in range(0, length, _PAGES_AT_ONCE * page)
    ]
    empty = torch.empty(0, prefix.keys.shape[1], dtype=torch.bfloat16, device=prefix.keys.device)
    _, scales, zeros = zip(*quantized, strict=True) if quantized else ((), (empty,), (empty,))
    return torch.cat(zeros), torch.cat(scales), 255


def _extremes(prefix: PackedPrefix, page: int) -> tuple[Tensor, Tensor, int]:
    """The least value and the range of each channel of the pages, `[pages, D]` fp32, and the factor of the range."""
    pages = [
        head[start : min(length, start + page)].float()
        for (head, _), length in zip(prefix.heads, prefix.lengths, strict=True)
        for start in range(0, length, page)
    ]
    if not pages:
        empty = torch.empty(0, prefix.keys.shape[1], device=prefix.keys.device)
        return empty, empty, 1
    low = torch.stack([rows.amin(dim=0) for rows in pages])
    return low, torch.stack([rows.amax(dim=0) for rows in pages]) - low, 1


_PAGES_AT_ONCE = 64
_ROWS_AT_ONCE = 4096
"""Pages, and rows, whose keys are made readable at once."""
