"""What a cache may have lost, in one line for people: from its own figure, and from what its policy cost on real
documents."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvshelf.api.creation import DEFAULT_CODEC, DEFAULT_POLICY
from kvshelf.store.manifest import Manifest

LEAST: Final = 0.9
"""An agreement below this is said."""


class Loss(NamedTuple):
    """lost: of the `RIGHT` answers of the full cache. share: of the full cache in 16 bits."""

    policy: str
    removed: float
    codec: str
    lost: int
    share: float


MODEL: Final = "SmolLM2-135M"
DOCUMENTS: Final = 16
RIGHT: Final = 28
LOSSES: Final = (
    Loss("full", 0.0, "int8", 0, 0.59),
    Loss("full", 0.0, "int4", 3, 0.344),
    Loss("kvzip", 0.5, "none", 3, 1.0),
    Loss("keydiff", 0.5, "none", 15, 1.0),
    Loss("snapkv", 0.5, "none", 15, 1.0),
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
    return [f"{'; '.join(parts)}; {_without_loss(manifest)}"] if parts else []


def _cost(manifest: Manifest) -> str:
    """What the policy cost on real documents; of one that nobody measured, what others did."""
    own = [loss for loss in LOSSES if loss.policy == manifest.policy and loss.removed]
    losses = own or [loss for loss in LOSSES if loss.removed]
    lost = ", ".join(f"{loss.lost} of {RIGHT}" if own else f"{loss.policy} {loss.lost} of {RIGHT}" for loss in losses)
    unknown = "" if own else f"nobody measured what {manifest.policy} costs on real documents: "
    return f"{unknown}with half removed {MODEL} lost {lost} right answers on {DOCUMENTS} real documents"


def _without_loss(manifest: Manifest) -> str:
    best = next(loss for loss in LOSSES if (loss.policy, loss.codec) == (DEFAULT_POLICY, DEFAULT_CODEC))
    megabytes = best.share * manifest.bytes["full_16bit"] / 1e6
    return (
        f"policy {best.policy} under codec {best.codec}, the default, lost {best.lost or 'none'} of them at "
        f"{best.share:.0%} of 16 bits, here {megabytes:.2g} MB"
    )
