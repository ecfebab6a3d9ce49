"""The calls of a model's modules: their arguments, for methods that need them (`Needs.CALL`, `Needs.INPUTS`,
`Needs.EARLY`), and their operations, as torch traces them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.cache_utils import Cache

from kvshelf.engine.attention.attached import CACHE_ARGUMENT, PassingLayer
from kvshelf.engine.attention.function import CONTEXT, Attended, ForwardContext, attention_selected
from kvshelf.methods.policies.view import Call
from kvshelf.model.layers import layer_kinds, readers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


TOKENS: Final = 1009
"""Tokens of the traced pass. A prime that is no size of a model, so that a dimension of 1,009 is that of tokens."""

_IMPLEMENTATION: Final = "kvshelf-trace"


class Calls:
    """The calls of some modules in one pass; each is kept until it is taken."""

    def __init__(self, model: PreTrainedModel, modules: Sequence[nn.Module]) -> None:
        self._model = model
        self._modules = modules
        self._arguments: dict[nn.Module, Mapping[str, Any]] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside the block the modules run under hooks, which a pass by the model's program would not call."""

        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._arguments[module] = (
                dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
            )

        handles = [module.register_forward_pre_hook(record, with_kwargs=True) for module in self._modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def take(self, module: nn.Module) -> Call:
        """The last call of a module."""
        return Call(self._model, self._arguments.pop(module))


class EarlyQueries(Calls):
    """The queries of each attention module of a pass for the input of the module before it (InfiniGen, arXiv
    2406.19707). The module's own code makes them, so that norms, biases and rotations are the model's."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, with_layers(model))
        self._before: Tensor | None = None

    def of(self, module: nn.Module) -> Tensor | None:
        """`[B, q_heads, T, D]`, times the scaling of logits; None for the first module. To be called for each module in
        turn while it runs."""
        arguments = self.take(module).arguments
        name = next(iter(inspect.signature(module.forward).parameters))  # the first is the input
        before, self._before = self._before, arguments[name]
        if before is None:
            return None
        without = {key: None if isinstance(value, Cache) else value for key, value in arguments.items()}
        try:
            module.forward(**{**without, name: before.to(arguments[name].device), CONTEXT: _EndsAtAttention()})
        except _EndedAtAttention as end:
            return end.layer.queries * end.layer.scaling
        raise AssertionError("an attention module that does not call its attention")


class _EndedAtAttention(Exception):
    def __init__(self, layer: Attended) -> None:
        super().__init__()
        self.layer = layer


class _EndsAtAttention(ForwardContext):
    def after_attention(self, layer: Attended) -> NoReturn:
        raise _EndedAtAttention(layer)


def with_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules with a `layer_idx`, those of attention among them."""
    return [module for module in model.base_model.modules() if hasattr(module, "layer_idx")]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of the attention function: the calling module, and its arguments beside queries, keys and values."""

    module: nn.Module
    scaling: float | None
    options: dict[str, Any]

    def scale(self, query: Tensor) -> float:
        """The factor of logits of queries `[..., D]`."""
        return query.shape[-1] ** -0.5 if self.scaling is None else self.scaling

    @property
    def layer(self) -> int:
        return int(self.module.layer_idx)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Trace:
    """graph: from token ids and positions, both `[1, TOKENS]`, to the logits of all tokens. Its attentions are calls of
    `kvshelf::traced_attention`, in the order of `calls`; the fourth argument is the early query, where those are
    recorded."""

    graph: fx.GraphModule
    calls: list[AttentionCall]


@torch.library.custom_op("kvshelf::traced_attention", mutates_args=())
def traced_attention(query: Tensor, key: Tensor, value: Tensor, early: Tensor | None) -> Tensor:  # noqa: ARG001
    """Stands for an attention in a trace; it is never run. `[1, heads, T, D]` to `[1, T, q_heads, Dv]`."""
    raise AssertionError("an attention of a trace is carried out by the caller of the program")


@traced_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, early: Tensor | None) -> Tensor:  # noqa: ARG001
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1])


def trace(model: PreTrainedModel, *, early: bool = False) -> Trace:
    """Record one pass. Nothing is computed: tensors have shapes alone. Raises any error of the model's code on such
    tensors, as where it looks at their numbers. early: with the `EarlyQueries` of each attention but the first."""
    recorder = _Recorder(EarlyQueries(model) if early else None)
    layers, reads = model.config.num_hidden_layers, readers(layer_kinds(model.config))

    def forward(token_ids: Tensor, positions: Tensor) -> Tensor:
        cache = Cache(layers=[_NoCache(recorder, reads.get(layer)) for layer in range(layers)])
        out = model(input_ids=token_ids, position_ids=positions, use_cache=True, **{CACHE_ARGUMENT: cache})
        logits: Tensor = out.logits
        return logits

    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device=model.device)
    positions = torch.arange(TOKENS, device=model.device).unsqueeze(0)
    recorded = nullcontext() if recorder.early is None else recorder.early.recorded()
    with torch.no_grad(), attention_selected(model, _IMPLEMENTATION, recorder.attention), recorded:
        graph = make_fx(forward, tracing_mode="fake", _allow_non_fake_inputs=True)(ids, positions)
    graph.graph.eliminate_dead_code()
    return Trace(graph, recorder.calls)


@dataclass(eq=False)
class _Recorder:
    """states: the keys and values of each layer so far. visible: those that the last layer of the cache returned."""

    early: EarlyQueries | None
    calls: list[AttentionCall] = field(default_factory=list)
    visible: tuple[Tensor, Tensor] | None = None
    states: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        scaling: float | None = None, **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert attention_mask is None, "the mask function makes none"
        call = AttentionCall(module, scaling, {name: at for name, at in options.items() if not isinstance(at, Tensor)})
        if (context := options.get(CONTEXT)) is not None:  # of the early query, which ends here
            context.after_attention(Attended(module, query, key, value, call.scale(query)))
        if self.visible is None or self.visible[0] is not key or self.visible[1] is not value:
            raise ValueError("attention to other keys and values than those that the layer of the cache was just given")
        self.visible = None
        self.calls.append(call)
        early = None if self.early is None else self.early.of(module)
        return traced_attention(query, key, value, early), None


class _NoCache(PassingLayer):
    """A layer that hands its keys and values to the recorder."""

    def __init__(self, recorder: _Recorder, reads: int | None) -> None:
        """reads: the layer whose keys and values this one uses, if it is another."""
        super().__init__()
        self._recorder = recorder
        self._reads = reads

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        states = self._recorder.states
        states.append((key_states, value_states))
        self._recorder.visible = states[-1 if self._reads is None else self._reads]
        return self._recorder.visible
