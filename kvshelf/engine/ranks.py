"""A process among those of a tensor parallel engine: which heads it has, and how it exchanges reduced layers."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from kvshelf.artifact.records import Entries, LayerRecord, entries_of

_RENDEZVOUS: Final = timedelta(minutes=30)
"""Longest wait for another process. Loading takes minutes, and differs between processes."""


class SharedModel(ABC):
    """The place of this process among those that share the heads of a model, each as many. `Ranks` of the policies."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def heads_of(self, rank: int, kv_heads: int) -> tuple[int, int]:
        """The first KV head of a rank, and the one behind its last, of `kv_heads` of the whole model."""
        count = kv_heads // self.size
        return rank * count, (rank + 1) * count

    def gathered(self, of_heads: Tensor) -> Tensor:
        gathered = of_heads.new_empty(self.size * of_heads.shape[0], *of_heads.shape[1:])
        dist.all_gather(list(gathered.chunk(self.size)), of_heads.contiguous())
        return gathered

    @abstractmethod
    def joined(self, layers: Sequence[LayerRecord]) -> tuple[LayerRecord, ...]:
        """On rank 0 the layers with the heads of all processes, elsewhere those of this one. Each has to call it."""


def join_group(rank: int, size: int, meeting: Path) -> None:
    """Make this process one of a group that meets in the file `meeting`. All of them run on one machine, and their
    sockets are those of its loopback interface, which no other machine reaches."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["LOCAL_RANK"] = str(rank)  # which GPU transformers takes
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store = dist.FileStore(str(meeting), size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_RENDEZVOUS)


def sent(layer: LayerRecord) -> Entries:
    """A layer as it is sent to another process."""
    entries = entries_of(layer)
    assert entries is not None, "a model with states is not shared"
    return entries.to("cpu")
