"""One thread owns the model and divides its time between layers of a prefill and steps of all open answers together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from kvshelf.engine.attention.attachment import block
from kvshelf.engine.attention.function import kvshelf_attention
from kvshelf.engine.decode.reduction import SuffixReducer
from kvshelf.engine.decode.selection import Selection
from kvshelf.engine.decode.suffixes import capacity_for
from kvshelf.errors import InternalError, InvalidRequest, KvshelfError, NoWorker, StateConflict
from kvshelf.workers.replica.queues import Answering, AnswerOrder, Compressing, Passing, Queues, SchedulerLimits, Work
from kvshelf.workers.replica.ticket import Ticket, out_of_memory

if TYPE_CHECKING:
    from kvshelf.api.answers import Answer, Piece
    from kvshelf.artifact.cache import CompressedCache
    from kvshelf.engine.attention.attachment import Attached, Wait
    from kvshelf.engine.decode.generation import Sampling
    from kvshelf.engine.engine import Engine

__all__ = ["Scheduler", "SchedulerLimits", "Work"]

ResultT = TypeVar("ResultT")

_HANGING_S = 1.0  # behind a document's deadline, when it has left if it does not hang: it ends within a layer
_PATIENCE_S = 0.02  # how long the thread waits for a layer before it looks again for cancelled and for new questions


class Scheduler:
    """Runs all work of one engine. Every method may be called from any thread.

    Questions before documents: between two layers of a compression, queued questions are prefilled and open answers
    take their steps; a compression keeps `batch_share` of the time. Users before batches: while a user's question is
    open, those of batches take part in a `batch_share` of the steps.

    Every ticket ends: with a result, with the work's own error, with `Cancelled` or `DeadlineExceeded` at the next unit
    of work, or with `NoWorker` when the scheduler stops.
    """

    def __init__(self, engine: Engine, limits: SchedulerLimits | None = None) -> None:
        self._engine = engine
        self._limits = limits or SchedulerLimits()
        self._queues = Queues(engine.name, self._limits)
        self._thread = threading.Thread(target=self._run, name=f"scheduler-{engine.name}", daemon=True)
        self.batch = engine.batch()
        self.open: list[Answering] = []
        self._steps_of_users = 0  # since a step of all
        self._compressing: Compressing | None = None
        self._charged_s = 0.0
        self.spent: Callable[[str, float], None] = lambda *_: None
        """Told for which tenant the model worked, and how many seconds; set before `start`."""

    def start(self) -> None:
        """Raises `StateConflict` while another scheduler runs this engine."""
        if not self._engine.driver.acquire(blocking=False):
            raise StateConflict(
                f"{self._engine.name!r} is run by another scheduler, and two threads in one model corrupt its memory; "
                "stop that one first, or load the model again for this one"
            )
        self._queues.accepting = True
        self._thread.start()

    def stop(self, *, drain_s: float = 0.0) -> None:
        """Refuse new work, continue running work for up to `drain_s` seconds, and end the rest with `NoWorker`."""
        self._queues.close(drain_s)
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._queues.accepting and self._thread.is_alive()

    @property
    def overdue_s(self) -> float:
        """Seconds since the deadline of the document that is being compressed; 0 if there is none or it has time."""
        compressing = self._compressing
        return 0.0 if compressing is None else compressing.ticket.overdue_s

    @property
    def idle(self) -> bool:
        return not (self.open or self._compressing or self._queues.waiting)

    @property
    def has_documents(self) -> bool:
        return self._queues.has_documents

    def compress(
        self, work: Work[ResultT], *, tenant: str = "default", deadline_s: float | None = None
    ) -> Ticket[ResultT]:
        """Queue a prepared document. Raises `QueueFull`, `NoWorker`."""
        ticket: Ticket[ResultT] = Ticket(deadline_s)
        self._queues.add_document(Compressing(ticket, work, tenant))
        return ticket

    def require_room(self) -> None:
        """Raise what `compress` would raise now, `QueueFull` or `NoWorker`; and `NoWorker` while the model hangs in a
        document. What is queued behind it dies with the process that is about to be replaced, and would be blamed."""
        if (late_s := self.overdue_s) > _HANGING_S:
            raise NoWorker(
                f"{self._engine.name!r} hangs in a document that should have ended {late_s:.0f} s ago; ask again when "
                "it has been replaced",
                retry_after_s=_HANGING_S,
            )
        self._queues.require_room()

    def generate(
        self,
        cache: CompressedCache | Attached,
        query: Sequence[int],
        sampling: Sampling,
        selection: Selection | None = None,
        *,
        passages: bool = False,
        reducer: SuffixReducer | None = None,
        order: AnswerOrder = AnswerOrder(),  # noqa: B008 - it is immutable
    ) -> Ticket[Answer]:
        """Queue a question. Where the order keeps the turn, the ticket has it at its end.

        Raises `QueueFull`, `NoWorker`, `InvalidRequest` for a question beyond the limits, and what `Engine.start`
        raises.
        """
        generation = self._engine.start(cache, query, sampling, selection, passages=passages, reducer=reducer)
        suffix_bytes = self._suffix_bytes(len(query) + sampling.max_tokens, reducer)
        work = Answering(Ticket(order.deadline_s), generation, order, suffix_bytes)
        self._queues.add_question(work)
        return work.ticket

    def pass_of(
        self, run: Callable[[], ResultT], *, tenant: str = "default", deadline_s: float | None = None
    ) -> Ticket[ResultT]:
        """Queue a call that runs one pass over a few tokens. It comes before the next step of answers, and as they do
        between two layers of a compression. Raises `QueueFull`, `NoWorker`."""
        ticket: Ticket[ResultT] = Ticket(deadline_s)
        self._queues.add_pass(Passing(ticket, run, tenant))
        return ticket

    def _suffix_bytes(self, tokens: int, reducer: SuffixReducer | None) -> int:
        """tokens: of question and answer."""
        entries, beside, most = min(tokens, self._engine.max_tokens), 0, None
        if reducer is not None:
            most, beside = reducer.most, reducer.beside
            entries += 0 if beside else reducer.of_document  # what is beside a slab is not in it
            entries = min(entries, most or entries)
        needed = (capacity_for(entries, most) + beside) * self._engine.kv_bytes_per_token
        if reducer is not None:
            needed += reducer.table_bytes + reducer.slot_bytes(entries) * self._engine.facts.kv_heads
        needed += 2 * self._engine.passes.state_bytes  # a step reads the states before it and makes those behind it
        if needed > self._limits.max_suffix_bytes and reducer is not None and reducer.of_document:
            raise InvalidRequest(
                f"under suffix.scope cache an answer has a copy of {reducer.of_document} entries of the document, and "
                f"takes {needed} bytes with it, of the {self._limits.max_suffix_bytes} that this worker allows for "
                "all; leave suffix.scope out, or ask a cache with fewer entries",
                param="suffix.scope",
            )
        if needed > self._limits.max_suffix_bytes:
            raise InvalidRequest(
                f"question and answer of up to {tokens} tokens take {needed} bytes beside the document, and this "
                f"worker allows {self._limits.max_suffix_bytes} for all; ask a shorter question, or for fewer tokens",
                param="prompt",
            )
        return needed

    # Everything below runs on the scheduler's thread.

    @property
    def _held_bytes(self) -> int:
        """The bytes that `_suffix_bytes` foretells, of all open answers by now."""
        states, entry = self._engine.passes.state_bytes, self._engine.kv_bytes_per_token
        beside = 0
        for generation in (answering.generation for answering in self.open):
            row = generation.row
            beside += row.beside * entry + generation.held_bytes + (states if row.states else 0)
        return self.batch.nbytes + beside

    def _run(self) -> None:
        try:
            with kvshelf_attention(self._engine.model):  # otherwise each step would select and restore it
                while self._queues.wait_for_work(busy=bool(self.open)):
                    self._generate_for(0.0)
                    self._compress_next()
        finally:
            self._engine.driver.release()
            rest: list[Answering | Compressing | Passing] = [*self.open, *self._queues.take_all()]
            self.open.clear()
            for work in rest:
                work.ticket.resolve(None, self._queues.stopped())

    def _compress_next(self) -> None:
        self._compressing = queued = self._queues.take_document()
        if queued is None:
            return
        ticket = queued.ticket
        ticket.begin()
        last_unit = time.monotonic()

        def between_layers() -> None:
            nonlocal last_unit
            unit_s = time.monotonic() - last_unit
            ticket.worked_s += unit_s
            self._queues.check(ticket)
            share = self._limits.batch_share
            self._generate_for(unit_s * (1 - share) / share)
            self._queues.check(ticket)
            last_unit = time.monotonic()

        try:
            self._queues.check(ticket)
            result = queued.work.run(self._engine, checkpoint=between_layers)
        except Exception as exc:  # one document's error is that document's answer, whatever it is
            ticket.resolve(None, exc)
        else:
            ticket.worked_s += time.monotonic() - last_unit
            self._queues.token_pace.record(ticket.worked_s, queued.work.num_tokens)
            ticket.resolve(result)
        finally:
            self.spent(queued.tenant, ticket.worked_s)
            self._compressing = None

    @contextmanager
    def _charged(self, works: Sequence[Answering | Passing]) -> Iterator[None]:
        """A block that works for these together: each pays an equal part of its seconds, without those that blocks
        inside charge to others, and without waiting."""
        began, before = time.monotonic(), self._charged_s
        try:
            yield
        finally:
            own_s = time.monotonic() - began - (self._charged_s - before)
            self._charged_s += own_s
            for work in works:
                self.spent(work.tenant, own_s / len(works))

    def _generate_for(self, seconds: float) -> None:
        """Step the open answers until none is left or, if a compression wants the model, for about `seconds` (at least
        one step)."""
        end = time.monotonic() + seconds
        while self._admit():
            self._step()
            if time.monotonic() >= end and (self._compressing or self._queues.has_documents):
                return

    def _admit(self) -> bool:
        """Run a queued pass of each tenant, and open queued questions in turn, as far as rows and bytes allow. Returns
        whether there is more to do: an answer is open, or passes wait."""
        for passing in self._queues.take_passes():
            passing.ticket.begin()
            try:
                with self._charged([passing]):
                    passing.ticket.resolve(passing.run())
            except Exception as exc:  # one pass's error is that pass's answer, whatever it is
                passing.ticket.resolve(None, exc)
        for work in self._queues.take_questions(self.open):
            work.ticket.begin()
            self.open.append(work)
        return bool(self.open or self._queues.has_passes)

    def _step(self) -> None:
        """One step for all answers whose caches have arrived, and one for those on one cache that is arriving."""
        ready = [work for work in self.open if work.generation.document.arrived]
        arriving = [work for work in self.open if not work.generation.document.arrived]
        if ready:
            self._advance(self._next_of(ready))
        if arriving:
            document = arriving[0].generation.document
            joining = [work for work in arriving if work.generation.document is document]
            self._advance(joining, waiting=lambda record: self._wait(record, joining))

    def _next_of(self, works: Sequence[Answering]) -> Sequence[Answering]:
        """The answers that take the next step: those of users alone, or all in `batch_share` of the steps."""
        users = [work for work in works if not work.order.of_batch]
        if users and self._steps_of_users + 1 < 1 / self._limits.batch_share:
            self._steps_of_users += 1
            return users
        self._steps_of_users = 0
        return works

    def _wait(self, record: Future[Any], joining: Sequence[Answering]) -> None:
        """Step the other answers until the next layer of a document has arrived."""
        self._admit()
        others = [work for work in self.open if work not in joining and work.generation.document.arrived]
        if others:
            self._advance(self._next_of(others))
        else:
            began = time.monotonic()
            wait([record], timeout=_PATIENCE_S)
            self._charged_s += time.monotonic() - began
        self._require_wanted(joining)

    def _advance(self, works: Sequence[Answering], waiting: Wait = block) -> None:
        """One step for these answers together. If it fails, one for each alone: one question's error is that question's
        answer, whatever it is."""
        works = [work for work in works if self._still_wanted(work)]
        if not works:
            return
        try:
            generations = [work.generation for work in works]
            with self._charged(works):
                texts = self.batch.step(generations, lambda: self._require_wanted(works), waiting)
        except Exception as exc:
            error = out_of_memory(exc) or exc  # before the next tries need what this one held
            if len(works) == 1:
                self._deliver(works[0], error)
            else:
                for work in works:
                    self._advance([work], waiting)
        else:
            for work, text in zip(works, texts, strict=True):
                self._deliver(work, text)

    def _deliver(self, work: Answering, text: Piece | Exception) -> None:
        """Deliver a step's text or error for one answer."""
        if work.generation.closing:
            if isinstance(text, Exception):
                work.generation.turn = text if isinstance(text, KvshelfError) else InternalError("the turn did not run")
                self._end(work, None)
            elif not work.generation.pending:
                self._keep(work)
            return
        if isinstance(text, Exception):
            if self._still_wanted(work):  # a step that all callers have left raises one caller's error
                self._end(work, text)
            return
        if work.generation.token_ids:
            work.ticket.has_token()
        try:
            if text:
                work.order.on_text(text)
        except Exception as exc:  # a listener's error ends its own answer only
            self._end(work, exc)
            return
        if work.generation.finished:
            self._queues.answer_pace.record(work.ticket.busy_s)
            self._close(work)

    def _close(self, work: Answering) -> None:
        """End a complete answer, or have the rest of its turn run first."""
        generation = work.generation
        if work.order.turn_of is None:
            self._end(work, None)
            return
        try:
            generation.close(work.order.turn_of(generation.text, generation.token_ids))
        except Exception as exc:  # an error of a turn is no error of its answer
            generation.turn = exc if isinstance(exc, KvshelfError) else InternalError("the turn could not be made")
            self._end(work, None)
        else:
            if not generation.pending:
                self._keep(work)

    def _keep(self, work: Answering) -> None:
        self.batch.keep(work.generation)
        self._end(work, None)

    def _end(self, work: Answering, error: Exception | None) -> None:
        work.ticket.suffix_bytes, work.ticket.turn = self._held_bytes, work.generation.turn
        self.open.remove(work)
        self.batch.leave(work.generation)
        work.ticket.resolve(work.generation.answer() if error is None else None, error)

    def _still_wanted(self, work: Answering) -> bool:
        try:
            self._queues.check(work.ticket)
        except KvshelfError as exc:
            if work.generation.closing:  # the answer is complete
                work.generation.turn = exc
            self._end(work, None if work.generation.closing else exc)
            return False
        return True

    def _require_wanted(self, works: Sequence[Answering]) -> None:
        """Raise if every caller of the step under way has left."""
        error: KvshelfError | None = None
        for work in works:
            try:
                self._queues.check(work.ticket)
            except KvshelfError as exc:
                error = exc
            else:
                return
        if error is not None:
            raise error
