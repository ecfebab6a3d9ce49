"""ARKV while decoding: each entry whole, in the numbers of fp8, or gone (Lei and Ilager, 2026, arXiv 2603.08727)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Final

import torch
from torch import Tensor

from kvshelf.kernels.window_scores import pooled
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.base import pooling_kernel
from kvshelf.methods.suffixes.base import Columns, PeriodicPolicy, Reduction, Suffix, WholeCachePolicy, best, numbers_of

_LOW: Final = torch.float8_e4m3fn


@dataclass(frozen=True)
class ARKV(WholeCachePolicy, PeriodicPolicy):
    """Keep the last `window` entries, and of the others three quarters, whenever there are more than the budget: the
    best stay whole, the rest are rounded to fp8, and a quarter goes.

    The score of an entry is the weight that the newest token gave it, in the mean over the GQA group and pooled over
    the entries beside it. A layer's share is its claim, as a part of the largest claim of all layers: policy `arkv`
    decides it when the document has been read, and stores it with `keep_scores`. Of the entries for which the
    budget has room beside question and window, less the window, the best stay whole, as large a part as the share, as
    in the authors' code. The others that stay get the numbers of e4m3, by a scale of their own; a rounded entry stays
    rounded when it is among the best again. Under scope
    "cache" all of the document's entries compete, in whatever bits they are stored. Under "suffix" every share is 1.

    Rounded entries have the model's dtype: an answer reads the numbers of fp8, and takes no less memory for it. The
    rules are those of `arkv/cache/mix_cache.py` in Large-scale-Sustainable-Computing-LSC/ARKV. Departures: that code
    gives one scale to the n-th rounded entries of all heads, whatever tokens these are, and keeps no more whole than
    the prompt had before its window; the shares are of the document without the question, which stays unless
    `protect_question` is false; of appended parts the smallest share counts; a reduction after every 32nd token, not
    after each, unless `every` is 1.
    """

    name: ClassVar[str] = "arkv"
    source: ClassVar[str] = "ARKV, arXiv 2603.08727, and the authors' code"
    advice: ClassVar[str] = "to see what three states are worth beside eviction alone; it saves the memory of eviction."
    needs: ClassVar[Needs] = Needs.ATTENTION
    columns: ClassVar[dict[str, float]] = {"weight": 0.0, "share": 1.0}
    carried: ClassVar[frozenset[str]] = frozenset({"share"})

    window: int = parameter(32, "last entries, which always stay whole", minimum=1)
    kernel: int = pooling_kernel(5)

    @property
    def least(self) -> int:
        return self.window

    def observes_at(self, answered: int) -> bool:
        return answered % self.every == 0

    def observe(self, columns: Columns, weights: Tensor, positions: Tensor, answered: int) -> None:  # noqa: ARG002
        columns["weight"].copy_(weights.mean(1))

    def reduce(self, suffix: Suffix) -> Reduction:
        first, end = suffix.protected, suffix.stored - self.window
        scores = torch.zeros_like(suffix.columns["weight"])
        scores[:, first:end] = pooled(suffix.columns["weight"][:, first:end], self.kernel)
        always, share = first + self.window, float(suffix.columns["share"].min().clamp(0, 1))
        room = suffix.budget - always
        count = min(room, 3 * (end - first) // 4)
        whole_count = min(count, max(0, round(share * room) - self.window))
        kept = numbers_of(best(replace(suffix, budget=always + count), scores, self.window))
        whole = best(replace(suffix, budget=always + whole_count), scores, self.window)
        at, stays_whole = kept.unsqueeze(2), whole.gather(1, kept).unsqueeze(2)
        keys, values = (
            torch.where(stays_whole, states, _rounded(states))
            for states in (suffix.keys.take_along_dim(at, 1), suffix.values.take_along_dim(at, 1))
        )
        columns = {name: column.gather(1, kept) for name, column in suffix.columns.items()}
        columns["share"].fill_(share)
        return Reduction(kept, keys, values, columns)


def _rounded(states: Tensor) -> Tensor:
    """Rows `[..., D]` rounded to fp8, scaled so that the largest number of a row is the largest of fp8."""
    most = torch.finfo(_LOW).max
    scale = states.abs().amax(-1, keepdim=True).float() / most
    scale = torch.where(scale > 0, scale, 1.0)
    return ((states / scale).clamp(-most, most).to(_LOW).float() * scale).to(states.dtype)
