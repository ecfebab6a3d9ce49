"""Copies between the host and a device that nothing waits for, or that are waited for once.

A copy to or from memory that is not pinned waits for what the device is doing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def upload(tables: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tables of one dtype, made on the CPU, as contiguous tensors on the device, in one copy that nothing waits for; on
    the CPU these tables themselves, where they are contiguous."""
    if device.type == "cpu":
        return [table.contiguous() for table in tables]
    flat = torch.cat([table.flatten() for table in tables])
    if device.type == "cuda":
        flat = flat.pin_memory()
    parts = torch.split(flat.to(device, non_blocking=True), [table.numel() for table in tables])
    return [part.view(table.shape) for part, table in zip(parts, tables, strict=True)]


def upload_numbers(numbers: Sequence[int], device: torch.device) -> Tensor:
    """`[len(numbers)]` int64 on the device, likewise."""
    return upload([torch.tensor(numbers, dtype=torch.int64)], device)[0]


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU, waited for together; those of the CPU themselves."""
    made = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # which torch puts into pinned memory
    settle(tensor.device for tensor in tensors)
    return made


def settle(devices: Iterable[torch.device]) -> None:
    """Wait until what was queued on these devices is done, once for each."""
    for device in dict.fromkeys(devices):
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        elif device.type != "cpu" and torch.accelerator.is_available():  # else a kind that queues nothing
            torch.accelerator.synchronize(device)
