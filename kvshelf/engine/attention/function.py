"""The attention function of an engine, "kvshelf" in transformers' public registries: causal attention, attention over
an attached cache, and the states of each layer for the call's `ForwardContext`. It refuses everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from kvshelf.engine.attention.attached import IMPLEMENTATION, AttachedStates
from kvshelf.engine.attention.latents import LATENTS, Handover
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.kernels.prefix_attention import (
    BatchLayout,
    LogitRules,
    StackedPrefix,
    SuffixRows,
    causal_attention,
    prefix_attention,
)
from kvshelf.methods.policies.view import Call
from kvshelf.model.layers import chunk_of, hiding

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONTEXT = "kvshelf_context"
"""Name of the keyword that carries a `ForwardContext` through `model(...)` into every layer."""

_CHANGES_THE_RESULT = ("position_bias", "cu_seq_lens_q", "cu_seq_lens_k", "block_mask", "indices")
"""Keywords of models' attention functions that change the result and are not implemented here."""


@dataclass(frozen=True, eq=False)
class Attended:
    """States of the call's own tokens in the attention of one layer.

    module: the model's attention module. queries: `[B, q_heads, T, D]`, keys: `[B, kv_heads, T, D]`, values:
    `[B, kv_heads, T, Dv]`. lse: the log-sum-exps of the scaled logits of every token before the probe passes,
    `[B, q_heads, T - probes]` fp32, natural logarithms; None where the attention function in use does not return them.
    window, chunk, softcap: as of `LogitRules`. latents: of a module with latents and a cache, `[B, 1, T, rank]` and the
    rotated parts `[B, 1, T, rope]`, of which the module made keys and values. call: that of the module, and inputs:
    those of the layer `[B, T, width]`, where a policy needs them.
    """

    module: nn.Module
    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    lse: Tensor | None = None
    window: int | None = None
    chunk: int | None = None
    latents: tuple[Tensor, Tensor] | None = None
    call: Call | None = None
    inputs: Tensor | None = None
    softcap: float = 0.0

    @property
    def layer_idx(self) -> int:
        return layer_index(self.module)


def joined(pieces: Sequence[Attended]) -> Attended:
    """The states of a layer in several calls, one behind the other, as of one call."""
    return replace(
        pieces[0],
        queries=torch.cat([piece.queries for piece in pieces], dim=2),
        keys=torch.cat([piece.keys for piece in pieces], dim=2),
        values=torch.cat([piece.values for piece in pieces], dim=2),
    )


def layer_index(module: nn.Module) -> int:
    """Which layer of its model an attention module is in. Raises `PolicyUnsupported` where several layers share it."""
    index = getattr(module, "layer_idx", None)
    if index is None or index < 0:
        raise PolicyUnsupported(
            f"{type(module).__name__} does not say which layer it is in, as where several layers share one attention",
            param="model",
        )
    return int(index)


class ForwardContext(Protocol):
    """Observer of one forward pass, called after the attention of each layer. It may raise to end the pass.

    probe_lengths: lengths of the probe passes, which are the call's last tokens. Each pass sees its own tokens and the
    tokens before the first pass, but no other pass. reads_attention: whether it reads results of attention; if not, the
    last layer of a pass without logits has no attention, and no log-sum-exps. hides: whether `before_attention` is to
    be called before the attention over an attached cache, as it may hide tokens from those behind them.
    """

    @property
    def probe_lengths(self) -> tuple[int, ...]:
        return ()

    @property
    def reads_attention(self) -> bool:
        return True

    @property
    def hides(self) -> bool:
        return False

    def before_attention(self, layer: Attended) -> None:  # noqa: ARG002
        return None

    def after_attention(self, layer: Attended) -> None: ...


@contextmanager
def kvshelf_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block the model runs kvshelf's attention in eval mode; then it is as before."""
    with attention_selected(model, IMPLEMENTATION, attention):
        yield


