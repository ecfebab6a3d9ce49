"""Inputs and comparisons shared by the tests of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest difference from the fp64 reference, relative to the reference's largest element."""


def error(ours: Tensor, reference: Tensor) -> float:
    assert ours.shape == reference.shape
    assert not ours.isnan().any()
    return float((ours.double() - reference.double()).abs().max() / reference.double().abs().max())


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class LargestTensor(TorchDispatchMode):
    """`with LargestTensor() as largest:` `largest.numel` is the size of the largest tensor that any operation made, and
    `largest.bytes` that of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                self.numel = max(self.numel, result.numel())
                self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return results
