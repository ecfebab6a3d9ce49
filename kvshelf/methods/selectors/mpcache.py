"""MPCache's dynamic half: clusters of entries, coarse ones first (arXiv 2501.06807)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from kvshelf.kernels.choose import Units
from kvshelf.methods.method import parameter
from kvshelf.methods.selectors.base import LEAST_TOKENS, StepSelector, StoredLayer, of_pages

_CLUSTER, _COARSE = 16, 32


@dataclass(frozen=True)
class MPCache(StepSelector):
    """Read the clusters of entries whose keys resemble the query, after half of the coarser clusters are ruled out;
    every answer token chooses anew.

    Clusters have 16 consecutive entries, coarser ones 32, two clusters each. The similarity of a cluster is

        sum_c a * q_c * max_c + (1 - a) * q_c * min_c

    of the largest and least value of each channel, a = 0.6: unlike Quest's, no bound of a key's product. The better
    half of the coarser clusters stay, and of their clusters the best until a fifth of the entries is read. Policy
    `mpcache` is the static half, at compression.

    With `share` n, the first of each n adjacent layers chooses for all of them: the paper's sharing of indices, which
    its code does not do. A cache is refused unless these layers have the same tokens, as under policy `full`.

    Departures: a KV head reads what any of its query heads asks for (`over`; the paper has no GQA). A short last
    cluster has its own entries alone, not repeats of the last. First and last clusters are always read.
    """

    name: ClassVar[str] = "mpcache"
    source: ClassVar[str] = "MPCache, arXiv 2501.06807"
    advice: ClassVar[str] = "to compare with quest; its similarity is no bound."

    similarity: float = parameter(
        0.6, "weight of a channel's largest value; of its least, the rest", minimum=0, maximum=1
    )
    share: int = parameter(1, "adjacent layers that read one choice, that of the first of them", minimum=1, added=True)

    @property
    def layers_together(self) -> int:
        return self.share

    @property
    def linear(self) -> float:
        return self.similarity

    def default_tokens(self, entries: int) -> int:
        return max(LEAST_TOKENS, entries // 5)

    def units(self, stored: StoredLayer) -> list[Units]:
        return [
            replace(of_pages(prefix, _CLUSTER), parents=of_pages(prefix, _COARSE), children=_COARSE // _CLUSTER)
            for prefix in stored.prefixes
        ]
