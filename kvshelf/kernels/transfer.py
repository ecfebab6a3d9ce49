"""Copies between the host and a device that nothing waits for, or that are waited for once.

A copy to or from memory that is not pinned waits for the work of the device.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host, with any content, for copies to this device or from it: pinned for a card. Where the host
    pins no more it is other memory, whose copies are waited for; a warning says so, once."""
    if device.type == "cuda":
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            _say_unpinned(str(error).partition("\n")[0])
    return torch.empty(shape, dtype=dtype)


@cache
def _say_unpinned(reason: str) -> None:
    _LOG.warning("the host pins no memory for copies of a GPU, which are slower for it: %s", reason)


def upload(tables: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tables of one dtype, made on the CPU, as contiguous tensors on the device, in one copy that nothing waits for; on
    the CPU these tables themselves, where they are contiguous."""
    if device.type == "cpu":
        return [table.contiguous() for table in tables]
    flat = host_memory([sum(table.numel() for table in tables)], tables[0].dtype, device)
    torch.cat([table.flatten() for table in tables], out=flat)
    parts = torch.split(flat.to(device, non_blocking=True), [table.numel() for table in tables])
    return [part.view(table.shape) for part, table in zip(parts, tables, strict=True)]


def upload_numbers(numbers: Sequence[int], device: torch.device) -> Tensor:
    """`[len(numbers)]` int64 on the device, likewise."""
    return upload([torch.tensor(numbers, dtype=torch.int64)], device)[0]


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU, waited for together; those of the CPU themselves."""
    copies = [
        tensor
        if tensor.device.type == "cpu"
        else host_memory(tensor.shape, tensor.dtype, tensor.device).copy_(tensor, non_blocking=True)
        for tensor in tensors
    ]
    settle(tensor.device for tensor in tensors)
    return copies


def settle(devices: Iterable[torch.device]) -> None:
    """Wait for the queued work of these devices, once for each."""
    for device in dict.fromkeys(devices):
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        elif device.type != "cpu" and torch.accelerator.is_available():  # else a kind that queues nothing
            torch.accelerator.synchronize(device)
