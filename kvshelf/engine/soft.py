"""What stands in the place of tokens' embeddings in a pass of the model: learned tokens, with low-rank additions for
their rows alone (LookaheadKV, arXiv 2603.10899), and images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

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


@contextmanager
def placed_states(model: PreTrainedModel, placed: Placed) -> Iterator[None]:
    """Inside the block the model's modules run with these states in the place of the embeddings at `placed.rows`."""

    def hook(_module: nn.Module, _given: Any, out: Tensor) -> Tensor:
        return out.index_copy(1, placed.rows.to(out.device), placed.states.to(out).expand(len(out), -1, -1))

    handle = model.get_input_embeddings().register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def soft_tokens(model: PreTrainedModel, soft: Soft) -> Iterator[None]:
    """Inside the block the model's modules run with learned tokens in the place of those at `soft.rows`; the rows of
    others are as without. The model is as before when the block ends."""
    layers = model.base_model.layers
    handles = [model.get_input_embeddings().register_forward_hook(_embedding(soft))]
    for name, down in soft.tensors.items():
        if name.endswith(".a"):
            index, _, module = name.removesuffix(".a").partition(".")
            hook = _addition(down, soft.tensors[name.removesuffix("a") + "b"], soft.rows)
            handles.append(layers[int(index)].get_submodule(module).register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _embedding(soft: Soft) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    def hook(_module: nn.Module, _given: Any, out: Tensor) -> Tensor:
        return _replaced(out, soft.rows, soft.tensors["soft"].to(out).expand(len(out), -1, -1))

    return hook


def _addition(down: Tensor, up: Tensor, rows: slice) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    def hook(_module: nn.Module, given: Any, out: Tensor) -> Tensor:
        own = given[0][:, rows]
        added = own @ down.to(own).T @ up.to(own).T * (ALPHA / len(down))
        return _replaced(out, rows, out[:, rows] + added)

    return hook


def _replaced(states: Tensor, rows: slice, own: Tensor) -> Tensor:
    """`states` `[B, T, n]` with others at `rows`. Copied: gradients go through them."""
    return torch.cat([states[:, : rows.start], own, states[:, rows.stop :]], dim=1)
