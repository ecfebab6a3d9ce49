"""The segments of a blob in memory: as bytes, and as tensors that share them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Body:
    """All segments of a blob, one after the other. Neither the memory nor the tensors that view it may change."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self._bytes = as_tensor(memory)
        self._numbers: dict[torch.dtype, Tensor] = {}

    def tensor(self, offset: int, dtype: torch.dtype, *shape: int) -> Tensor:
        """The numbers from byte `offset` on, a multiple of their size. `shape` has one or two dimensions."""
        numbers = self._numbers.get(dtype)
        if numbers is None:
            whole = self._bytes[: len(self._bytes) // dtype.itemsize * dtype.itemsize]
            if whole.data_ptr() % dtype.itemsize:
                # Bytes that lie at an odd address (a slice of a larger message) cannot be viewed as numbers.
                whole = whole.clone()
            numbers = self._numbers[dtype] = whole.view(dtype)
        # In one step: slicing and then shaping a view takes three times as long, and a cache has many tensors.
        return numbers.as_strided(shape, (shape[1], 1) if len(shape) == 2 else (1,), offset // dtype.itemsize)


def as_tensor(memory: memoryview) -> Tensor:
    """`[bytes]` uint8, sharing the memory."""
    return torch.from_numpy(np.asarray(_SharedBytes(memory)))


class _SharedBytes:
    """Presents bytes to numpy as an array that torch takes without a copy.

    Given read-only memory, torch prints a warning, once per process; copying the blob instead would cost more than
    verifying it. The documentation forbids writing to the tensors.
    """

    def __init__(self, data: memoryview) -> None:
        array = np.frombuffer(data, np.uint8)
        self._owner = array  # keeps the memory alive for as long as a tensor views it
        address = int(array.__array_interface__["data"][0])
        self.__array_interface__ = {"version": 3, "shape": array.shape, "typestr": "|u1", "data": (address, False)}
