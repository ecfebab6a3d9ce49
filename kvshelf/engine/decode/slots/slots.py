"""Steps of one token a row in slots, recorded once and run again as one graph of CUDA
(https://docs.nvidia.com/cuda/cuda-c-programming-guide, "CUDA Graphs")."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import groupby
from typing import Any, Final, TypeVar
from weakref import WeakSet, ref

import torch
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from kvshelf.engine.attention.attachment import Attached
from kvshelf.engine.decode.generation import Generation
from kvshelf.engine.decode.hooks import Wants
from kvshelf.engine.decode.selection import Selection
from kvshelf.engine.decode.slots.choices import CHOOSING_BYTES, RuleKind
from kvshelf.engine.decode.slots.composition import Composition, Reading
from kvshelf.engine.decode.slots.seating import MOST_SLOTS_A_ROW, PassOutcome, Replay, Seating, SeatingKind, slots_for
from kvshelf.engine.forward.passes import Passes
from kvshelf.engine.progress import Checkpoint, nothing
from kvshelf.model.devices import hooked

_LOG = logging.getLogger(__name__)

T = TypeVar("T", Seating, Composition)

_MOST_SEATINGS: Final = 8
"""A recording keeps the logits of its slots, 10 MB for 32 slots of 150,000 tokens in bf16, and, where a row draws, a
number in fp32 beside each. All share the rest."""

_MOST_COMPOSITIONS: Final = 32

MOST_TABLE_BYTES: Final = 64 << 20
"""Of the tables by which kernels read documents: those of compositions, and as many of seatings. Twice 40 KB a layer on
an H100 for a few documents, five times as much for 32."""

_RULE_BYTES: Final = 4 + 1 / 8
"""Of a token of the vocabulary: what it is drawn by, and whether it may come."""


def recorded_bytes(rows: int, vocabulary: int, logit_bytes: int, token_bytes: int) -> int:
    """The most bytes that recordings hold beside the weights, for steps of so many rows, without what suffix policies
    want of them. logit_bytes: of a logit; token_bytes: of a token in a pass, in one pool for all recordings."""
    slots = MOST_SLOTS_A_ROW * rows
    kept = _MOST_SEATINGS * vocabulary * (logit_bytes + _RULE_BYTES)
    return int(slots * (kept + token_bytes) + CHOOSING_BYTES * vocabulary + 2 * MOST_TABLE_BYTES)


_ATEN = torch.ops.aten
_BY_NUMBERS: Final = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

_KEEPS_FAILED: Final = TorchVersion(torch.__version__) < "2.13"
"""Whether the allocator takes a capture that failed for one under way (pytorch#180395)."""

Forward = Callable[[Checkpoint], PassOutcome]
"""A pass over the slots."""

Recorder = Callable[[Callable[[], PassOutcome]], Replay]
"""Records a pass, which need not run meanwhile."""


class Slots:
    """The seatings of the last steps of a model's batches. Not thread-safe: one thread owns the model."""

    def __init__(self, device: torch.device, recorder: Recorder | None = None) -> None:
        """recorder: None: each pass runs anew, which is what a recording is compared with."""
        self._device = device
        self._recorder = recorder
        self._warned = False
        self._failed: set[tuple[SeatingKind, int]] = set()
        self._seatings: dict[object, Seating] = {}
        self._compositions: dict[object, Composition] = {}
        self._readings: set[Reading] = set()

    @classmethod
    def of(cls, passes: Passes) -> Slots | None:
        """None where nothing would be gained, or no recording can be made: on a CPU, and for a model on several devices
        (with a warning), in several processes, or whose code may ask the device how long a call is."""
        devices = passes.devices.distinct
        if devices[0].type != "cuda" or passes.ranks is not None or passes.facts.one_by_one:
            return None
        slots = cls(devices[0], GraphRecorder(devices[0]))
        if len(devices) == 1 and not hooked(passes.model):
            return slots
        slots._warn("the model is spread over several devices")
        return None

    @property
    def table_bytes(self) -> int:
        """Of the tables by which kernels read documents."""
        seatings = sum(seating.nbytes for seating in self._seatings.values())
        return seatings + sum(composition.nbytes for composition in self._compositions.values())

    def seating(self, rows: Sequence[Generation], wants: Wants, vocabulary: int) -> Seating:
        """The slots of rows with one pending token each, those of one document side by side. wants: of their hooks."""
        kind = SeatingKind(RuleKind.of(rows), wants, vocabulary)
        shares = [(document, len(list(same))) for document, same in groupby(rows, key=lambda row: row.seen)]
        slabs = sorted({id(slab): slab for row in rows if (slab := row.row.slab)}.values(), key=lambda s: s.capacity)
        composition = self._composition([(document, slots_for(count)) for document, count in shares])
        tables, of_slabs = composition.tables, tuple((ref(slab), slab.slots) for slab in slabs)
        key: object = kind, composition.key, of_slabs
        if tables is not None:
            self._seatings.pop(key, None)  # it ends with its first pass
            key = kind, tables[:2], of_slabs
        seating = self._seatings.pop(key, None)
        if seating is None:
            # What a recording reads must not stay in memory for its sake, and nothing else may be read in its place.
            owners = [*(document for document, _ in shares if tables is None), *slabs]
            ends = [ref(owner, lambda _: self._seatings.pop(key, None)) for owner in owners]
            seating = Seating(composition, slabs, self._device, kind, ends)
        _keep(self._seatings, key, seating, _MOST_SEATINGS)
        seating.enter(composition, [count for _, count in shares], rows, slabs)
        return seating

    def _composition(self, shares: Sequence[tuple[Attached | Selection, int]]) -> Composition:
        """Documents with their slots, as they were seen before."""
        key = tuple((ref(document), slots) for document, slots in shares)
        composition = self._compositions.pop(key, None)
        if composition is None:
            ends = [ref(document, lambda _: self._compositions.pop(key, None)) for document, _ in shares]
            composition = Composition(key, shares, self._device, self._readings, ends)
        _keep(self._compositions, key, composition, _MOST_COMPOSITIONS)
        return composition

    def run(self, seating: Seating, forward: Forward, checkpoint: Checkpoint) -> PassOutcome:
        """What the pass gives, until the next run. The pass of a seating is recorded behind the second one, because
        many a seating has no third; and one just before has compiled all kernels and made all memory that a recording
        must find. Where that one waited, none is begun; where one failed, none of another seating of this size."""
        if seating.replay is not None:
            checkpoint()
            return seating.replay()
        if self._recorder is None or seating.passes != 1 or seating.size in self._failed:
            outcome = forward(checkpoint)
        else:
            with Waits(self._device) as waits:
                outcome = forward(checkpoint)
            if waits.first is None:
                self._record(self._recorder, seating, forward)
            else:
                self._warn(f"{waits.first} waits for the device or brings numbers to it")
        seating.passes += 1
        if (reading := seating.ran()) is not None:
            self._readings.add(reading)
        return outcome

    def _record(self, recorder: Recorder, seating: Seating, forward: Forward) -> None:
        try:
            seating.replay = recorder(lambda: forward(nothing))
        except Exception as exc:  # whatever CUDA says of a model's code
            self._failed.add(seating.size)
            self._warn(str(exc))

    def _warn(self, reason: str) -> None:
        if not self._warned:
            _LOG.warning("decode steps run without CUDA graphs, which is slower: %s", reason)
        self._warned = True


def _keep(kept: dict[object, T], key: object, value: T, most: int) -> None:
    """Put a value behind the others, and drop the oldest where these are too many or too large."""
    kept[key] = value
    free = MOST_TABLE_BYTES
    for number, (other, kept_value) in enumerate(reversed(list(kept.items()))):
        free -= kept_value.nbytes
        if number >= most or (number and free < 0):
            kept.pop(other, None)


class GraphRecorder:
    """Records passes as CUDA graphs with one memory: one runs at a time. Older torch records none after a failure."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._underway = False
        self._pool: Any = None
        self._graphs: WeakSet[Any] = WeakSet()

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        """One for all recordings: cuBLAS keeps memory for each stream that it has worked on."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def __call__(self, forward: Callable[[], PassOutcome]) -> Replay:
        """Raises what the pass raises, and `RuntimeError` where it does what a graph cannot hold."""
        if self._underway and _KEEPS_FAILED:
            raise RuntimeError(f"a capture failed before, which PyTorch {torch.__version__} takes for one under way")
        living = list(self._graphs)  # whichever other thread drops them meanwhile
        if not living:  # a pool ends with its last graph, and torch takes none that has ended
            self._pool = torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        # Not `torch.cuda.graph`, which waits for the device and gives all unused memory back. Other threads go on
        # meanwhile: layers of documents arrive by copies of their own.
        with torch.cuda.stream(stream):
            self._underway = True
            graph.capture_begin(self._pool, "thread_local")
            try:
                outcome = forward()
            except BaseException:
                with suppress(RuntimeError):  # which says only that there was an error before
                    graph.capture_end()
                raise
            graph.capture_end()
            self._underway = False
        self._graphs.add(graph)
        current.wait_stream(stream)

        def replay() -> PassOutcome:
            graph.replay()
            return outcome

        return replay


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`with Waits(device) as waits:` the `first` operation of this thread that waits for the device or brings numbers
    to it, by its name; None: none does. No CUDA graph can hold such an operation, and a failed capture is worse than
    none: CUDA's error does not name it, and torch's allocator may not get over it (pytorch/pytorch#180395)."""

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
