"""FASA: the tokens that the query's best frequency chunks name (frequency-aware sparse attention)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvshelf.kernels.choose import Units
from kvshelf.kernels.prefix_attention import PackedPrefix
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.selectors.base import StepSelector, StoredLayer, blocks_of, of_entries
from kvshelf.model.calibration import Chunks


@dataclass(frozen=True)
class Fasa(StepSelector):
    """Read the tokens of greatest product over a few frequency chunks of each head; every answer token chooses anew.

    A chunk is the channels c and c + D / 2, which RoPE turns together. `kvshelf calibrate` measures how well each chunk
    of a head alone finds the keys that all of them find; the best `chunks` give the proxy logits

        p_j = sum over chunks f of q_f k_jf + q_(f + D/2) k_j(f + D/2),

    and attention over the tokens of greatest p is exact. Their channels of all keys are held in bf16 beside the cache
    (4 * `chunks` bytes for each token and KV head), once for all questions; the stored cache has no byte more.

    Departures: the paper has no GQA; a KV head's chunks agree best in the mean over its query heads, and it reads the
    tokens with the greatest p of any of them. By default a quarter of the chunks (the paper: 8 to 16 of 64). The first
    and last `always` tokens are always read.
    """

    name: ClassVar[str] = "fasa"
    source: ClassVar[str] = "FASA, frequency-aware sparse attention"
    advice: ClassVar[str] = "the fewest entries for the same answers; for models that have been calibrated."

    needs: ClassVar[Needs] = Needs.CHUNKS

    chunks: int | None = parameter(None, "chunks of each head; null: a quarter of them", minimum=1)
    always: int = parameter(4, "first tokens, and last ones, that are always read", minimum=0)
    digest: str = ""
    measured: Chunks | None = field(default=None, compare=False, repr=False)

    def calibrated(self, measured: Chunks) -> Self:
        return replace(self, measured=measured, digest=measured.digest)

    def columns(self, layer: int) -> Tensor:
        assert self.measured is not None
        half = len(self.measured.agreement[layer][0])
        count = min(half, self.chunks or max(1, half // 4))
        best = torch.tensor(self.measured.best(layer, count))  # [kv_heads, chunks]
        return torch.cat([best, best + half], dim=1)

    def units(self, stored: StoredLayer) -> list[Units]:
        return [self._units(prefix, self.columns(stored.layer)) for prefix in stored.prefixes]

    def _units(self, prefix: PackedPrefix, columns: Tensor) -> Units:
        heads = zip(prefix.heads, columns.to(prefix.keys.device), prefix.lengths, strict=True)
        proxies = [
            block[:, chunks].T.to(torch.bfloat16)  # [W, rows]
            for (keys, _), chunks, length in heads
            for block in blocks_of(keys, length)
        ]
        return of_entries(prefix, torch.cat(proxies, dim=1), self.always)
