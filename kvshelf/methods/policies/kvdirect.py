"""KV-Direct: residuals in place of keys and values (Qasim et al., 2026, arXiv 2603.19664)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvshelf.artifact.packed import offsets_of
from kvshelf.artifact.records import Residuals
from kvshelf.methods.method import Needs, parameter
from kvshelf.methods.policies.base import Policy
from kvshelf.methods.policies.budgets import LayerBudget
from kvshelf.methods.policies.view import LayerView


@dataclass(frozen=True)
class KVDirect(Policy):
    """In part, as a token has a residual in each layer and not one for all of them: keep every entry as the residual
    that entered the layer, of which the model makes the keys and values of all heads again, by its own norm,
    projections and rotation.

    Under codec none keys and values are those of `full` up to rounding: products of another number of rows may sum in
    another order. A residual has hidden_size numbers in each layer, keys and values have 2 * KV heads * head size: half
    as many in models without grouped queries (Llama-2), more than them in most others, which are refused. With `made`
    "step", the paper's, they are made at every step, of one layer at a time, so that memory has residuals alone;
    selectors and copies of entries (suffix scope "cache") are refused, as they read keys. By default they are made once
    for each attach, and residuals save bytes on the shelf and on the way. Layers with a window or chunks keep their
    own. Codecs round residuals by channel, as keys; `mixed` gives the last tokens more bits.

    Departures: the paper's abstract counts one residual of a token (5 KB of Gemma 3 4B, whose keys and values take
    136), of which the layers above the first make theirs by running again. Question and answer have keys and values, as
    the paper's last tokens up to its budget, and the document has none, where the paper's budget may reach into the
    prompt. Appended tokens are read under another policy; such a cache is made once for each attach.
    """

    name: ClassVar[str] = "kvdirect"
    source: ClassVar[str] = "KV-Direct, arXiv 2603.19664"
    advice: ClassVar[str] = (
        "when nothing may be lost, and the model has no grouped queries: half of the bytes of `full` on Llama-2-7B, "
        "0.38 of them on Gemma-7B."
    )
    takes_budget: ClassVar[bool] = False
    by_position: ClassVar[bool] = True
    has_residuals: ClassVar[bool] = True

    made: str = parameter("attach", "when keys and values are made", choices=("attach", "step"), added=True)

    stored: ClassVar[Mapping[str, str]] = {"residuals": ""}
    needs: ClassVar[Needs] = Needs.INPUTS

    def reduce(self, layer: LayerView, budget: LayerBudget) -> Residuals:  # noqa: ARG002
        assert layer.inputs is not None, "the policy says that it needs them"
        heads, num_tokens = layer.kv_heads, layer.num_tokens
        return Residuals(
            keys=layer.inputs.clone(),  # or the record would hold the rows of probe passes, too
            values=layer.inputs[:, :0].clone(),
            entries_at=layer.positions.to(torch.int32).repeat(heads),
            offsets=offsets_of([num_tokens] * heads),
            importance=layer.positions.float().repeat(heads),
            full_dims=(layer.keys.shape[2], layer.values.shape[2]),
        )
