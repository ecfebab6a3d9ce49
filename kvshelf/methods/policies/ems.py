"""EMS: evict, then merge into what is kept (Li et al., 2024, arXiv 2412.08521)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvshelf.artifact.identity import RopeMode
from kvshelf.artifact.records import Kept, Merged
from kvshelf.kernels.merge import merge_weighted
from kvshelf.kernels.row_norms import row_norms
from kvshelf.kernels.select import importance_of, of_entries, select
from kvshelf.kernels.window_scores import pooled
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.base import WindowPolicy, keep, pooling_kernel
from kvshelf.methods.policies.budgets import LayerBudget
from kvshelf.methods.policies.keeping import KeepsScores
from kvshelf.methods.policies.merging import MergePlan, nearest
from kvshelf.methods.policies.view import LayerView


@dataclass(frozen=True)
class EMS(KeepsScores, WindowPolicy):
    """Evict by global and local attention, then merge the next best tokens into the kept tokens most similar to them.

    Score per query head (eq. 2): s = max(s_glo * mean(s_loc) / mean(s_glo), s_loc), where s_glo is the attention a
    token receives from all rows of the document, s_loc that from the observing rows; then s is pooled. B entries are
    kept: the protected tokens, and the best by s as class centers. Each of the next (gamma - 1) * B tokens finds the
    center j of greatest cos(k_i, k_j) * cos(v_i, v_j) (eq. 5) and joins its class if that is at least tau. All other
    tokens are evicted. A class has one key direction, the mean of k / |k| weighted by s, and one value, the mean of v
    weighted by s. Each of its tokens has a slot with the length of its own key.

    The budget counts classes. Slots are extra: at most gamma * B per head, 12 bytes each (scale, class, position). At
    gamma 4 and D = 128 in bfloat16, that is up to 9 % of the entries' bytes.

    `pos="post"` compares and merges keys as attention sees them. "pre" undoes RoPE first, so more tokens are similar,
    and each slot is rotated to its own position whenever it is read. This is better for gist, worse for retrieval (the
    paper's "w.o. pos" and "w. pos"), and slower to attend to.

    The paper's ablations: `score` "global" is s_glo alone and "local" s_loc alone (its table 4); `similarity` "keys" or
    "values" joins by one of the two cosines (table 8). With "values", tokens whose keys point apart merge, too.

    As selector `policy:ems` s_glo is the attention from all rows of the question, s_loc that from its last `window`,
    and the classes are made of the stored entries, which need not be tokens next to each other, for this question.

    Departures: a GQA group shares the mean of its scores, while the authors repeat KV heads. The local rows are those
    of the probe passes, if there are any; eq. 2's means then leave out the tail. Tokens of the chat template and of the
    tail take no members. Keys that point apart never merge, though two negative cosines have a positive product. Suffix
    policy `ems` goes on while the model answers, with `keep_scores`. kvshelf's own: the mean direction gets the length
    of the center's key; evicted tokens have no slot, because the key of a "zero class" has logit 0, and so a share of
    the softmax; a token alone in its class keeps key and value bit by bit; `every` n above 1 takes s_glo from every
    n-th row, for 1 / n of the work. With every eighth, a quarter kept and nothing merged, 65 % of the entries stay the
    same (4k tokens).
    """

    name: ClassVar[str] = "ems"
    source: ClassVar[str] = "EMS, arXiv 2412.08521"
    merges: ClassVar[bool] = True
    column_names: ClassVar[tuple[str, ...]] = ("all", "past")
    required: ClassVar[Mapping[str, Any]] = {"every": 1, "pos": "post"}
    settled: ClassVar[Mapping[str, str]] = {
        **KeepsScores.settled,
        **WindowPolicy.settled,
        "pos": "stored keys have their rotation",
        "every": "all rows of the question are summed",
    }
    advice: ClassVar[str] = "where many tokens nearly repeat each other and a longer prefill does not matter."

    window: int = parameter(32, "last tokens that observe for the local score; the document's are kept", minimum=1)
    kernel: int = pooling_kernel(7)
    gamma: float = parameter(4.0, "most tokens that still take part, as a multiple of the budget", minimum=1)
    tau: float = parameter(0.6, "least similarity at which tokens merge; above 1 none do", minimum=0)
    pos: str = parameter("post", "merge keys with RoPE (post) or without (pre)", choices=("post", "pre"))
    merge: bool = parameter(True, "false: only evict")
    score: str = parameter(
        "both",
        "global: attention from all rows alone; local: from the window alone",
        choices=("both", "global", "local"),
        added=True,
    )
    similarity: str = parameter(
        "both", "whose cosine tokens merge by; both: their product", choices=("both", "keys", "values"), added=True
    )
    every: int = parameter(1, "sum every n-th row only for the global score, for 1 / n of its work", minimum=1)

    @property
    def needs(self) -> Needs:
        return super().needs | Needs.SUMS | (Needs.ROPE if self.unrotated else Needs.NOTHING)

    @property
    def unrotated(self) -> bool:
        """Whether keys are merged, and stored, without their rotation."""
        return self.merge and self.pos == "pre"

    def scores(self, layer: LayerView) -> tuple[Tensor, dict[str, Tensor]]:
        """Equation 2, pooled, higher is kept, and the sums that it compares: `[kv_heads, N]` fp32."""
        window = layer.window(self.window)
        if layer.probes:
            everywhere, _ = layer.column_sums(every=self.every)
            heads = [window.attention(head).sum(dim=1) for head in range(layer.kv_heads)]
            local, judged = window.pad(torch.cat(heads)), window.columns
        else:
            everywhere, local = layer.column_sums(self.window, self.every)
            judged = layer.num_tokens
        ratio = local[:, :judged].mean(dim=1, keepdim=True) / everywhere[:, :judged].mean(dim=1, keepdim=True)
        aligned = everywhere * ratio  # [q_heads, N]
        scores = {"both": torch.maximum(aligned, local), "global": aligned, "local": local}[self.score]
        sums = {"all": everywhere, "past": local} if self.keep_scores else {}
        columns = {name: layer.grouped(of_heads).mean(dim=1) for name, of_heads in sums.items()}
        return pooled(layer.grouped(scores).mean(dim=1), self.kernel), columns

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Kept | Merged:
        (scores, sums), protected = self.scores(layer), self.protected(layer)
        kept = select(scores, protected, budget.per_head)
        importance = importance_of(scores, protected)
        if not self.merge:
            record = keep(layer, kept, importance, budget.per_head)
            at, lengths = record.entry_positions, record.lengths
            columns = {name: of_entries(of_tokens, at, lengths) for name, of_tokens in sums.items()}
            return replace(record, columns=columns)
        slots = [int(min(self.gamma * count, layer.num_tokens)) for count in budget.per_head]
        candidates = select(scores, protected, slots) & ~kept
        keys = layer.keys_unrotated() if self.unrotated else layer.keys
        compared = {"both": (keys, layer.values), "keys": (keys, None), "values": (layer.values, None)}[self.similarity]
        similarity, targets = nearest(*compared, candidates, kept, kept & ~protected)
        plan = MergePlan.joining(kept, similarity >= self.tau, targets)
        class_keys, class_values, scales = combined(keys, layer.values, scores, plan)
        rope_mode: RopeMode = "pre" if self.unrotated else "baked"
        merged = plan.as_merged(class_keys.to(layer.keys.dtype), class_values, importance, scales, rope_mode)
        return replace(merged, columns={name: of_tokens[plan.members] for name, of_tokens in sums.items()})


def combined(keys: Tensor, values: Tensor, scores: Tensor, plan: MergePlan) -> tuple[Tensor, Tensor, Tensor]:
    """Keys `[entries, D]` fp32 and values `[entries, Dv]` of the classes of keys `[kv_heads, N, D]` and values, and the
    scales `[members]` of the lengths of their members' own keys. A class has its members' mean direction."""
    members, entries, lengths = plan.members, plan.entries, row_norms(keys)  # [kv_heads, N]
    # No weight may be zero: scores can underflow, and a class of zeros has no mean.
    weights = scores[members].clamp_min(1e-30)
    directions, means = merge_weighted(keys[members], values[members], weights, plan.owners, len(plan.sizes))
    # As long as the center, not of length 1: a codec's channel groups would round it away among keys of length 10.
    as_long = F.normalize(directions, dim=1) * lengths[entries].unsqueeze(1)
    scales = torch.where(plan.kept[members], 1.0, lengths[members] / lengths[entries][plan.owners])
    return plan.or_alone(keys.float(), as_long), plan.or_alone(values, means.to(values.dtype)), scales
