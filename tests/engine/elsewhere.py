"""Devices beside the CPU, for tests on a machine that has no other: tensors that say they are there and are computed on
the CPU, and operations that refuse tensors of several devices, as a GPU's do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

KIND: Final = "privateuseone"
ONE, OTHER = torch.device(KIND, 0), torch.device(KIND, 1)

_INDICES: Final = (torch.int64, torch.bool)
_MOVES: Final = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}


class _Elsewhere(torch.Tensor):
    """A tensor on another device. held: its numbers, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device | None = None, *, requires_grad: bool = False) -> Any:
        if device is None:  # as a class of parameters, by accelerate
            return torch.nn.Parameter(held, requires_grad)
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=device
        )
        made.held = held
        return made

    def tolist(self) -> Any:
        return self.held.tolist()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given: list[Tensor] = []

    def held(each: Tensor) -> Tensor:
        given.append(each)
        return _held(each)

    args, kwargs = _changed(args, held), {name: _changed(value, held) for name, value in kwargs.items()}
    # As on a GPU, a number on the CPU goes with any device, and so do indices.
    indexes = func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)
    placed = [t for t in given if t.device.type == KIND or (t.dim() and not (indexes and t.dtype in _INDICES))]
    devices = dict.fromkeys(each.device for each in placed)
    if len(devices) > 1 and func not in _MOVES:
        raise RuntimeError(f"{func} of tensors on several devices: {', '.join(map(str, devices))}")
    device = given[0].device if func in _MOVES else next(iter(devices), torch.device("cpu"))
    if (asked := kwargs.get("device")) is not None:
        device = torch.device(asked)
        kwargs = kwargs | {"device": torch.device("cpu") if device.type == KIND else device}
    own = {id(each.held): each for each in given if isinstance(each, _Elsewhere)}
    found = func(*args, **kwargs)
    if device.type != KIND:
        return found
    return _changed(found, lambda each: own[id(each)] if id(each) in own else _Elsewhere(each, device))


def _changed(given: Any, change: Callable[[Tensor], Any]) -> Any:
    """With other tensors in the same lists and tuples. torch's own functions for trees take half of a test's time."""
    if isinstance(given, Tensor):
        return change(given)
    if isinstance(given, list | tuple):
        return type(given)(_changed(each, change) for each in given)
    return given


def _held(each: Any) -> Any:
    return each.held if isinstance(each, _Elsewhere) else each


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """What makes tensors of lists makes none of another class: they are made on the CPU."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and kwargs.get("device") in (ONE, OTHER):
            return func(*args, **kwargs | {"device": "cpu"}).to(kwargs["device"])
        if func is Tensor.new_tensor:
            return func(*map(_held, args), **kwargs).to(args[0].device)
        if func is Tensor.__getitem__ and isinstance(args[1], tuple):
            args = args[0], tuple(torch.tensor(at) if isinstance(at, list) else at for at in args[1])
        return func(*args, **kwargs)


@contextmanager
def devices() -> Iterator[None]:
    """Inside the block there are the devices `ONE` and `OTHER` beside the CPU."""
    register = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if register is None:
        pytest.skip("this torch has no devices in Python")
    if not hasattr(torch, KIND):
        register()
    with _Operations(), _Functions():
        yield