@contextmanager
def attention_selected(model: PreTrainedModel, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside the block the model runs this attention function, under this name, in eval mode; then it is as before."""
    previous = model.config._attn_implementation
    training = [module for module in model.modules() if module.training] if model.training else []
    if previous != name:
        _register(name, function)
        model.set_attn_implementation(name)
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
        if previous != name:
            model.set_attn_implementation(previous)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | AttachedStates,
    value: Tensor | AttachedStates,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered function. query: `[B, q_heads, T, D]`; returns `[B, T, q_heads, Dv]` and no weights."""
    rules = logit_rules(module, query.shape[-1] ** -0.5 if scaling is None else scaling, kwargs)
    require_causal(module, attention_mask, kwargs)
    context: ForwardContext | None = kwargs.get(CONTEXT)
    handover: Handover | None = kwargs.get(LATENTS)
    latents = None if handover is None else handover.take(layer_index(module))
    lse = None
    over_past = None if latents is None else latents.attend(query, rules, kwargs.get("position_ids"))
    if over_past is not None:
        assert isinstance(key, Tensor)
        assert isinstance(value, Tensor)
        new_keys, new_values, out = key, value, over_past
    elif isinstance(key, AttachedStates):
        key.check_positions(kwargs.get("position_ids"))
        new_keys, new_values = key.new_keys, key.new_values
        if context is not None and context.hides:
            context.before_attention(Attended(module, query, new_keys, new_values, rules.scale))
        out = key.attend(query, rules)
    else:
        assert isinstance(value, Tensor)
        new_keys, new_values = key, value
        out, lse = _with_probes(query, key, value, rules, context.probe_lengths if context is not None else ())
        out = out.transpose(1, 2)
    if context is not None:
        cached = None if latents is None else (latents.latents, latents.rotated)
        attended = Attended(
            module,
            query,
            new_keys,
            new_values,
            rules.scale,
            lse,
            rules.window,
            rules.chunk,
            cached,
            softcap=rules.softcap,
        )
        context.after_attention(attended)
    return out.contiguous(), None


def logit_rules(module: nn.Module, scale: float, options: dict[str, Any]) -> LogitRules:
    """The rules for logits in a call of the attention function by this module. options: the call's keywords."""
    sinks = options.get("s_aux")
    softcap = options.get("softcap") or 0.0
    config = getattr(module, "config", None)
    window = hiding(options.get("sliding_window"), config)
    chunk = None if config is None else chunk_of(config, layer_index(module))
    return LogitRules(scale, softcap, None if sinks is None else sinks.float(), window, chunk)


def causal_mask(*, attention_mask: Tensor | None = None, allow_is_causal_skip: bool = True, **_: Any) -> None:
    """The registered mask function: no mask, because `attention` is causal by itself. Refuses calls that need one.

    Padding needs a mask: without it left-padded rows would silently be wrong.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise InvalidRequest(
            "the attention mask hides tokens (padding); kvshelf's attention takes rows of equal length without "
            "padding. Send one row at a time",
            param="attention_mask",
        )
    if not allow_is_causal_skip:
        raise PolicyUnsupported("the model asks for a mask that is not plainly causal, and kvshelf cannot attach to it")


def _with_probes(
    query: Tensor, key: Tensor, value: Tensor, rules: LogitRules, probe_lengths: tuple[int, ...]
) -> tuple[Tensor, Tensor | None]:
    """Causal attention of a document, and of each probe pass over the document and the pass itself. Also returns the
    document's log-sum-exps, as in `Attended`."""
    end = query.shape[2] - sum(probe_lengths)
    start = length = key.shape[2] - sum(probe_lengths)  # with a cache of transformers, more than the call's own tokens
    prefix = [StackedPrefix(key[0, :, :length], value[0, :, :length])]
    of_document, lse = _causal(query[:, :, :end], key[:, :, :length], value[:, :, :length], rules)
    outs = [of_document]
    for size, neighbours in groupby(probe_lengths):
        # One call for neighbours of one length: the cues of a document are hundreds of passes of a dozen tokens.
        passes = len(list(neighbours))
        tokens = passes * size
        rows = SuffixRows((size,) * passes, tuple(range(0, tokens, size)), size)
        suffix_keys, suffix_values = (  # [passes, kv_heads, T, D or Dv]
            states[0, :, start : start + tokens].reshape(states.shape[1], passes, size, states.shape[3]).transpose(0, 1)
            for states in (key, value)
        )
        queries = query[0, :, end : end + tokens].transpose(0, 1)  # [passes * T, q_heads, D]
        layout = BatchLayout((tokens,), (rows,), query.device, (length,))
        out = prefix_attention(queries, [prefix], [(suffix_keys, suffix_values)], layout, rules)  # [tokens, heads, Dv]
        outs.append(out.transpose(0, 1).unsqueeze(0))
        start, end = start + tokens, end + tokens
    return torch.cat(outs, dim=2) if probe_lengths else of_document, lse


def _causal(query: Tensor, key: Tensor, value: Tensor, rules: LogitRules) -> tuple[Tensor, Tensor | None]:
    num_queries, num_keys = query.shape[2], key.shape[2]
    if rules.chunk is not None:
        return _causal_in_chunks(query, key, value, rules, rules.chunk), None
    if rules.window is not None and num_keys <= rules.window:
        rules = replace(rules, window=None)
    if not rules.plain or (num_queries == num_keys and _returns_lse(query, key, value)):
        return causal_attention(query, key, value, rules)
    visible, causal = None, 1 < num_queries == num_keys
    if num_queries not in (1, num_keys):
        visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_queries)
    out = F.scaled_dot_product_attention(query, key, value, visible, 0.0, causal, scale=rules.scale, enable_gqa=True)
    return out, None


