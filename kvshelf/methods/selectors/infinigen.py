"""InfiniGen: the entries that a guess of the next layer's query finds (Lee et al., 2024, arXiv 2406.19707)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvshelf.kernels.choose import Units
from kvshelf.kernels.prefix_attention import PackedPrefix
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.selectors.base import LEAST_TOKENS, StoredLayer, UnitSelector, blocks_of, of_entries
from kvshelf.model.calibration import Skews


@dataclass(frozen=True)
class InfiniGen(UnitSelector):
    """Read the entries that fit the query which a layer would make of the input of the layer before, by a part of its
    channels; every answer token chooses anew.

    The paper keeps the cache in the CPU's memory, and guesses so that a layer's entries are fetched while the one
    before runs. `kvshelf calibrate` finds each query head's skew A, the right singular vectors of its queries over a
    text, in the order of the sums of |Q A| and |K A|. With x, the input of the attention of layer l - 1, and the first
    columns A' of A, the share `channels`, the guess of a logit of layer l is

        g_j = (W_q x A') . (k_j A') * scaling,

    with the rotation of its position. Entries with g_j >= max_j g_j - `alpha` are critical. Every head of a layer
    reads as many, the mean number of critical ones over its heads, those of greatest g_j, and at most a fifth of the
    cache by default. The first two layers read all: outliers emerge in the first, so guesses begin with the input of
    the second. The parts k_j A' are held in bf16 beside the cache, 2 * `channels` * D bytes for each token and query
    head, once for all questions.

    Departures: a KV head reads what any of its query heads finds critical, by the greatest g_j - max_j g_j (the paper
    has no GQA). A' is chosen over the calibration's text, as in the authors' code for Llama, not over each prompt.
    Question and answer are always read whole, and max_j is over the documents. Nothing is fetched.
    """

    name: ClassVar[str] = "infinigen"
    source: ClassVar[str] = "InfiniGen, arXiv 2406.19707"
    advice: ClassVar[str] = "to compare; `fasa` chooses by the layer's own query, for less memory."

    needs: ClassVar[Needs] = Needs.SKEWS | Needs.EARLY

    alpha: float | None = parameter(
        5.0, "how far the guess of a logit may be below the largest; null: as far as there is room", minimum=0
    )
    channels: float = parameter(0.3, "share of each head's channels that are compared", minimum=0, maximum=1)
    digest: str = ""
    measured: Skews | None = field(default=None, compare=False, repr=False)

    def skewed(self, measured: Skews) -> Self:
        return replace(self, measured=measured, digest=measured.digest)

    @property
    def fills(self) -> bool:
        return self.alpha is None

    def default_tokens(self, entries: int) -> int:
        return max(LEAST_TOKENS, entries // 5)

    def chooses(self, layer: int, num_layers: int) -> bool:  # noqa: ARG002
        return layer > 1

    def units(self, stored: StoredLayer) -> list[Units]:
        basis = self.basis(stored.layer, stored.kv_heads)
        return [_partial(prefix, basis.to(prefix.keys.device)) for prefix in stored.prefixes]

    @property
    def margin(self) -> float:
        return math.inf if self.alpha is None else self.alpha

    def basis(self, layer: int, kv_heads: int) -> Tensor:
        assert self.measured is not None
        skews = self.measured.layers[layer]
        q_heads, size, _ = skews.shape
        width = max(1, int(self.channels * size))
        return skews[:, :, :width].float().contiguous().view(kv_heads, q_heads // kv_heads, size, width)


def _partial(prefix: PackedPrefix, basis: Tensor) -> Units:
    """A unit of each entry, with its key's parts of all query heads of its KV head."""
    parts = [
        torch.einsum("nd,gdw->gwn", block.float(), of_head).flatten(0, 1).bfloat16()
        for (keys, _), of_head, length in zip(prefix.heads, basis, prefix.lengths, strict=True)
        for block in blocks_of(keys, length)
    ]
    return of_entries(prefix, torch.cat(parts, dim=1), always=0)
