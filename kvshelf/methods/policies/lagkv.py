"""LagKV: each partition judged in the scale of the next one (Liang et al., 2025, arXiv 2504.04704)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvshelf.methods.policies.partitions import PartitionPolicy


@dataclass(frozen=True)
class LagKV(PartitionPolicy):
    """Keep, in every partition of `lag` tokens, those that stand out in the scale of the next partition. Sees no query.

    After `sink` tokens the document is cut into partitions; all full ones but the last are reduced (eq. 7 to 11: the
    score is the keys' score plus `value_weight` times the values'). The last full one and the remainder stay whole (eq.
    12). With `prefill` "chunked" the document is read chunk by chunk and compressed in between, as the paper does for
    documents whose cache would not fit: later chunks see the compressed past, so their keys differ from
    those of one pass.

    `score` "local" judges a partition in its own scale (eq. 14 and 15: policy `localkv`), "l2" keeps the shortest keys
    of a partition (eq. 16; the paper leaves the first two layers whole then: `skip_layers` 2).

    `r` is the paper's retention: each reduced partition keeps r * lag entries, rounded down, and the size follows (eq.
    12). The layers that `skip_layers` leaves whole then cost the others nothing.

    Departures: without `r` the share per partition follows from the budget; if it does not divide evenly, the earliest
    partitions keep one entry more. A channel that is constant over a partition gets a small spread instead of
    0/0. The authors' code leaves any list of layers whole, here the first `skip_layers`, and the others pay for them.
    `sink` and `lag` default to kvpress's 4 and 128, not to the authors' 16 and 1024, because documents may be short.
    """

    name: ClassVar[str] = "lagkv"
    source: ClassVar[str] = "LagKV, arXiv 2504.04704"
    advice: ClassVar[str] = (
        "for unknown questions on long documents, with prefill=chunked where the full cache does not fit into memory."
    )
