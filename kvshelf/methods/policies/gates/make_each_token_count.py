"""Make Each Token Count: TRIM-KV's gates, and one budget for all heads and layers (the authors' DBTrimKV)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvshelf.methods.method import parameter
from kvshelf.methods.policies.gate_file import Family, Geometry, Shapes
from kvshelf.methods.policies.gates.trimkv import TrimKV
from kvshelf.methods.policies.sharing import GlobalSharing, Sharing


@dataclass(frozen=True)
class MakeEachTokenCount(TrimKV):
    """In part, as its gates learn from text alone: keep what fades least of the whole cache, by gates like `trimkv`'s.

    All layers share the last projection, so that rates mean the same in each, and b begins at 18. All heads of all
    layers share one budget; `floor` of an even share stays each head's own. In training the whole cache may leave a
    quarter of its tokens at the document's end, wherever they are.

    With `prefill` "chunked" all entries compete behind each chunk, once the last layer has read it: until then each
    layer has the chunk beside its entries. With `keep_scores` they go on to compete while the model answers, under
    suffix policy `trimkv` with these `gates`, and with turns that are appended in chunks.

    Departures: as for `trimkv`, and one hidden layer in place of two.
    """

    name: ClassVar[str] = "make_each_token_count"
    source: ClassVar[str] = "Make Each Token Count (DBTrimKV), after the authors' code"
    advice: ClassVar[str] = "of the gates that learn from predictions it keeps most, as heads differ in need."
    family: ClassVar[Family] = "global"

    floor: float = parameter(0.0, "part of an even share that each head keeps", minimum=0, maximum=1)

    @property
    def sharing(self) -> Sharing | None:
        return GlobalSharing(self.floor)

    @classmethod
    def shapes(cls, width: int, geometry: Geometry) -> Shapes:
        shapes = dict(super().shapes(width, geometry))
        for layer in range(geometry.layers):
            shapes |= {name: shapes.pop(f"{layer}.{name}") for name in ("down", "bias")}
        return shapes
