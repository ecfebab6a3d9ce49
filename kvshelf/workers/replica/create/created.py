"""What a creation gives back. Apart from creating, because those who only ask for it need no transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvshelf.workers.replica.phases import Phase


@dataclass(frozen=True)
class Stored:
    """A cache on the shelf, and whether it was there already. `manifest` has JSON types only."""

    manifest: dict[str, Any]
    existing: bool


@dataclass(frozen=True)
class Created:
    """What a creation has put on the shelf, or found there: one cache, or one for each of its levels, in their order.

    phases: of the work, where there was any: queue, prefill, compress, measure, store; told one after the other,
    although prefill and compress take turns; ways that were tried and not kept count as measuring. worker: who did it,
    where a request of the ledger was worked on.
    """

    caches: tuple[Stored, ...]
    phases: tuple[Phase, ...] = ()
    worker: str = ""

    @property
    def manifest(self) -> dict[str, Any]:
        """That of the first cache, which is the only one but for levels."""
        return self.caches[0].manifest

    @property
    def prefilled_tokens(self) -> int:
        """Tokens of the document, where it went through the model for this; 0 where others had that done. Several
        prefills of it count as one."""
        tokens: int = self.manifest["num_tokens"]
        return tokens if self.phases else 0

    @property
    def existing(self) -> bool:
        """Whether all of them were there already."""
        return all(cache.existing for cache in self.caches)
