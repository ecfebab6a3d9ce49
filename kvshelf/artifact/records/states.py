"""States of a layer, beside its entries or without any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kvshelf.artifact.packed import Packed
from kvshelf.artifact.records.parts import Parts
from kvshelf.artifact.shape import StateRole, StateShape


class State(NamedTuple):
    """A recurrent state of a layer, or the last inputs of its convolution, behind the document's last token. number: of
    the states of this role in the layer. tensor: `[...]`, without a dimension for rows."""

    role: StateRole
    number: int
    tensor: Tensor

    @property
    def shape(self) -> StateShape:
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return StateShape(self.role, self.number, dtype, tuple(self.tensor.shape))


@dataclass(frozen=True, eq=False)
class States:
    """A layer that keeps more than entries, or none: a linear attention, a convolution, an MLP alone (no states, no
    entries). Kept verbatim under every policy and codec: states do not grow with the document.

    They cannot be shared as entries are: each token that follows changes them, so a row of a batch needs its own copy.
    """

    kind: ClassVar[str] = "states"

    states: tuple[State, ...]
    beside: Packed | Parts | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held in memory, the entries' included."""
        return self.states_nbytes + (self.beside.nbytes if self.beside is not None else 0)

    @property
    def states_nbytes(self) -> int:
        """Bytes of the states alone."""
        return sum(state.tensor.nbytes for state in self.states)

    def to(self, device: torch.device | str) -> States:
        """The same record on another device."""
        states = tuple(state._replace(tensor=state.tensor.to(device)) for state in self.states)
        return States(states, self.beside.to(device) if self.beside is not None else None)
