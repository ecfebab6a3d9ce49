"""One thread owns the model and divides its time: a prefill layer, or one step of all open answers together.

Continuous batching: new questions join between two steps, finished and abandoned ones leave. Where a document is still
being read, its questions pass each layer as it arrives, and the other answers take their steps while they wait.

Online before batch: between two layers of a compression, waiting questions are prefilled and open answers take their
steps. So a question is answered while a long document is still being prefilled, and a compression is never starved:
`batch_share` of the time stays its own.

Callers stay on their own threads. They hand work over, get a `Ticket` with a `concurrent.futures.Future`, and never
wait for ever: work ends with its result, with its own error, with `Cancelled` or `DeadlineExceeded` at the next unit of
work, or with `NoWorker` when the scheduler stops.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvshelf.errors import InvalidRequest, KvshelfError, NoWorker, QueueFull
from kvshelf.workers.attachment import block
from kvshelf.workers.suffixes import capacity_for
from kvshelf.workers.ticket import Ticket

if TYPE_CHECKING:
    from kvshelf.store.artifact import CompressedCache
    from kvshelf.workers.attachment import Attachment, Wait
    from kvshelf.workers.engine import Engine
    from kvshelf.workers.generation import Answer, Checkpoint, Generation, Sampling

ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)

_PATIENCE_S = 0.02  # how long the thread waits for a layer before it looks again for cancelled and for new questions

UNMEASURED_RETRY_S = 1.0
"""What a full queue tells its caller before any work has been measured."""


@dataclass(frozen=True)
class SchedulerLimits:
    """`max_open` answers take steps at once, `max_waiting` more may queue; `max_compressions` documents may queue.

    The suffixes of all open answers (questions and what is generated, not documents) may take `max_suffix_bytes`: a
    question waits until its own has room at full length, and is refused where it never would. While both kinds of work
    want the model, compression gets at least `batch_share` of the time.
    """

    max_open: int = 64
    max_waiting: int = 256
    max_compressions: int = 64
    max_suffix_bytes: int = 1 << 30
    batch_share: float = 0.1


class Work(Protocol[ResultT_co]):
    """The compression of a document of `num_tokens`: one way to keep it, or several (see `levels` and `auto`)."""

    @property
    def num_tokens(self) -> int: ...

    def run(self, engine: Engine, *, checkpoint: Checkpoint) -> ResultT_co:
        """Runs on the thread that owns the model; calls `checkpoint` between its parts."""


@dataclass(eq=False)
class _Compressing:
    ticket: Ticket[Any]
    work: Work[Any]


@dataclass(eq=False)
class _Waiting:
    """A question before its first step. `suffix_bytes`: what it and its longest answer will take."""

    ticket: Ticket[Answer]
    cache: CompressedCache | Attachment
    query: Sequence[int]
    sampling: Sampling
    on_text: Callable[[str], None]
    suffix_bytes: int


@dataclass(eq=False)
class _Open:
    """A question that takes part in the steps."""

    ticket: Ticket[Answer]
    generation: Generation
    on_text: Callable[[str], None]
    suffix_bytes: int


@dataclass
class _Pace:
    """A running mean of seconds per unit, recent work counting more. Tells a refused caller when to come back."""

    seconds: float | None = None

    def record(self, seconds: float, units: int = 1) -> None:
        value = seconds / max(units, 1)
        self.seconds = value if self.seconds is None else 0.7 * self.seconds + 0.3 * value

    def estimate(self, units: float) -> float:
        return UNMEASURED_RETRY_S if self.seconds is None else max(0.1, units * self.seconds)


@dataclass
class _Queues:
    """What waits for the thread. Guarded by `changed`; the thread alone owns the work it has taken out."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: deque[_Waiting] = field(default_factory=deque)
    compressions: deque[_Compressing] = field(default_factory=deque)
    accepting: bool = False
    stop_at: float = math.inf


