"""What a cache may have lost, in one line for people: from its own figure, and from what its policy cost on real
documents."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvshelf.api.creation import DEFAULT_CODEC, DEFAULT_POLICY
from kvshelf.store.manifest import Manifest

LEAST: Final = 0.9
"""An agreement below this is said."""


class Loss(NamedTuple):
    """lost: of the `right` answers of the full cache, on so many documents. share: of the full cache in 16 bits."""

    policy: str
    removed: float
    codec: str
    share: float
    lost: int
    right: int
    documents: int

    def __str__(self) -> str:
        return f"{self.lost} of {self.right} right answers on {self.documents} real documents"


MODEL: Final = "SmolLM2-135M"
LOSSES: Final = (
    Loss("full", 0.0, "int8", 0.586, 1, 46, 27),
    Loss("full", 0.0, "int4", 0.34, 5, 46, 27),
    Loss("kvzip", 0.5, "none", 1.0, 3, 28, 16),
    Loss("keydiff", 0.5, "none", 1.0, 15, 28, 16),
    Loss("snapkv", 0.5, "none", 1.0, 15, 28, 16),
    Loss("kvcues", 0.5, "int8", 0.304, 2, 19, 12),
    Loss("sage", 0.5, "int8", 0.304, 7, 19, 12),
    Loss("lagkv", 0.5, "int8", 0.304, 7, 19, 12),
    Loss("expected_attention", 0.5, "int8", 0.304, 9, 19, 12),
    Loss("sablock", 0.5, "int8", 0.304, 9, 19, 12),
    Loss("ems", 0.5, "int8", 0.323, 10, 19, 12),
)
"""The answers to the questions of docs/internals/datasets.md, by `kvshelf bench quality --dataset`."""


def warnings_of(manifest: Manifest) -> list[str]:
    """A line for a cache that removes entries, that a ladder has rounded, or whose agreement is below `LEAST`; none for
    another."""
    quality, parts = manifest.quality, []
    if quality is not None and quality.agreement is not None and quality.agreement < LEAST:
        by_cues = (
            f"about {1 - quality.agreement:.0%} of what the document decides is answered otherwise than by the full "
            f"cache ({quality.cues} cues)"
        )
        parts.append(by_cues if quality.cues else f"{quality.reason}")
    if manifest.recoded is not None and manifest.codec != "lossless":
        measured = f"; {quality.reason}" if quality is not None and quality.agreement is None else ""
        parts.append(f"made under codec {manifest.recoded.codec}, and since coded as {manifest.codec}{measured}")
    if manifest.compression_ratio > 0:
        parts.append(f"{manifest.policy} removed {manifest.compression_ratio:.0%} of the entries; {_cost(manifest)}")
    if not parts:
        return []
    best = next(loss for loss in LOSSES if (loss.policy, loss.codec) == (DEFAULT_POLICY, DEFAULT_CODEC))
    megabytes = best.share * manifest.bytes["full_16bit"] / 1e6
    parts.append(
        f"policy {best.policy} under codec {best.codec}, the default, lost {best}, at {best.share:.0%} of 16 bits, "
        f"here {megabytes:.2g} MB"
    )
    return ["; ".join(parts)]


def _cost(manifest: Manifest) -> str:
    """What the policy cost on real documents; of one that nobody measured, what others did."""
    removing = [loss for loss in LOSSES if loss.removed]
    measured = next((loss for loss in removing if loss.policy == manifest.policy), None)
    if measured is not None:
        return f"with half removed {MODEL} lost {measured}"
    least, most = (choose(removing, key=lambda loss: loss.lost / loss.right) for choose in (min, max))
    return (
        f"nobody measured what {manifest.policy} costs on real documents: with half removed {MODEL} lost from {least} "
        f"({least.policy}) to {most} ({most.policy})"
    )
