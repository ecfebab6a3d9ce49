"""Checks of a service or a batch before Ray starts, which takes many seconds: what cannot start is refused at once."""

from __future__ import annotations

from kvshelf.service.settings import Settings
from kvshelf.workers.model.source import source_of


def require_startable(settings: Settings) -> None:
    """Raise `InvalidRequest` for a model folder that does not exist, and for a GPU that this machine does not have.

    On another cluster nothing is refused: its nodes have folders and GPUs of their own, and may join later.
    """
    if settings.address is not None:
        return
    for model in settings.models:
        source_of(model)
    if settings.device.startswith("cuda"):
        from kvshelf.workers.model.loading import chosen_device  # imports torch, which otherwise loads while Ray starts

        chosen_device(settings.device)
