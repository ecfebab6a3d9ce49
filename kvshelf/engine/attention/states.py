"""Layers with recurrent or convolution states, as transformers' modules see them (`Cache.get_recurrent_state`, ...).

A pass has a copy of the states, `[rows, ...]`, because modules write into them: a pass that fails leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache

from kvshelf.artifact.records import State
from kvshelf.artifact.shape import StateRole

SUPPORTED: Final = hasattr(Cache, "get_recurrent_state")
"""Whether this transformers keeps states in the layers of a cache. Before, each model had a class of caches."""


class _Stateless:
    """Stands for transformers' class of layers with states where there is none yet, and then no layer has states."""

    is_sliding = False
    is_initialized = True

    def __init__(self, number_of_states: int) -> None:
        assert number_of_states == 0
        self.number_of_states = 0
        self.conv_states: dict[int, Tensor] = {}
        self.recurrent_states: dict[int, Tensor] = {}
        self.device = None

    def reorder_cache(self, indices: Tensor) -> None:
        """There are no rows to order."""


_Layer: Any = getattr(cache_utils, "LinearAttentionLayer", _Stateless)

Source = Callable[[], Sequence[State]]
"""The states with which a pass begins, `[rows, ...]`, for the pass alone."""


class StateLayer(_Layer):  # type: ignore[misc]
    """One layer of a `StatefulCache`. Without a source it begins before any token."""

    is_compileable = False

    def __init__(self, number_of_states: int, source: Source | None = None) -> None:
        _Layer.__init__(self, number_of_states=number_of_states)
        self._source = source
        self._begun = False

    def begin(self) -> None:
        """Take the states of the source, once."""
        if not self._begun and self._source is not None:
            self._begun = True
            fill(self, self._source())

    def states(self) -> list[State]:
        """The states behind the last token, `[rows, ...]`."""
        roles: dict[StateRole, Any] = {"conv": self.conv_states, "recurrent": self.recurrent_states}
        tensors = [(role, number, tensor) for role, of_role in roles.items() for number, tensor in of_role.items()]
        return [State(*state) for state in tensors if state[2] is not None]

    def reset(self) -> None:
        """Begin again with the states of the source."""
        _Layer.__init__(self, number_of_states=self.number_of_states)
        self._begun = False

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = next((len(state.tensor) for state in self.states()), 0)
        self.reorder_cache(torch.arange(rows, device=self.device).repeat_interleave(repeats))


class StatefulCache(Cache):  # type: ignore[misc]
    """A transformers `Cache` whose layers may have states, which begin when the model asks for them: by then a layer
    that was still being read has arrived."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        self._begin(layer_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        self._begin(layer_idx)
        return super().get_recurrent_state(layer_idx, state_idx)

    def states(self) -> list[list[State]]:
        """The states of each layer behind the last token, `[rows, ...]`; an empty list for a layer without."""
        return [layer.states() if isinstance(layer, StateLayer) else [] for layer in self.layers]

    def _begin(self, layer_idx: int) -> None:
        layer = self.layers[layer_idx]
        if isinstance(layer, StateLayer):
            layer.begin()


def fill(layer: Any, states: Sequence[State]) -> None:
    """Put states `[rows, ...]` into a layer of transformers' own, which will write into them."""
    for role, number, tensor in states:
        layer.dtype, layer.device = tensor.dtype, tensor.device
        if role == "conv":
            layer.conv_states[number] = tensor
            layer.conv_kernel_size[number] = tensor.shape[-1]
            layer.is_conv_states_initialized[number] = True
        else:
            layer.recurrent_states[number] = tensor
            layer.is_recurrent_states_initialized[number] = True
        layer.has_previous_state[number] = True


def alone(states: Sequence[State], row: int) -> tuple[State, ...]:
    """The states of one row, `[...]`, which share the memory of all rows."""
    return tuple(state._replace(tensor=state.tensor[row]) for state in states)


def together(rows: Sequence[Sequence[State]]) -> list[State]:
    """A copy of the states of several rows, equally many and of equal shapes in each, as `[rows, ...]`."""
    return [
        states[0]._replace(tensor=torch.stack([state.tensor for state in states])) for states in zip(*rows, strict=True)
    ]
