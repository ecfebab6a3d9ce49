"""What a pass does that no CUDA graph can hold, seen while it runs. A capture that fails is worse than none: CUDA's
error does not say what did it, and torch's allocator may not get over it (pytorch/pytorch#180395)."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_BY_NUMBERS: Final = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`with Waits(device) as waits:` the `first` operation of this thread that waits for the device or brings numbers
    to it, by its name; None: none does."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.first: str | None = None
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.first is None and self._waits(func, args, kwargs):
            self.first = func.name()
        return func(*args, **kwargs)

    def _waits(self, func: Any, args: Any, kwargs: Any) -> bool:
        if func is _ATEN.index.Tensor:
            return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if func is _ATEN.lift_fresh.default:  # of `torch.tensor`, whose numbers are then where they go
            return bool(args[0].device.type == self._device.type)
        if func is _ATEN._to_copy.default:
            return bool((kwargs.get("device") or args[0].device).type != args[0].device.type)
        if func is _ATEN.copy_.default:
            return bool(args[0].device.type != args[1].device.type)
        return not _BY_NUMBERS.isdisjoint(func.tags)
