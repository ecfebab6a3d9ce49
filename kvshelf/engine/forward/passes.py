"""Forward passes of one model, by its program where it has one, and otherwise by its own modules."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn import Embedding, LayerNorm, Linear, Module
from transformers.cache_utils import Cache

from kvshelf.artifact.shape import LayerShape
from kvshelf.engine.attention.attached import CACHE_ARGUMENT, AttachedCache, HandedOn, PassingLayer, with_readers
from kvshelf.engine.attention.attachment import Attached
from kvshelf.engine.attention.function import (
    CONTEXT,
    Attended,
    ForwardContext,
    attention,
    kvshelf_attention,
    logit_rules,
    require_causal,
)
from kvshelf.engine.attention.inspection import layer_shapes, tokens_at_once
from kvshelf.engine.attention.latents import Absorbed, Handover, absorbed_layers
from kvshelf.engine.facts import ModelFacts
from kvshelf.engine.forward.calls import TOKENS, AttentionCall, Calls
from kvshelf.engine.forward.program import ForwardProgram, Logits
from kvshelf.engine.forward.projection import Projection
from kvshelf.engine.soft import Placed, Soft, decoder_of, placed_states, soft_tokens
from kvshelf.errors import PolicyUnsupported
from kvshelf.kernels.native import Part
from kvshelf.kernels.prefix_attention import LogitRules
from kvshelf.model.caches import cache_class
from kvshelf.model.devices import Devices, hooked
from kvshelf.model.layers import LayerKind, counts_by_cache, readers
from kvshelf.model.prepacking import PackedLinear, TiedLinear

_LOG = logging.getLogger(__name__)

_TRIED: Final = (1, 7)
"""Numbers of tokens on which a recording is compared with the model: a step's, and a question's."""

_ROUNDING: Final = 1e-3
"""Largest difference of a recording's logit to that of the modules, over the largest logit."""

_ROUNDING_16: Final = 0.04
"""In 16 bits, the largest norm of the differences of all logits, over their norm: rounding changes single logits by
more than a fault would."""

_OWN_DTYPE: Final = (Linear, PackedLinear, TiedLinear, Embedding, LayerNorm)
"""Modules that only take numbers in the dtype of their weights."""


class Past(ForwardContext, Protocol):
    """The states that the tokens of a pass continue. It observes the pass, unless the pass is planned; then
    `checkpoint` is called between layers and may raise to end the pass.

    guesses: whether it takes early queries, `[1, q_heads, N, D]` times the scaling of logits, by `guess`. calls:
    records those of the modules, by which the model then runs, and makes early queries there; None where the method
    needs no calls. cache: as a model's modules use it; its layers return `AttachedStates`. handover: of its layers with
    latents. planned: whether `plan` may be called, which returns the attention of a layer, to be run later: see
    `attention_part`.
    """

    @property
    def cache(self) -> Cache: ...
    @property
    def handover(self) -> Handover: ...
    @property
    def planned(self) -> bool: ...
    @property
    def calls(self) -> Calls | None: ...
    @property
    def guesses(self) -> bool: ...
    def guess(self, layer: int, early: Tensor) -> None: ...
    def checkpoint(self) -> None: ...
    def plan(
        self, layer: int, states: tuple[Tensor, Tensor, Tensor], rules: LogitRules, out: Tensor
    ) -> Part | None: ...


