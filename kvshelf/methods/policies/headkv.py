"""HeadKV: heads that retrieve keep more (Fu et al., 2024, arXiv 2410.19258)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from kvshelf.methods.method import parameter
from kvshelf.methods.policies.budgets import LayerBudget
from kvshelf.methods.policies.calibrated import CalibratedPolicy, calibration_of, retrieval_scores
from kvshelf.methods.policies.sharing import fill, largest_remainders
from kvshelf.methods.policies.snapkv import SnapKV
from kvshelf.methods.policies.view import LayerView


@dataclass(frozen=True)
class HeadKV(CalibratedPolicy, SnapKV):
    """In part, as heads are judged by what they copy, not by what they reason from: choose as SnapKV does, and give
    each head of the model a part of the budget by how much it retrieves.

    b is the mean budget of a head, without the window, and S_h the head's share of all retrieval scores (they add up to
    1 over the H heads of the model). Head h keeps its window and b - b / beta + S_h (b / beta) H entries: beta near 1
    leaves everything to the scores, a large one makes the shares even.

    Departures: `kvshelf calibrate` measures the scores, how much of a copied needle a head attends to; the paper's also
    count what a reasoning head looks at. A KV head has the score of its best query head, where the paper keeps a cache
    for each query head. The entries for which a head has no room go to the others in proportion, and shares are rounded
    by largest remainders, so that the total is exact. `ProbedPolicy` says what the prompt's end is.
    """

    name: ClassVar[str] = "headkv"
    source: ClassVar[str] = "HeadKV, arXiv 2410.19258"
    advice: ClassVar[str] = "for models that have a calibration, where few heads retrieve."
    version: ClassVar[int] = 1
    budgets_heads: ClassVar[bool] = True

    prefill: str = field(default="whole", init=False)  # a chunk is judged where all heads have equally many entries
    chunk: int = field(default=2048, init=False)
    beta: float = parameter(1.2, "1 / beta of the budget follows the scores, the rest is even", minimum=1)

    def counts(self, layer: LayerView, scores: Tensor, protected: Tensor, budget: LayerBudget) -> Sequence[int]:  # noqa: ARG002
        kept, heads = self.always(layer), len(scores)
        retrieval = retrieval_scores(calibration_of(layer.document), heads)
        free = budget.total // heads - kept
        even = free - int(free / self.beta)
        shares = largest_remainders(fill(retrieval, (free - even) * len(retrieval), layer.num_tokens - kept - even))
        return [kept + even + share for share in shares[layer.layer_idx * heads : (layer.layer_idx + 1) * heads]]
