"""Checks of a service or a batch before Ray starts, which takes many seconds: what cannot start is refused at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvshelf.api.usage.prices import read_prices
from kvshelf.model.hub import require_available
from kvshelf.model.source import source_of
from kvshelf.service.settings import Settings
from kvshelf.store.erasure.signing import Signer
from kvshelf.workers.cluster.served import served_name

if TYPE_CHECKING:
    from kvshelf.workers.replica.create.plan import MemoryPlan
    from kvshelf.workers.replica.create.spread import SpreadPlan


def require_startable(settings: Settings) -> None:
    """Raise `InvalidRequest` for a key of receipts or prices that cannot be used, for a model folder that does not
    exist, for a model that is neither in the hub's cache nor to be downloaded, and for a GPU that this machine does not
    have; `OutOfMemory` for a model that has no room on its device; as `packed.require_unpackable`; as
    `loading.require_shared`, where several processes are to share a model; and where llama.cpp is to answer, for
    another file than a GGUF, and `MissingExtra` without it.

    On another cluster no model and GPU is refused: its nodes have folders, networks and GPUs of their own, and may join
    later.
    """
    if settings.erasure_key_file is not None:
        Signer.read(settings.erasure_key_file)
    if settings.prices_file is not None:
        read_prices(settings.prices_file)
    if settings.address is not None:
        return
    for model, _ in settings.served:
        require_available(source_of(model))
        _require_loadable(model, alone=settings.gpus_per_replica == 1 and settings.device != "spread")
    if settings.engine == "llama.cpp":
        from kvshelf.engine.llama.engine import gguf_of
        from kvshelf.engine.llama.sequences import library

        library()
        for model, _ in settings.served:
            gguf_of(model)
    if settings.device.startswith("cuda") or settings.gpu_memory is not None:
        from kvshelf.model.loading import chosen_device  # imports torch, which otherwise loads while Ray starts

        chosen_device(settings.device)
        for model, _ in settings.served:
            downloaded = (Path(source_of(model)) / "config.json").is_file()  # otherwise its replica says it
            if downloaded and (plan := memory_plan(settings, model)) is not None:
                plan.require()
    if settings.gpus_per_replica > 1 and settings.device != "spread":
        from kvshelf.model.loading import require_shared

        for model, _ in settings.served:
            require_shared(model, settings.gpus_per_replica, settings.device)


def _require_loadable(model: str, *, alone: bool) -> None:
    """As `packed.require_unpackable`. Of a model that is still to be downloaded its replica says it."""
    folder = Path(source_of(model))
    try:
        quantized = json.loads((folder / "config.json").read_text())["quantization_config"]
        packed = quantized["quant_method"] in ("gptq", "awq")
    except (OSError, ValueError, LookupError, TypeError):  # no folder, or plain weights, or for transformers to say
        return
    if packed:
        from kvshelf.model.weights.packed import require_unpackable  # imports torch

        require_unpackable(quantized, model, alone=alone)


def memory_plan(settings: Settings, model: str) -> MemoryPlan | SpreadPlan | None:
    """The memory of a replica of a model under these settings; None where several processes share the model, or another
    engine holds it. Raises as `plan_of_name`."""
    if (settings.gpus_per_replica > 1 and settings.device != "spread") or settings.engine != "kvshelf":
        return None
    from kvshelf.workers.replica.create.spread import plan_of_name

    return plan_of_name(
        model,
        served_name(model),
        device=settings.device,
        dtype=settings.dtype,
        rounded=settings.weights == "int8",
        memory=settings.gpu_memory,
        attached=settings.resident_bytes,
        suffixes=settings.max_suffix_bytes,
        answers=settings.max_open_generations,
        longest=settings.max_document_tokens,
    )
