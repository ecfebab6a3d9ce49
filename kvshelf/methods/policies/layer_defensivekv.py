"""Layer-DefensiveKV: DefensiveKV with one budget for all layers (Feng et al., 2025, arXiv 2510.13334)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvshelf.methods.policies.defensivekv import DefensiveKV
from kvshelf.methods.policies.sharing import GlobalSharing


@dataclass(frozen=True)
class LayerDefensiveKV(DefensiveKV):
    """Score as DefensiveKV does, and keep the best of all layers and heads together.

    The authors' code has every layer in full until the last; here layers are reduced in cascade, which keeps the same
    entries. One departure besides those of `DefensiveKV`: secured tokens are certain to stay in every layer. In the
    authors' code they get their layer's largest score and may lose to another layer's tokens.
    """

    name: ClassVar[str] = "layer_defensivekv"
    source: ClassVar[str] = "Layer-DefensiveKV, arXiv 2510.13334"
    advice: ClassVar[str] = (
        "as defensivekv, where heads may be ragged: with half removed, closest to the full cache without a replay."
    )
    sharing: ClassVar[GlobalSharing] = GlobalSharing()
