"""What stands in the place of tokens' embeddings in a pass of the model: learned tokens, with low-rank additions for
their rows alone (LookaheadKV, arXiv 2603.10899), and images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from kvshelf.kernels.staging import carried

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALPHA: Final = 32.0
"""An addition of rank r is multiplied by this / r."""


class Soft(NamedTuple):
    """Learned tokens, and which tokens of a pass they are. tensors: by their names in a gate file."""

    tensors: Mapping[str, Tensor]
    rows: slice


class Placed(NamedTuple):
    """States in the place of embeddings. rows: the tokens of a pass, `[n]`; states: theirs, `[n, width]`."""

    rows: Tensor
    states: Tensor


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The model without its head. For Llama 4's text model transformers takes the whole for its base."""
    base: nn.Module = model.base_model
    return base if base is not model else model.get_submodule("model")


class _OwnPass:
    """Whether the pass of a block runs, and none inside it: between two layers of a prefill the questions of others are
    answered, by the same modules. Counts how deep the calls of the decoder are nested."""

    def __init__(self, model: PreTrainedModel) -> None:
        decoder, self._depth = decoder_of(model), 0
        begins = decoder.register_forward_pre_hook(lambda *_: self._count(1))
        self.handles = [begins, decoder.register_forward_hook(lambda *_: self._count(-1), always_call=True)]

    def _count(self, change: int) -> None:
        self._depth += change

    def change(self, module: nn.Module, changed: Callable[[Any, Tensor], Tensor]) -> None:
        """Have the module give `changed(its arguments, its output)` in that pass."""

        def hook(_module: nn.Module, arguments: Any, out: Tensor) -> Tensor:
            return changed(arguments, out) if self._depth == 1 else out

        self.handles.append(module.register_forward_hook(hook))

    def end(self) -> None:
        for handle in self.handles:
            handle.remove()


@contextmanager
def _own_pass(model: PreTrainedModel) -> Iterator[_OwnPass]:
    own = _OwnPass(model)
    try:
        yield own
    finally:
        own.end()


@contextmanager
def placed_states(model: PreTrainedModel, placed: Placed) -> Iterator[None]:
    """Inside the block the model's modules run with these states in the place of the embeddings at `placed.rows`;
    passes that run inside one of them are as without."""

    def put(_arguments: Any, out: Tensor) -> Tensor:
        return out.index_copy(1, placed.rows.to(out.device), placed.states.to(out).expand(len(out), -1, -1))

    with _own_pass(model) as own:
        own.change(model.get_input_embeddings(), put)
        yield


@contextmanager
def soft_tokens(model: PreTrainedModel, soft: Soft) -> Iterator[None]:
    """Inside the block the model's modules run with learned tokens in the place of those at `soft.rows`; the rows of
    others, and passes that run inside one of them, are as without. The model is as before when the block ends."""

    embeddings = model.get_input_embeddings()
    tensors, device = dict(soft.tensors), embeddings.weight.device
    if device.type == "cuda":  # together, and queued
        tensors = dict(zip(tensors, carried(list(tensors.values()), device, {}), strict=True))

    def put(_arguments: Any, out: Tensor) -> Tensor:
        return _replaced(out, soft.rows, tensors["soft"].to(out).expand(len(out), -1, -1))

    with _own_pass(model) as own:
        own.change(embeddings, put)
        for name, down in tensors.items():
            if name.endswith(".a"):
                index, _, module = name.removesuffix(".a").partition(".")
                added = _addition(down, tensors[name.removesuffix("a") + "b"], soft.rows)
                own.change(model.base_model.layers[int(index)].get_submodule(module), added)
        yield


def _addition(down: Tensor, up: Tensor, rows: slice) -> Callable[[Any, Tensor], Tensor]:
    def changed(arguments: Any, out: Tensor) -> Tensor:
        own = arguments[0][:, rows]
        added = own @ down.to(own).T @ up.to(own).T * (ALPHA / len(down))
        return _replaced(out, rows, out[:, rows] + added)

    return changed


def _replaced(states: Tensor, rows: slice, own: Tensor) -> Tensor:
    """`states` `[B, T, n]` with others at `rows`. Copied: gradients go through them."""
    return torch.cat([states[:, : rows.start], own, states[:, rows.stop :]], dim=1)
