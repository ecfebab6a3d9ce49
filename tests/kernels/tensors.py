"""Inputs and comparisons shared by the tests of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest difference from the fp64 reference, relative to the reference's largest element."""


def error(ours: Tensor, reference: Tensor) -> float:
    assert ours.shape == reference.shape
    assert not ours.isnan().any()
    return float((ours.double() - reference.double()).abs().max() / reference.double().abs().max())


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
