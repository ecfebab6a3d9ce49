"""Qualities that were not measured, for tests of what is done with them."""

from __future__ import annotations

from kvshelf.api import Quality, WorstPart
from kvshelf.engine.quality import VERSION


def quality_of(agreement: float, version: int = VERSION) -> Quality:
    """A measured quality whose lower bound is `agreement`."""
    worst: WorstPart = {"from": 0, "to": 100, "agreement": agreement}
    return Quality(
        agreement=agreement, low=agreement, high=1.0, worst=worst, cues=150, kl=1.0, probe_s=0.1, version=version
    )