class Passes:
    """Runs the passes of one model, on the thread that owns it. ranks: the processes that share the model's heads and
    run each pass together."""

    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts
        self.model = model = facts.model
        self.ranks = facts.ranks
        self.devices = Devices.of(model)
        self._hooked = hooked(model)
        self._counts_by_cache = counts_by_cache(model.config)
        self._reads = readers(facts.kinds)
        # A recording would have the lengths of the cache as constants, and no hooks.
        self._recordable = facts.recordable and not self._counts_by_cache and not self._hooked

    @cached_property
    def _decoder(self) -> Module:
        return decoder_of(self.model)

    @cached_property
    def absorbed(self) -> dict[int, Absorbed]:
        """The layers that have latents. Raises as `Absorbed.of`."""
        return absorbed_layers(self.model, self.devices.layers)

    @cached_property
    def tokens_at_once(self) -> int | None:
        return tokens_at_once(self.model, self.facts.kinds, self.absorbed)

    @cached_property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        """The layers of this model's caches, measured in a forward pass, as a configuration does not say them. Raises
        `PolicyUnsupported` where kvshelf does not see all of the model's attention, and where the windows are not those
        of the configuration. Every prefill reads them first, so that no work is done in vain."""
        shapes = layer_shapes(self.model, self.facts.kinds, self.absorbed)
        self.tokens_at_once  # noqa: B018 - raises, too
        if self.ranks is None:
            return shapes
        heads = self.facts.kv_heads // self.ranks.size
        for index, shape in enumerate(shapes):
            if shape.kv_heads != heads:
                raise PolicyUnsupported(
                    f"in layer {index} of {self.facts.name!r} each process has {shape.kv_heads} KV heads in place of "
                    f"{heads}, because transformers' plan for tensor parallelism does not share its attention; take "
                    "one process",
                    param="ranks",
                )
        return tuple(shape._replace(kv_heads=self.facts.kv_heads) for shape in shapes)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Of the layers. Raises as `layer_shapes`."""
        self.layer_shapes  # noqa: B018 - raises
        return self.facts.kinds

    @cached_property
    def projection(self) -> Projection:
        """Makes keys and values of residuals. Raises as `Projection.of` and `Projection.tried`."""
        return Projection.of(self._decoder, self.devices.layers, self.facts.max_tokens).tried

    @property
    def state_bytes(self) -> int:
        """Bytes of the states behind a document, over all layers."""
        return sum(state.nbytes for shape in self.layer_shapes for state in shape.states)

    def attached(self, document: Attached, longest: int | None = None) -> AttachedCache:
        """The cache for passes of this model behind a document. longest: as of an `AttachedCache`."""
        attached = cache_class(AttachedCache, self.model)
        return attached(document, longest, self.absorbed, self.tokens_at_once, self._reads)

    @cached_property
    def program(self) -> ForwardProgram | None:
        """The program of the model; None where it runs by its own modules."""
        return self._recorded(early=False)

    @cached_property
    def early_program(self) -> ForwardProgram | None:
        """The program in C that makes early queries, too: one product more in each layer."""
        return self._recorded(early=True) if self.program is not None and self.program.in_c else None

    def _recorded(self, *, early: bool) -> ForwardProgram | None:
        program = ForwardProgram.of(self.model, early=early) if self._recordable else None
        if program is None:
            return None
        why = f"what {TOKENS} tokens recorded gives other logits for fewer"
        try:
            if all(self._agrees(program, tokens) for tokens in _TRIED):
                return program
        except Exception as exc:
            # Whatever Triton raises of a kernel that it cannot compile, or that the card cannot run.
            if program.in_c:
                raise
            why = f"its program failed, {type(exc).__name__}: {exc}"
        _LOG.warning("%s runs by its own modules, which is slower: %s", type(self.model).__name__, why)
        return None

    @property
    def program_of_documents(self) -> ForwardProgram | None:
        """The program in C. On a GPU the model's modules run: products take the time of a pass over a document, and the
        values between them would take twice the memory in fp32."""
        return self.program if self.program is not None and self.program.in_c else None

    def _agrees(self, program: ForwardProgram, tokens: int) -> bool:
        """Whether the program's logits of a few tokens are those of the model's modules, up to rounding. A recording of
        code that reads the number of tokens would be wrong, and nothing else would show it."""
        positions = torch.arange(tokens, device=self.devices.inputs).unsqueeze(0)
        ids = positions % self.model.config.vocab_size

        with torch.no_grad(), kvshelf_attention(self.model):
            try:
                with _products_alone_rounded(self.model):
                    kwargs = self._without_past(positions, None)
                    expected = self.model(input_ids=ids, position_ids=positions, **kwargs).logits
            except RuntimeError:
                if self.model.dtype == torch.float32:
                    raise
                return False  # a module of the model's code only takes numbers in the dtype of its weights
            logits = program.run(ids, positions, _attention_of)
            recorded = None if logits is None else logits(positions[0])
        if recorded is None:
            return False
        if self.model.dtype != torch.float32:
            return _difference(recorded.float(), expected.float()) <= _ROUNDING_16
        scale = expected.nan_to_num().abs().max().item()
        return torch.allclose(recorded, expected, rtol=_ROUNDING, atol=_ROUNDING * scale, equal_nan=True)

    def causal(
        self,
        inputs: Mapping[str, Tensor],
        context: ForwardContext,
        *,
        logits: bool = False,
        cache: Callable[[Handover], Cache] | None = None,
        soft: Soft | None = None,
        calls: Calls | None = None,
        placed: Placed | None = None,
    ) -> Logits | None:
        """One pass over `input_ids` at `position_ids`, `[1, N]`. Without `logits` nothing runs that only these need.
        cache: makes an empty one, for a model whose modules store states there; such a model has no program. soft:
        learned tokens among those of the pass; placed: images among them; calls: records those of modules. With any of
        the three the model runs by its own modules."""
        learned = nullcontext() if soft is None else soft_tokens(self.model, soft)
        recorded = nullcontext() if calls is None else calls.recorded()
        images = nullcontext() if placed is None else placed_states(self.model, placed)
        by_modules = soft is not None or calls is not None or placed is not None
        program = None if by_modules else self.program_of_documents
        with torch.no_grad(), kvshelf_attention(self.model), learned, recorded, images:
            if program is None:
                kwargs = {**inputs, CONTEXT: context, **self._without_past(inputs["position_ids"], cache)}
                states = self._decoder(**kwargs)
                return partial(self._head, states.last_hidden_state) if logits else None

            def attend(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
                if not logits and self._ends_at(call, query, key, value, context):
                    return None
                return _attention_of(call, query, key, value, **{CONTEXT: context})

            head = program.run(inputs["input_ids"], inputs["position_ids"], attend)
            return head if logits else None

    def _head(self, states: Tensor, kept: Tensor) -> Tensor:
        """Logits `[1, kept, vocabulary]` of the last layer's states `[1, N, width]` of some tokens. The model's own
        code makes them, at the end of a pass over one token, because some models scale or cap their logits behind the
        head."""
        rows = states.index_select(1, kept.to(states.device))

        def replace_states(_module: Module, _args: Any, output: Any) -> Any:
            output.last_hidden_state = rows
            return output

        device = self.devices.inputs
        ids, positions = torch.zeros(2, 1, 1, dtype=torch.long, device=device)
        hook = self._decoder.register_forward_hook(replace_states)
        try:
            with torch.no_grad(), kvshelf_attention(self.model):
                kwargs = self._without_past(positions, None)
                logits: Tensor = self.model(input_ids=ids, position_ids=positions, **kwargs).logits
        finally:
            hook.remove()
        return logits

    def behind(self, token_ids: Tensor, positions: Tensor, past: AttachedCache, context: ForwardContext) -> None:
        """One pass over tokens `[rows, T]` that continue an attached cache, observed by `context`. There are no logits,
        and nothing runs that only logits need."""
        program = self.program_of_documents
        if program is None or token_ids.shape[0] > 1:
            kwargs = {CACHE_ARGUMENT: past, CONTEXT: context}
            self.model.base_model(input_ids=token_ids, position_ids=positions, use_cache=True, **kwargs)
            return
        past.begin(rows=1)

        def attend(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
            states, _ = past.layers[call.layer].update(key, value)
            if self._ends_at(call, query, key, value, context):
                return None
            return _attention_of(call, query, states, states, **{CONTEXT: context})

        program.run(token_ids, positions, attend)

    def _ends_at(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, context: ForwardContext) -> bool:
        """Whether a pass without logits ends before this attention, the last, which `context` does not read. Then
        `context` has observed the layer's states."""
        if call.layer < self.model.config.num_hidden_layers - 1 or context.reads_attention:
            return False
        rules = logit_rules(call.module, call.scale(query), call.options)
        context.after_attention(
            Attended(call.module, query, key, value, rules.scale, window=rules.window, chunk=rules.chunk)
        )
        return True

    def _without_past(self, positions: Tensor, make: Callable[[Handover], Cache] | None) -> dict[str, Any]:
        """The keywords about a cache of a pass without a past. make: the caller's cache; None: no cache, or one that
        only passes latents on or has the positions of the tokens."""
        handover = Handover(self.absorbed)
        if make is None and not self.absorbed and not self._counts_by_cache and not self._reads:
            return {"use_cache": False}
        if make is not None:
            cache = make(handover)
        else:
            numbers = range(self.model.config.num_hidden_layers)
            layers = [HandedOn(i, handover) if i in self.absorbed else PassingLayer() for i in numbers]
            cache = Cache(layers=with_readers(layers, self._reads))
        return {"use_cache": True, CACHE_ARGUMENT: cache, **handover.begin(), **self._place(positions, cache)}

    def _place(self, positions: Tensor, cache: Cache) -> dict[str, Tensor]:
        """Put the positions of a pass into a cache by whose length the model counts them. Returns keywords for the
        pass: older versions of transformers 5 count positions apart from the cache."""
        if not self._counts_by_cache:
            return {}
        before = positions[0] - torch.arange(positions.shape[1], device=positions.device)
        for layer, device in zip(cache.layers, self.devices.layers, strict=True):
            layer.before = before.to(device)
        return {"cache_position": positions[0]}

    @contextmanager
    def _decoder_with(self, keywords: Mapping[str, Any]) -> Iterator[None]:
        """Inside the block the decoder gets these keywords, too, in every call of its model: GPT-2's passes none on to
        it in transformers 5.2."""

        def add(_module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, {**kwargs, **keywords}

        hook = self._decoder.register_forward_pre_hook(add, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def continuing(self, token_ids: Tensor, positions: Tensor, past: Past, kept: Tensor) -> Tensor:
        """Logits `[1, kept, vocabulary]` of one pass over tokens `[1, N]` that continue `past`."""

        def plan(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> Part | None:
            require_causal(call.module, None, call.options)
            rules = logit_rules(call.module, call.scale(query), call.options)
            return past.plan(call.layer, (query, key, value), rules, out)

        recorded = nullcontext() if past.calls is None else past.calls.recorded()
        with torch.no_grad(), kvshelf_attention(self.model), recorded:
            logits = None
            program = self.early_program if past.guesses else self.program
            before = past.guess if past.guesses else None
            if program is not None and program.in_c and past.planned:
                logits = program.run_planned(token_ids, positions, plan, kept, past.checkpoint, before)
            return logits if logits is not None else self._by_layer(program, token_ids, positions, past, kept)

    def _by_layer(
        self, program: ForwardProgram | None, token_ids: Tensor, positions: Tensor, past: Past, kept: Tensor
    ) -> Tensor:
        keywords: dict[str, Any] = {CONTEXT: past, **past.handover.begin()}
        if program is None:
            placed = self._place(positions, past.cache)
            with self._decoder_with(keywords):
                logits: Tensor = self.model(
                    input_ids=token_ids,
                    position_ids=positions,
                    use_cache=True,
                    # Hooks would move a tensor to another device than that of the states that it indexes.
                    logits_to_keep=kept.tolist() if self._hooked else kept,
                    **{CACHE_ARGUMENT: past.cache},
                    **placed,
                ).logits
            return logits

        def attend(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            states, _ = past.cache.layers[call.layer].update(key, value)
            return _attention_of(call, query, states, states, **keywords)

        head = program.run(token_ids, positions, attend, past.guess if past.guesses else None)
        assert head is not None
        return head(kept)


def _difference(actual: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of `expected`; infinite where NaN stands in other places."""
    if not torch.equal(actual.isnan(), expected.isnan()):
        return math.inf
    return float((actual - expected).nan_to_num().norm() / expected.nan_to_num().norm().clamp_min(1e-30))


@contextmanager
def _products_alone_rounded(model: Module) -> Iterator[None]:
    """Inside the block modules of a model in 16 bits compute in fp32 between its products, as a recording does. Where
    there are large numbers, rounding all of it changes the logits by a third."""
    if model.dtype == torch.float32:
        yield
        return

    def narrow(module: Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(x.to(module.weight.dtype) if torch.is_floating_point(x) else x for x in args)

    weighted = [m for m in model.modules() if isinstance(m, _OWN_DTYPE)]
    handles = [module.register_forward_pre_hook(narrow) for module in weighted]
    handles += [module.register_forward_hook(lambda _module, _args, out: out.float()) for module in weighted]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _attention_of(call: AttentionCall, query: Tensor, key: Any, value: Any, **keywords: Any) -> Tensor:
    """kvshelf's attention, with the arguments of the module of this call."""
    return attention(call.module, query, key, value, None, call.scaling, **call.options, **keywords)[0]
