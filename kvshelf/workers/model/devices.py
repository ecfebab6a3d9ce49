"""Which device a model runs on."""

from __future__ import annotations

import torch

from kvshelf.errors import InvalidRequest


def chosen_device(name: str) -> torch.device:
    """The device of a name; "auto" takes a GPU where there is one. Raises `InvalidRequest`."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise InvalidRequest(f"unknown device {name!r}; for example auto, cpu, cuda:0", param="device") from error
