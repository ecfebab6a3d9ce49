"""The arguments of a model's modules, for methods that need them (`Needs.CALL`, `Needs.INPUTS`, `Needs.EARLY`)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvshelf.engine.attention.function import CONTEXT, Attended, ForwardContext
from kvshelf.methods.policies.view import Call

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
