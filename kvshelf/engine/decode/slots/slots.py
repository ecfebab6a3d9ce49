"""Steps of one token a row in slots, recorded once and run again as one graph of CUDA
(https://docs.nvidia.com/cuda/cuda-c-programming-guide, "CUDA Graphs")."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor

from kvshelf.engine.decode.generation import Generation
from kvshelf.engine.decode.slots.seating import Replay, Seating, slots_for
from kvshelf.engine.forward.passes import Passes
from kvshelf.engine.progress import Checkpoint, nothing
from kvshelf.model.devices import hooked

_LOG = logging.getLogger(__name__)

_MOST_SEATINGS: Final = 8
"""A recording keeps the logits of its slots, 10 MB for 32 slots of 150,000 tokens in bf16. All share the rest."""

Forward = Callable[[Checkpoint], Tensor]
"""A pass over the slots, which gives logits `[slots, vocabulary]`."""

Recorder = Callable[[Callable[[], Tensor]], Replay]
"""Records a pass, which need not run meanwhile."""


class Slots:
    """The seatings of a batch's last steps. Not thread-safe: one thread owns the model."""

    def __init__(self, device: torch.device, recorder: Recorder | None = None) -> None:
        """recorder: None: each pass runs anew, which is what a recording is compared with."""
        self._device = device
        self._recorder = recorder
        self._seatings: dict[object, Seating] = {}

    @classmethod
    def of(cls, passes: Passes) -> Slots | None:
        """None where nothing would be gained, or no recording can be made: on a CPU, and for a model on several
        devices or in several processes."""
        devices = passes.devices.each
        alone = len(devices) == 1 and passes.ranks is None and not hooked(passes.model)
        return cls(devices[0], GraphRecorder(devices[0])) if alone and devices[0].type == "cuda" else None

    def seating(self, rows: Sequence[Generation]) -> Seating:
        """The slots of rows with one pending token each, those of one document side by side, once they sit there."""
        shares = [(document, len(list(same))) for document, same in groupby(rows, key=lambda row: row.seen)]
        slabs = sorted({id(slab): slab for row in rows if (slab := row.row.slab)}.values(), key=lambda s: s.capacity)
        owners = [*(document for document, _ in shares), *slabs]
        sizes = [*(slots_for(count) for _, count in shares), *(slab.slots for slab in slabs)]
        key = tuple((ref(owner), size) for owner, size in zip(owners, sizes, strict=True))
        seating = self._seatings.pop(key, None)
        if seating is None:
            # What a recording reads must not stay in memory for its sake, and nothing else may be read in its place.
            ends = [ref(owner, lambda _: self._seatings.pop(key, None)) for owner in owners]
            seating = Seating(shares, slabs, self._device, ends)
        self._seatings[key] = seating
        for oldest in list(self._seatings)[:-_MOST_SEATINGS]:
            self._seatings.pop(oldest, None)
        seating.enter([count for _, count in shares], rows, slabs)
        return seating

    def run(self, seating: Seating, forward: Forward, checkpoint: Checkpoint) -> Tensor:
        """Logits `[slots, vocabulary]`, until the next run. The pass of a seating is recorded behind the second one,
        because many a seating has no third; and one just before has compiled all kernels and made all memory that a
        recording must find."""
        if seating.replay is not None:
            checkpoint()
            return seating.replay()
        logits = forward(checkpoint)
        if self._recorder is not None and seating.passes:
            try:
                seating.replay = self._recorder(lambda: forward(nothing))
            except Exception as exc:  # whatever a model's code does that waits for the device
                self._recorder = None
                _LOG.warning("decode steps run without CUDA graphs, which is slower: %s", exc)
        seating.passes += 1
        return logits


class GraphRecorder:
    """Records passes as CUDA graphs, whose memory they share: one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, forward: Callable[[], Tensor]) -> Replay:
        """Raises what the pass raises, and `RuntimeError` where it does what a graph cannot hold."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        # Not `torch.cuda.graph`, which waits for the device and gives all unused memory back. Other threads go on
        # meanwhile: layers of documents arrive by copies of their own.
        with torch.cuda.stream(stream):
            graph.capture_begin(self._pool, "thread_local")
            try:
                logits = forward()
            finally:
                graph.capture_end()
        current.wait_stream(stream)

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