class Scheduler:
    """Runs all work of one engine. Every method may be called from any thread."""

    def __init__(self, engine: Engine, limits: SchedulerLimits | None = None) -> None:
        self._engine = engine
        self._limits = limits or SchedulerLimits()
        self._queues = _Queues()
        self._thread = threading.Thread(target=self._run, name=f"scheduler-{engine.name}", daemon=True)
        self._batch = engine.batch()
        self._open: list[_Open] = []
        self._compressing: _Compressing | None = None
        self._token_pace = _Pace()
        self._answer_pace = _Pace()

    def start(self) -> None:
        self._queues.accepting = True
        self._thread.start()

    def stop(self, *, drain_s: float = 0.0) -> None:
        """Refuse new work, let what runs go on for up to `drain_s` seconds, and end the rest with `NoWorker`."""
        with self._queues.changed:
            self._queues.accepting = False
            self._queues.stop_at = time.monotonic() + drain_s
            self._queues.changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether work that is handed over will be done."""
        return self._queues.accepting and self._thread.is_alive()

    @property
    def overdue_s(self) -> float:
        """For how long the document at hand should have ended: the model is still at a unit of its work. 0: it is not
        late."""
        compressing = self._compressing
        return 0.0 if compressing is None else compressing.ticket.overdue_s

    def compress(self, work: Work[ResultT], *, deadline_s: float | None = None) -> Ticket[ResultT]:
        """Queue a prepared document. Raises `QueueFull`, `NoWorker`."""
        ticket: Ticket[ResultT] = Ticket(deadline_s)
        with self._queues.changed:
            self.require_room()
            self._queues.compressions.append(_Compressing(ticket, work))
            self._queues.changed.notify()
        return ticket

    def require_room(self) -> None:
        """Raise what `compress` would raise now: `QueueFull` or `NoWorker`."""
        with self._queues.changed:
            self._require_accepting()
            queue = self._queues.compressions
            if len(queue) >= self._limits.max_compressions:
                tokens = sum(queued.work.num_tokens for queued in queue)
                raise _queue_full("documents", len(queue), self._token_pace.estimate(tokens))

    def generate(
        self,
        cache: CompressedCache | Attachment,
        query: Sequence[int],
        sampling: Sampling,
        *,
        on_text: Callable[[str], None] = lambda _: None,
        deadline_s: float | None = None,
    ) -> Ticket[Answer]:
        """Queue a question. `on_text` gets each piece of final text, on the scheduler's thread: it must only hand over.

        Raises `QueueFull`, `NoWorker`, and `InvalidRequest` for a question that is longer than the limits; what the
        engine refuses arrives through the ticket.
        """
        suffix_bytes = self._suffix_bytes(len(query) + sampling.max_tokens)
        work = _Waiting(Ticket(deadline_s), cache, query, sampling, on_text, suffix_bytes)
        with self._queues.changed:
            self._require_accepting()
            queue = self._queues.waiting
            if len(queue) >= self._limits.max_waiting:
                rounds = len(queue) / self._limits.max_open
                raise _queue_full("questions", len(queue), self._answer_pace.estimate(rounds))
            queue.append(work)
            self._queues.changed.notify()
        return work.ticket

    def _suffix_bytes(self, tokens: int) -> int:
        needed = capacity_for(min(tokens, self._engine.max_tokens)) * self._engine.kv_bytes_per_token
        if needed > self._limits.max_suffix_bytes:
            raise InvalidRequest(
                f"question and answer of up to {tokens} tokens take {needed} bytes beside the document, and this "
                f"worker allows {self._limits.max_suffix_bytes} for all; ask a shorter question, or for fewer tokens",
                param="prompt",
            )
        return needed

    def _require_accepting(self) -> None:
        if not self.alive:
            raise NoWorker(f"the worker of {self._engine.name!r} is stopping; try again in a moment", retry_after_s=1.0)

    # Everything below runs on the scheduler's thread.

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._generate_for(0.0)
                self._compress_next()
        finally:
            self._refuse_rest()

    def _wait_for_work(self) -> bool:
        """Block until there is work. False once the scheduler is stopping and nothing is left, or its time is over."""
        queues = self._queues
        with queues.changed:
            while queues.accepting and not (queues.waiting or queues.compressions or self._open):
                queues.changed.wait()
            left = bool(queues.waiting or queues.compressions or self._open)
        return queues.accepting or (left and time.monotonic() < queues.stop_at)

    def _compress_next(self) -> None:
        with self._queues.changed:
            if not self._queues.compressions:
                return
            self._compressing = queued = self._queues.compressions.popleft()
        ticket = queued.ticket
        ticket.begin()
        last_unit = time.monotonic()

        def between_layers() -> None:
            nonlocal last_unit
            unit_s = time.monotonic() - last_unit
            ticket.worked_s += unit_s
            self._check(ticket)
            share = self._limits.batch_share
            self._generate_for(unit_s * (1 - share) / share)
            self._check(ticket)
            last_unit = time.monotonic()

        try:
            self._check(ticket)
            result = queued.work.run(self._engine, checkpoint=between_layers)
        except Exception as exc:  # one document's error is that document's answer, whatever it is
            ticket.resolve(None, exc)
        else:
            ticket.worked_s += time.monotonic() - last_unit
            self._token_pace.record(ticket.worked_s, queued.work.num_tokens)
            ticket.resolve(result)
        finally:
            self._compressing = None

    def _generate_for(self, seconds: float) -> None:
        """Step the open answers, again and again: until none is left, or, when a compression wants the model, for about
        `seconds` (one step at least)."""
        end = time.monotonic() + seconds
        while self._admit():
            self._step()
            if time.monotonic() >= end and (self._compressing or self._queues.compressions):
                return

    def _admit(self) -> bool:
        """Open waiting questions, in their order, as far as rows and bytes allow. Whether any answer is open."""
        with self._queues.changed:
            self._drop_ended(self._queues.waiting)
            self._drop_ended(self._queues.compressions)
            admitted: list[_Waiting] = []
            held = sum(work.suffix_bytes for work in self._open)
            while self._queues.waiting and len(self._open) + len(admitted) < self._limits.max_open:
                held += self._queues.waiting[0].suffix_bytes
                if held > self._limits.max_suffix_bytes:
                    break
                admitted.append(self._queues.waiting.popleft())
        for waiting in admitted:
            waiting.ticket.begin()
            try:
                generation = self._engine.start(waiting.cache, waiting.query, waiting.sampling, batch=self._batch)
            except Exception as exc:  # one question's error is that question's answer, whatever it is
                waiting.ticket.resolve(None, exc)
            else:
                self._open.append(_Open(waiting.ticket, generation, waiting.on_text, waiting.suffix_bytes))
        return bool(self._open)

    def _drop_ended(self, queue: deque[Any]) -> None:
        """Let queued work leave that was cancelled or ran out of time, so that it holds no place in the queue."""
        for work in list(queue):
            try:
                self._check(work.ticket)
            except KvshelfError as exc:
                queue.remove(work)
                work.ticket.resolve(None, exc)

    def _step(self) -> None:
        """One step for all answers whose documents are there, and one for those of a document that is arriving."""
        ready = [work for work in self._open if work.generation.document.arrived]
        arriving = [work for work in self._open if not work.generation.document.arrived]
        if ready:
            self._advance(ready)
        if arriving:
            document = arriving[0].generation.document
            joining = [work for work in arriving if work.generation.document is document]
            self._advance(joining, waiting=lambda record: self._wait(record, joining))

    def _wait(self, record: Future[Any], joining: Sequence[_Open]) -> None:
        """Use the time until a layer of a document is there for the other answers."""
        self._admit()
        others = [work for work in self._open if work not in joining and work.generation.document.arrived]
        if others:
            self._advance(others)
        else:
            wait([record], timeout=_PATIENCE_S)
        self._require_wanted(joining)

    def _advance(self, works: Sequence[_Open], waiting: Wait = block) -> None:
        """One step for these answers together. If it fails, one for each alone: one question's error is that question's
        answer, whatever it is."""
        works = [work for work in works if self._still_wanted(work)]
        if not works:
            return
        try:
            generations = [work.generation for work in works]
            told = self._batch.step(generations, lambda: self._require_wanted(works), waiting)
        except Exception as exc:
            if len(works) == 1:
                self._end(works[0], exc)
            else:
                for work in works:
                    self._advance([work], waiting)
        else:
            for work, text in zip(works, told, strict=True):
                self._tell(work, text)

    def _tell(self, work: _Open, text: str | KvshelfError) -> None:
        """Hand over what a step brought."""
        if isinstance(text, KvshelfError):
            self._end(work, text)
            return
        if work.generation.token_ids:
            work.ticket.has_token()
        try:
            if text:
                work.on_text(text)
        except Exception as exc:  # the listener's error is its own
            self._end(work, exc)
            return
        if work.generation.finished:
            self._answer_pace.record(work.ticket.busy_s)
            self._end(work, None)

    def _end(self, work: _Open, error: Exception | None) -> None:
        self._open.remove(work)
        work.generation.leave()
        work.ticket.resolve(work.generation.answer() if error is None else None, error)

    def _still_wanted(self, work: _Open) -> bool:
        try:
            self._check(work.ticket)
        except KvshelfError as exc:
            self._end(work, exc)
            return False
        return True

    def _require_wanted(self, works: Sequence[_Open]) -> None:
        """Raise if nobody waits for a step that is under way any more."""
        error: KvshelfError | None = None
        for work in works:
            try:
                self._check(work.ticket)
            except KvshelfError as exc:
                error = exc
            else:
                return
        if error is not None:
            raise error

    def _check(self, ticket: Ticket[Any]) -> None:
        ticket.check()
        if time.monotonic() >= self._queues.stop_at:
            raise _stopped(self._engine.name)

    def _refuse_rest(self) -> None:
        with self._queues.changed:
            self._queues.accepting = False
            queues = self._queues
            rest: list[_Open | _Waiting | _Compressing] = [*self._open, *queues.waiting, *queues.compressions]
            queues.waiting.clear()
            queues.compressions.clear()
        self._open.clear()
        for work in rest:
            work.ticket.resolve(None, _stopped(self._engine.name))


def _queue_full(what: str, queued: int, retry_after_s: float) -> QueueFull:
    retry_after_s = round(retry_after_s, 3)
    return QueueFull(
        f"{queued} {what} are waiting already, as many as may; try again in {retry_after_s:.1f} s",
        retry_after_s=retry_after_s,
        queued=queued,
    )


def _stopped(name: str) -> NoWorker:
    return NoWorker(f"the worker of {name!r} stopped before this was done; ask again", retry_after_s=1.0)
