"""ThinK: keys without the channels that queries use least (Xu et al., 2024, arXiv 2407.21018)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from kvshelf.artifact.records import Entries, Kept, Parts, Pruned
from kvshelf.errors import PolicyUnsupported
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.ada import Ada
from kvshelf.methods.policies.around import Around
from kvshelf.methods.policies.base import Phase, Policy
from kvshelf.methods.policies.budgets import Budget
from kvshelf.methods.policies.full import Full
from kvshelf.methods.policies.keydiff import KeyDiff
from kvshelf.methods.policies.view import DocumentView, LayerView, ProbePass


class Noted(NamedTuple):
    """The note of a layer. channels: those that keys keep, `[kv_heads, D']` int16, ascending. dim: D. recent: the first
    of the num_tokens tokens whose key keeps all channels."""

    channels: Tensor
    dim: int
    recent: int
    num_tokens: int


@dataclass(frozen=True)
class Think(Around):
    """Let another policy choose the entries, and store their keys without the channels that matter least: of each KV
    head the share `channels` of them whose mean square over queries times mean square over keys is least (section 3.2
    of the paper). A question's query reads such keys with the same channels of its own.

    Queries are the last `channel_rows` tokens of each pass behind the document by which the base judges, or else the
    document's own; the mean is over the query heads of the KV head, too. Keys are those of all the document's tokens.
    Its last `whole_keys` tokens, if the base keeps them, have all channels. The scale of logits stays that of whole
    keys, so a logit loses only the products of the removed channels. Values keep all channels. With a budget for the
    whole document every entry stays, whatever the base; base `full` takes no other.
    """

    name: ClassVar[str] = "think"
    source: ClassVar[str] = "ThinK, arXiv 2407.21018"
    advice: ClassVar[str] = (
        "where a trial on your model shows that its keys can spare channels: a fifth of the bytes. Those of "
        "kvshelf-tiny cannot."
    )
    takes: ClassVar[str] = (
        "a policy that keeps tokens as they are and of one precision, makes no index and is built around no other but "
        "by ada"
    )
    prunes: ClassVar[bool] = True
    stored: ClassVar[Mapping[str, str]] = {"pruned": "channels", "whole": "whole_keys"}

    base: str = parameter("keydiff", "the policy that chooses; its own parameters are given beside these")
    channels: float = parameter(0.4, "share of the channels of each head's keys that goes", minimum=0, maximum=0.9)
    channel_rows: int = parameter(32, "last rows of queries that judge channels", minimum=1)
    whole_keys: int = parameter(32, "last tokens of the document, whose keys keep all channels", minimum=0)
    inner: Policy = field(default_factory=KeyDiff)
    keeps_all: bool = False

    @classmethod
    def bases(cls, known: Mapping[str, type[Policy]]) -> Mapping[str, type[Policy]]:
        return {
            name: base
            for name, base in known.items()
            if not (base.merges or base.indexes or base.sets_precision or base.has_residuals)
            and (not issubclass(base, Around) or issubclass(base, Ada))
        }

    @property
    def chooser(self) -> Policy:
        return Full() if self.keeps_all else super().chooser

    @property
    def phase(self) -> Phase:
        return "during" if self.keeps_all else super().phase

    @property
    def needs(self) -> Needs:
        return super().needs | Needs.QUERIES

    def fitted(self, document: DocumentView, budget: Budget, given: frozenset[str]) -> Self:
        if not self.inner.takes_budget and budget.tokens < document.num_tokens:
            raise PolicyUnsupported(
                f"base {self.base!r} keeps every entry, and the budget is {budget.tokens} of {document.num_tokens}; "
                "give compression_ratio 0",
                param="compression_ratio",
            )
        if self.next_position(document.num_tokens, budget) != document.num_tokens:
            raise PolicyUnsupported(
                f"base {self.base!r} rotates keys to their places in the cache, and think chooses channels of keys as "
                "the model rotates them; take positions=absolute, or another base",
                param="policy_params.positions",
            )
        if not self.inner.has_work(budget, document.num_tokens):
            return replace(self, keeps_all=True)
        return super().fitted(document, budget, given)

    def probe_passes(self, document: DocumentView) -> Sequence[ProbePass]:
        return () if self.keeps_all else super().probe_passes(document)

    def noted(self, layer: LayerView) -> Noted:
        dim = layer.keys.shape[2]
        kept, window = dim - int(dim * self.channels), layer.window(self.channel_rows)
        chosen = []
        for head, keys in enumerate(layer.keys):
            queries = window.queries(head)  # [group, R, D]
            score = queries.float().square().mean(dim=(0, 1)) * keys.float().square().mean(dim=0)  # [D]
            chosen.append(score.argsort(descending=True, stable=True)[:kept].sort().values)
        channels = torch.stack(chosen).to(torch.int16)  # [kv_heads, D']
        return Noted(channels, dim, layer.num_tokens - self.whole_keys, layer.num_tokens)

    def finished(
        self,
        records: Mapping[int, Entries],
        notes: Mapping[int, Any],
        budget: Budget,  # noqa: ARG002
    ) -> Mapping[int, Entries]:
        return {layer: self._pruned(record, notes[layer]) for layer, record in records.items()}

    def _pruned(self, record: Entries, noted: Noted) -> Entries:
        if type(record) is not Kept or record.rope_mode != "baked":
            raise PolicyUnsupported(
                f"base {self.base!r} keeps entries of kind {record.kind!r} or keys without their rotation; think takes "
                f"{self.takes}",
                param="policy_params.base",
            )
        if noted.channels.shape[1] == noted.dim or noted.recent <= 0:
            return record
        if noted.recent == noted.num_tokens:
            return _without(record, noted)
        # Both parts, even if one is empty: processes that share the heads must have the same parts.
        recent = record.entry_positions >= noted.recent  # [entries]
        return Parts((_without(record.select(~recent), noted), record.select(recent)))


def _without(record: Kept, noted: Noted) -> Pruned:
    """The entries without the pruned channels of their keys."""
    heads = zip(record.heads(), noted.channels.long(), strict=True)
    keys = torch.cat([keys[:, channels] for (keys, _), channels in heads])  # [entries, D']
    values: dict[str, Any] = {field.name: getattr(record, field.name) for field in fields(Kept)}
    return Pruned(**values | {"keys": keys}, channels=noted.channels, full_dim=noted.dim)
