"""A caller's claim on work that another thread does."""

from __future__ import annotations

import gc
import logging
import math
import time
import traceback
from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, TypeVar

from kvshelf.errors import Cancelled, DeadlineExceeded, KvshelfError, OutOfMemory

if TYPE_CHECKING:
    from kvshelf.engine.decode.turns import Turn  # torch

log = logging.getLogger("kvshelf.workers")  # as kernels and the engine, whose machine may lack structlog

ResultT = TypeVar("ResultT")


class Ticket(Generic[ResultT]):
    """A caller's claim on one piece of work, queued at `submitted` (of `time.monotonic`).

    queue_s: seconds until the model began it. first_s: seconds until the first token of an answer, 0 before. worked_s:
    seconds the model spent on a compression, without pauses for other work. suffix_bytes: that the suffixes of all open
    answers held when this answer ended. turn: of the answer, as of `Generation`.
    """

    def __init__(self, deadline_s: float | None) -> None:
        self.future: Future[ResultT] = Future()
        self.queue_s = 0.0
        self.first_s = 0.0
        self.worked_s = 0.0
        self.suffix_bytes = 0
        self.turn: Turn | KvshelfError | None = None
        self.begun = False
        self.submitted = time.monotonic()
        self._deadline = math.inf if deadline_s is None else self.submitted + deadline_s
        self._cancelled = False

    def cancel(self) -> None:
        """End the work before its next unit; the future then raises `Cancelled`."""
        self._cancelled = True

    def begin(self) -> None:
        self.begun = True
        self.queue_s = time.monotonic() - self.submitted

    def has_token(self) -> None:
        """Note the first token of the answer; later calls change nothing."""
        self.first_s = self.first_s or time.monotonic() - self.submitted

    @property
    def overdue_s(self) -> float:
        """Seconds since its deadline; 0 before."""
        return max(0.0, time.monotonic() - self._deadline)

    @property
    def busy_s(self) -> float:
        """Seconds since the work began."""
        return time.monotonic() - self.submitted - self.queue_s

    def check(self) -> None:
        """Raise if the work was cancelled or is late. Called between units of work."""
        if self._cancelled:
            raise Cancelled("the caller went away")
        if time.monotonic() > self._deadline:
            raise self.too_late()

    def too_late(self) -> DeadlineExceeded:
        """The error of late work. `begun` in its details: whether the model had begun it."""
        return DeadlineExceeded(
            f"the work was not done {self._deadline - self.submitted:.1f} s after it was asked for; ask for less, or "
            "when the service is less busy",
            begun=self.begun,
        )

    def resolve(self, result: ResultT | None, error: BaseException | None = None) -> None:
        """Deliver the result or the error, unless the owner has cancelled the future. An error for want of memory is
        delivered as `out_of_memory`, whether anybody waits for it or not."""
        if error is not None:
            error = out_of_memory(error) or error
        if not self.future.set_running_or_notify_cancel():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)  # type: ignore[arg-type]  # None only together with an error


def out_of_memory(error: BaseException) -> OutOfMemory | None:
    """The error of a request whose work on the model found no memory, None for any other error. The log has it, and
    what that work held is given back before this returns: tracebacks would keep the tensors of its frames."""
    import torch  # here, because callers of replicas import this module, and they need no torch

    on_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    if not (on_cpu or isinstance(error, MemoryError | torch.OutOfMemoryError)):
        return None
    log.warning("work on the model found no memory", exc_info=error)
    lines = str(error).strip().splitlines()
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    gc.collect()
    torch.cuda.empty_cache()  # without a card it does nothing
    return OutOfMemory(
        f"there was no room in the memory of the device: {lines[0][:200] if lines else 'no memory'}; what it held is "
        "free again. Try again, ask for less, or give the replica more (KVSHELF_GPU_MEMORY)"
    )
