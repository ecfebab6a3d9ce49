"""Chooses the form of an operation: Triton on CUDA; on a CPU the C form, if it was compiled when kvshelf was installed;
torch's own operations elsewhere, and for operations without such a form.

`KVSHELF_KERNELS` forces one form for every operation of a process: `eager`, torch's own; `native`, the C form; or
`triton`, which without a GPU runs under Triton's interpreter (`TRITON_INTERPRET=1`, set before the first import). The
interpreter is for finding faults: it is thousands of times slower. `KVSHELF_CPU_LEVEL` forces the C form of one level
of processors, `avx2`, `avx512` or `neon`; where that cannot run, torch's own operations do.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any

import torch

from kvshelf.errors import InternalError
from kvshelf.kernels.native import architecture, library

_LOG = logging.getLogger(__name__)

FORMS = ("eager", "native", "triton")


def implementation(operation: str, device: torch.device) -> Any:
    """The module `kvshelf.kernels.<operation>.<form>` that runs on `device`, with its functions."""
    module = _module(operation, device.type, os.environ.get("KVSHELF_KERNELS", ""))
    return _OnCard(module, device) if device.type == "cuda" else module


class _OnCard:
    """A form whose functions run with their card as the current one of the thread. Triton starts kernels there wherever
    their tensors are, and a process may have others: a replica on cuda:1, or layers on several."""

    def __init__(self, form: ModuleType, device: torch.device) -> None:
        self._form = form
        self._device = device

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._form, name)
        if not isinstance(function, FunctionType):
            return function

        def run(*args: Any, **keywords: Any) -> Any:
            with torch.cuda.device(self._device):
                return function(*args, **keywords)

        return run


def form(device: torch.device) -> str:
    """The form of operations on a device, where they have one: see `FORMS`."""
    return os.environ.get("KVSHELF_KERNELS") or _fastest(device.type)


def cpu_form() -> str:
    """The form of operations on this CPU, with the architecture it was compiled for: "native (x86-64-v3)", "eager"."""
    name = form(torch.device("cpu"))
    return f"{name} ({architecture()})" if name == "native" else name


@cache
def _module(operation: str, device_type: str, forced: str) -> ModuleType:
    if forced and forced not in FORMS:
        raise InternalError(f"KVSHELF_KERNELS is {forced!r}; it must be one of {', '.join(FORMS)}, or unset")
    form = forced or _fastest(device_type)
    if form == "triton" and device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise InternalError(
            f"Triton's kernels were forced on a {device_type} tensor, and they run on CUDA; set TRITON_INTERPRET=1 to "
            "run them under its interpreter, or unset KVSHELF_KERNELS"
        )
    if form == "native" and (device_type != "cpu" or library() is None):
        raise InternalError(
            f"compiled kernels were forced on a {device_type} tensor, and none were compiled for it; run `python -m "
            "kvshelf.kernels.compiling` on a machine with a C compiler, or unset KVSHELF_KERNELS"
        )
    exists = find_spec(f"kvshelf.kernels.{operation}.{form}") is not None
    return import_module(f"kvshelf.kernels.{operation}.{form if exists else 'eager'}")


@cache
def gpu_form() -> str:
    """The form of operations on a GPU: "triton", or torch's own, "eager", which are slower."""
    if find_spec("triton") is not None:
        return "triton"
    _LOG.warning("Triton is not installed, so torch's own operations compute on a GPU, which is slower")
    return "eager"


def _fastest(device_type: str) -> str:
    """The fastest form on a device. Without Triton or a compiler it is torch's own, which runs on any device."""
    if device_type == "cuda":
        return gpu_form()
    return "native" if device_type == "cpu" and library() is not None else "eager"
