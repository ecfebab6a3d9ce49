"""Which form of an operation runs: Triton on CUDA, torch's own operations elsewhere.

`KVSHELF_KERNELS` forces one form for every operation of a process: `reference`, the naive oracle of the tests, or
`triton`, which without a GPU runs under Triton's interpreter (`TRITON_INTERPRET=1`, set before the first import). Both
are for finding faults: each is thousands of times slower than what it stands in for.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from kvshelf.errors import InternalError

FORMS = ("eager", "reference", "triton")


def implementation(operation: str, device: torch.device) -> ModuleType:
    """The module `kvshelf.kernels.<operation>.<form>` that runs on `device`."""
    return _module(operation, device.type, os.environ.get("KVSHELF_KERNELS", ""))


@cache
def _module(operation: str, device_type: str, forced: str) -> ModuleType:
    if forced and forced not in FORMS:
        raise InternalError(f"KVSHELF_KERNELS is {forced!r}; it must be one of {', '.join(FORMS)}, or unset")
    # Every form but Triton's runs on any device, so a CUDA build of torch without Triton still works, only slower.
    form = forced or ("triton" if device_type == "cuda" and find_spec("triton") is not None else "eager")
    if form == "triton" and device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise InternalError(
            f"Triton's kernels were forced on a {device_type} tensor, and they run on CUDA; set TRITON_INTERPRET=1 to "
            "run them under its interpreter, or unset KVSHELF_KERNELS"
        )
    return import_module(f"kvshelf.kernels.{operation}.{form}")
