"""LocalKV: LagKV with each partition judged in its own scale (Liang et al., 2025, arXiv 2504.04704, eq. 14 and 15)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kvshelf.methods.policies.partitions import PartitionPolicy


@dataclass(frozen=True)
class LocalKV(PartitionPolicy):
    """Keep, in every partition of `lag` tokens, those that stand out in the partition's own scale. Sees no query.

    The LagKV paper's ablation: minimum and maximum are those of the partition itself (eq. 14, 15), and everything else
    is as in `lagkv`: what is reduced and what stays whole, `prefill`, and the departures. The last full partition could
    be judged too, since it needs no successor; it stays whole, so that the two policies differ in the scale alone.
    """

    name: ClassVar[str] = "localkv"
    source: ClassVar[str] = "LagKV, arXiv 2504.04704, eq. 14 and 15"
    advice: ClassVar[str] = "to see what LagKV's look at the next partition is worth."

    score: str = field(default="local", init=False)
