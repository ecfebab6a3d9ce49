"""What modules of a model are called with, for policies that need it (`Needs.CALL`, `Needs.INPUTS`)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from kvshelf.methods.policies.view import Call

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Calls:
    """The calls of one pass, each until it is taken."""

    def __init__(self, model: PreTrainedModel, modules: Sequence[nn.Module]) -> None:
        self._model = model
        self._modules = modules
        self._arguments: dict[nn.Module, Mapping[str, Any]] = {}

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Inside the block the model's modules run under hooks, which a pass by its program would not call."""
        handles = [module.register_forward_pre_hook(self._see, with_kwargs=True) for module in self._modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def take(self, module: nn.Module) -> Call:
        """The last call of a module."""
        return Call(self._model, self._arguments.pop(module))

    def _see(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._arguments[module] = dict(zip(inspect.signature(module.forward).parameters, given, strict=False)) | named


def with_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that know their layer, those of attention among them."""
    return [module for module in model.base_model.modules() if hasattr(module, "layer_idx")]
