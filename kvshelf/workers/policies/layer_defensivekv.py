"""Layer-DefensiveKV: DefensiveKV with one budget for all layers (Feng et al., 2025, arXiv 2510.13334)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvshelf.workers.policies.defensivekv import DefensiveKV
from kvshelf.workers.policies.sharing import GlobalSharing


@dataclass(frozen=True)
class LayerDefensiveKV(DefensiveKV):
    """Score as DefensiveKV does, and keep the best of all layers and heads together.

    The authors' code waits for the last layer with every layer in full; here layers are reduced in cascade, which keeps
    the same entries. Departure beside those of `DefensiveKV`: the tokens a head secured are kept for certain in every
    layer, where theirs get the largest score of their layer and may lose to those of another.
    """

    name: ClassVar[str] = "layer_defensivekv"
    source: ClassVar[str] = "Layer-DefensiveKV, arXiv 2510.13334"
    advice: ClassVar[str] = (
        "as defensivekv, where heads may be ragged: with half removed, closest to the full cache without a replay."
    )

    @property
    def sharing(self) -> GlobalSharing:
        return GlobalSharing()