def _causal_in_chunks(query: Tensor, key: Tensor, value: Tensor, rules: LogitRules, chunk: int) -> Tensor:
    """As `_causal`, chunk by chunk, as no chunk sees another."""
    if query.shape[2] != key.shape[2]:
        raise PolicyUnsupported(
            "a layer with chunked attention continues a cache that is not kvshelf's, and nothing says where its chunks "
            "begin; give the whole text at once, or attach a compressed cache"
        )
    within = replace(rules, chunk=None)
    parts = zip(*(torch.split(states, chunk, dim=2) for states in (query, key, value)), strict=True)
    return torch.cat([_causal(q, k, v, within)[0] for q, k, v in parts], dim=2)


def _returns_lse(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch would run a whole causal call by the attention function that returns log-sum-exps.

    On a CPU only: kvshelf has not tested those of CUDA's functions.
    """
    if query.device.type != "cpu":
        return False
    flash = torch.nn.attention.SDPBackend.FLASH_ATTENTION.value
    return bool(torch._fused_sdp_choice(query, key, value, is_causal=True, enable_gqa=True) == flash)


def require_causal(module: nn.Module, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Refuse a call of the attention function that asks for more than causal attention."""
    if attention_mask is not None:
        raise InvalidRequest(
            "a prepared 4D attention mask was given; kvshelf's attention is causal over rows without padding",
            param="attention_mask",
        )
    if not getattr(module, "is_causal", True):
        raise PolicyUnsupported(f"{type(module).__name__} is not causal; kvshelf attaches to decoder-only models")
    if kwargs.get("dropout"):
        raise PolicyUnsupported("attention dropout is on; put the model in eval mode")
    for name in _CHANGES_THE_RESULT:
        if kwargs.get(name) is not None:
            raise PolicyUnsupported(f"{type(module).__name__} uses {name}, which kvshelf cannot reproduce yet")


def _register(name: str, function: Callable[..., Any]) -> None:
    # Imported where a model is about to run: it takes seconds, and processes that run none import this module too.
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, causal_mask)
