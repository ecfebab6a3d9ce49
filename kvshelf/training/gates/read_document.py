"""Passes behind a document, with gradients through their attention over its frozen keys and values and their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.engine.attention.function import attention_selected, layer_index, logit_rules, require_causal
from kvshelf.errors import PolicyUnsupported
from kvshelf.methods.policies.view import ProbePass

if TYPE_CHECKING:
    from kvshelf.engine.engine import Engine

_IMPLEMENTATION: Final = "kvshelf_learning"
_ATTEND: Final = "kvshelf_attend"

Attend = Callable[[int, Tensor], Tensor]
"""Makes the weights of a layer, by its number, from its causal logits `[q_heads, T, N + T]` fp32, of the same shape."""


def softmax(layer: int, logits: Tensor) -> Tensor:  # noqa: ARG001
    """The model's own `Attend`."""
    return logits.softmax(dim=-1)


@dataclass(frozen=True, eq=False)
class ReadDocument:
    """A document that the model has read: the keys and values of each layer, `[1, kv_heads, N, D]`."""

    engine: Engine
    states: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, engine: Engine, token_ids: Any) -> ReadDocument:
        """Raises `PolicyUnsupported` for a model with layers that do not see the whole document."""
        if not all(kind.sees_all and kind.attends and not kind.states and not kind.latents for kind in engine.kinds):
            raise PolicyUnsupported(
                f"gates of this kind learn through attention over the whole document, and {engine.name!r} has other "
                "layers; train those of kvzip_gate or locret",
                param="family",
            )
        ids = torch.tensor([list(token_ids)], device=engine.passes.devices.inputs)
        past = DynamicCache()
        with torch.no_grad():
            engine.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: past})
        return cls(engine, tuple((layer.keys, layer.values) for layer in past.layers))

    def logits(self, probe: ProbePass, rows: int, attend: Attend = softmax) -> Tensor:
        """Logits `[rows, vocabulary]` fp32 of the last rows of a pass behind the document."""
        device = self.engine.passes.devices.inputs
        ids = torch.tensor([probe.token_ids], device=device)
        at = torch.arange(probe.first_position, probe.first_position + ids.shape[1], device=device).unsqueeze(0)
        past = DynamicCache()
        for layer, states in enumerate(self.states):
            past.update(*states, layer)
        with attention_selected(self.engine.model, _IMPLEMENTATION, _attention):
            arguments = {CACHE_ARGUMENT: past, _ATTEND: attend, "logits_to_keep": rows}
            logits: Tensor = self.engine.model(input_ids=ids, position_ids=at, use_cache=True, **arguments).logits
        return logits[0].float()


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of one row: query `[1, q_heads, T, D]`, key `[1, kv_heads, N + T, D]`."""
    rules = logit_rules(module, query.shape[-1] ** -0.5 if scaling is None else scaling, kwargs)
    require_causal(module, attention_mask, kwargs)
    group, rows, columns = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    keys, values = (states[0].repeat_interleave(group, dim=0).float() for states in (key, value))
    logits = query[0].float() @ keys.transpose(1, 2) * rules.scale  # [q_heads, T, N + T]
    hidden = torch.ones(rows, columns, dtype=torch.bool, device=query.device).triu(columns - rows + 1)
    weights = kwargs[_ATTEND](layer_index(module), logits.masked_fill(hidden, float("-inf")))
    return (weights @ values).to(query.dtype).transpose(0, 1).unsqueeze(0).contiguous(), None
