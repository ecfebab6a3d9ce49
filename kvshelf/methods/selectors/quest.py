"""Quest: the pages whose keys can have the largest products with the query (Tang et al., 2024, arXiv 2406.10774)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvshelf.kernels.choose import Units
from kvshelf.kernels.prefix_attention import PackedPrefix
from kvshelf.methods.method import parameter
from kvshelf.methods.selectors.base import StepSelector, StoredLayer, of_pages

PLAIN_PAGE = 16


@dataclass(frozen=True)
class Quest(StepSelector):
    """Read the pages of which some key may fit the query best, by an upper bound from each channel's least and largest
    value; every answer token chooses anew.

    Section 3.2 of the paper: sum_c max(q_c * min_c, q_c * max_c) bounds q . k for every key of a page. Pages have 16
    entries; of a quantized cache, as many as share a scale (32), whose zeros and scales are these bounds: a free index.

    Departures: bounds are rounded outward to bfloat16, unless `bounds` is "exact". The paper chooses for each query
    head and has no GQA; here a KV head reads the pages with the largest bound of any of its query heads (`over`), as
    the kernels choose rows of KV heads. The first two of 32 layers are read whole in the paper; here a sixteenth of the
    layers, rounded down (`dense_layers`). The first and the last page of each head are always read.
    """

    name: ClassVar[str] = "quest"
    source: ClassVar[str] = "Quest, arXiv 2406.10774"
    advice: ClassVar[str] = "over int4 or int8, where its index is free."
    relu: ClassVar[float] = 1.0

    page: int | None = parameter(None, "entries of a page; null: 16, or those that share a scale", minimum=1)
    dense_layers: int | None = parameter(None, "first layers read whole; null: a sixteenth of all", minimum=0)
    bounds: str = parameter(
        "rounded",
        "rounded: outward, to bfloat16; exact: in fp32, for twice the bytes",
        choices=("rounded", "exact"),
        added=True,
    )

    def chooses(self, layer: int, num_layers: int) -> bool:
        return layer >= (num_layers // 16 if self.dense_layers is None else self.dense_layers)

    def units(self, stored: StoredLayer) -> list[Units]:
        return [of_pages(prefix, self._page(prefix), exact=self.bounds == "exact") for prefix in stored.prefixes]

    def _page(self, prefix: PackedPrefix) -> int:
        quantized = not isinstance(prefix.keys, Tensor)
        return self.page or (prefix.keys.group if quantized else PLAIN_PAGE)  # type: ignore[union-attr]
