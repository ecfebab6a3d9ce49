"""Forward passes of one model, by its program where it has one, and otherwise by its own modules."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvshelf.workers.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.workers.engine.attention.function import (
    CONTEXT,
    Attended,
    ForwardContext,
    attention,
    kvshelf_attention,
)
from kvshelf.workers.engine.forward.program import ForwardProgram
from kvshelf.workers.engine.forward.tracing import AttentionCall

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Passes:
    """One thread owns the model."""

    def __init__(self, model: PreTrainedModel, *, recordable: bool) -> None:
        """recordable: whether the operations on a token are the same whatever the length of the call."""
        self.model = model
        self._recordable = recordable

    @cached_property
    def program(self) -> ForwardProgram | None:
        """Made when it is first wanted; None where the model runs by its own modules."""
        return ForwardProgram.of(self.model) if self._recordable else None

    def causal(
        self, inputs: Mapping[str, Tensor], context: ForwardContext, kept: Tensor | None = None
    ) -> Tensor | None:
        """One pass over `input_ids` at `position_ids`, `[1, N]`, without a cache. Logits `[1, kept, vocabulary]` of the
        tokens numbered in `kept`; None without it, and then nothing runs that only logits need."""
        with torch.no_grad(), kvshelf_attention(self.model):
            if self.program is None:
                given = {**inputs, "use_cache": False, CONTEXT: context}
                if kept is None:
                    self.model.base_model(**given)
                    return None
                logits: Tensor = self.model(**given, logits_to_keep=kept).logits
                return logits
            last = self.model.config.num_hidden_layers - 1

            def attend(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
                if kept is None and call.layer == last and not context.reads_attention:
                    context.after_attention(Attended(call.module, query, key, value, call.scale(query)))
                    return None
                out, _ = attention(
                    call.module, query, key, value, None, call.scaling, **call.options, **{CONTEXT: context}
                )
                return out

            return self.program.run(inputs["input_ids"], inputs["position_ids"], attend, kept)

    def cached(
        self, token_ids: Tensor, positions: Tensor, cache: Cache, kept: Tensor, context: ForwardContext | None
    ) -> Tensor:
        """Logits `[1, kept, vocabulary]` of one pass over tokens `[1, N]` that continue `cache`, whose layers give
        `AttachedStates`."""
        given = {} if context is None else {CONTEXT: context}
        with torch.no_grad(), kvshelf_attention(self.model):
            if self.program is None:
                logits: Tensor = self.model(
                    input_ids=token_ids,
                    position_ids=positions,
                    use_cache=True,
                    logits_to_keep=kept,
                    **{CACHE_ARGUMENT: cache},
                    **given,
                ).logits
                return logits

            def attend(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                states, _ = cache.layers[call.layer].update(key, value)
                out, _ = attention(call.module, query, states, states, None, call.scaling, **call.options, **given)
                return out

            made = self.program.run(token_ids, positions, attend, kept)
            assert made is not None
            return made
