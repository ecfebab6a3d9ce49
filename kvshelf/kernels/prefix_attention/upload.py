"""Copies tables made on the host to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(tables: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tables of one dtype, made on the CPU, as contiguous tensors on the device, in one copy that nothing waits for; on
    the CPU these tables themselves, where they are contiguous."""
    if device.type == "cpu":
        return [table.contiguous() for table in tables]
    flat = torch.cat([table.flatten() for table in tables])
    if device.type == "cuda":
        flat = flat.pin_memory()  # a copy from any other memory waits for what the device is doing
    parts = torch.split(flat.to(device, non_blocking=True), [table.numel() for table in tables])
    return [part.view(table.shape) for part, table in zip(parts, tables, strict=True)]
