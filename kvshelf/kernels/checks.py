"""Checks that every operation runs on its tensors before any work."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvshelf.errors import InvalidTensor

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of states."""


def require(holds: bool, operation: str, problem: str, **tensors: Tensor) -> None:
    """Raise `InvalidTensor` unless `holds`, with the problem and the shape, dtype and strides of each tensor."""
    if holds:
        return
    shown = ", ".join(
        f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} strides {list(tensor.stride())}"
        for name, tensor in tensors.items()
    )
    raise InvalidTensor(f"{operation}: {problem}; given {shown}")


def require_states(operation: str, dims: Mapping[str, int], **tensors: Tensor) -> None:
    """Require that each tensor has its number of dimensions in `dims`, and all of them one floating dtype, one device
    and a contiguous last dimension (others may have any stride: models give transposed views, read in place)."""
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        problem = _problem(name, tensor, dims[name], first)
        require(not problem, operation, problem, **tensors)


def _problem(name: str, tensor: Tensor, dims: int, first: Tensor) -> str:
    """The problem of a tensor of states; "" if there is none."""
    if tensor.dim() != dims:
        return f"{name} must have {dims} dimensions"
    if tensor.dtype not in FLOATING:
        return f"{name} must be float32, bfloat16 or float16"
    if tensor.dtype != first.dtype:
        return "all must have one dtype"
    if tensor.device != first.device:
        return "all must be on one device"
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        return f"the last dimension of {name} must be contiguous; call .contiguous() on it"
    return ""
