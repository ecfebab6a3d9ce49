"""Bounded queues of questions and of documents for the thread that owns a model. In each, tenants take turns."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from kvshelf.errors import KvshelfError, NoWorker, QueueFull
from kvshelf.workers.replica.ticket import Ticket

if TYPE_CHECKING:
    from kvshelf.api.answers import Answer, Piece
    from kvshelf.engine.decode.generation import Generation
    from kvshelf.engine.engine import Engine
    from kvshelf.engine.progress import Checkpoint

ItemT = TypeVar("ItemT")
ResultT_co = TypeVar("ResultT_co", covariant=True)

UNMEASURED_RETRY_S = 1.0
"""After how long a full queue tells callers to retry, before any work has been measured."""

PROGRAM_S: Final = 3600.0
"""How long a program has the place of its first question."""

MOST_PROGRAMS: Final = 1000
"""Of a tenant."""


@dataclass(frozen=True)
class SchedulerLimits:
    """`max_open` answers are generated at once, `max_waiting` more may queue; `max_compressions` documents may queue.

    The suffixes of all open answers (question and generated tokens, without the document) take at most
    `max_suffix_bytes`: a question waits until its suffix fits at full length, and is refused if it never can. While
    users' questions want the model, compression gets at least `batch_share` of the time, and the questions of batches
    that share of the steps; they also leave an eighth of the answers and bytes to users.
    """

    max_open: int = 64
    max_waiting: int = 256
    max_compressions: int = 64
    max_suffix_bytes: int = 1 << 30
    batch_share: float = 0.1


class Work(Protocol[ResultT_co]):
    """The compression of a document of `num_tokens` tokens, at one level or several (see `spec` and `auto`)."""

    @property
    def num_tokens(self) -> int: ...

    def run(self, engine: Engine, *, checkpoint: Checkpoint) -> ResultT_co:
        """Runs on the thread that owns the model; calls `checkpoint` between layers."""


@dataclass(eq=False)
class Compressing:
    """A document before and during its compression."""

    ticket: Ticket[Any]
    work: Work[Any]
    tenant: str


TurnOf = Callable[[str, Sequence[int]], Sequence[int]]


@dataclass(frozen=True)
class AnswerOrder:
    """Whose a question is, and where its answer goes.

    deadline_s: from now, for the whole answer. of_batch: whether users' questions go before it. program: of an agent,
    whose first question gives it its place. on_text: gets each piece of final text on the scheduler's thread, so it
    must not block. turn_of: gives the tokens of the whole turn from the text and the tokens of the answer, where the
    turn is kept.
    """

    tenant: str = "default"
    deadline_s: float | None = None
    of_batch: bool = False
    program: str | None = None
    on_text: Callable[[Piece], None] = lambda _: None
    turn_of: TurnOf | None = None


@dataclass(eq=False)
class Answering:
    """A question's place in the queue and among the open answers. suffix_bytes: of question and longest answer."""

    ticket: Ticket[Answer]
    generation: Generation
    order: AnswerOrder
    suffix_bytes: int

    @property
    def tenant(self) -> str:
        return self.order.tenant


@dataclass(eq=False)
class Passing:
    """A call that runs one pass of the model over a few tokens, as long as a step of answers."""

    ticket: Ticket[Any]
    run: Callable[[], Any]
    tenant: str


@dataclass
class Pace:
    """An exponential moving average of seconds per unit. Tells a refused caller when to come back."""

    seconds: float | None = None

    def record(self, seconds: float, units: int = 1) -> None:
        value = seconds / max(units, 1)
        self.seconds = value if self.seconds is None else 0.7 * self.seconds + 0.3 * value

    def estimate(self, units: float) -> float:
        return UNMEASURED_RETRY_S if self.seconds is None else max(0.1, units * self.seconds)


class Programs:
    """When each program of an agent asked first: its later questions go before programs that came after it (Continuum,
    arXiv 2511.02230). A program begins anew `PROGRAM_S` after its first question, so that no name has the first place
    for ever, and of a tenant that has more than `MOST_PROGRAMS` the oldest is forgotten. Not thread-safe."""

    def __init__(self) -> None:
        # By tenant the first question of each, the oldest first; the tenant that has the newest is the last.
        self._of: OrderedDict[str, dict[str, float]] = OrderedDict()

    def first(self, tenant: str, program: str | None, now: float) -> float:
        """The time of the program's first question, if one comes now; now without a program."""
        first = self._of.get(tenant, {}).get(program or "", -math.inf)
        return now if now - first > PROGRAM_S else first

    def since(self, tenant: str, program: str | None, now: float) -> float:
        """As `first`, of a question that comes now."""
        first = self.first(tenant, program, now)
        if program is not None and first == now:
            times = self._of.setdefault(tenant, {})
            times.pop(program, None)
            times[program] = now
            self._of.move_to_end(tenant)
            if len(times) > MOST_PROGRAMS:
                del times[next(iter(times))]
        while self._of and now - next(reversed(next(iter(self._of.values())).values())) > PROGRAM_S:
            self._of.popitem(last=False)
        return first


class Rounds(Generic[ItemT]):
    """A queue for each tenant, from which items are taken in turn. Not thread-safe."""

    def __init__(self) -> None:
        # An item with the time since which it has its place. The tenant whose turn is next comes first.
        self._queues: dict[str, deque[tuple[float, ItemT]]] = {}

    def __iter__(self) -> Iterator[ItemT]:
        """All items, tenant by tenant. Items may be removed meanwhile."""
        return chain.from_iterable([[item for _, item in queue] for queue in self._queues.values()])

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, tenant: str, item: ItemT, since: float = math.inf) -> None:
        """The item's place is before those of its tenant with a later `since`; without one it is the last."""
        queue = self._queues.setdefault(tenant, deque())
        place = len(queue)
        while place and queue[place - 1][0] > since:
            place -= 1
        queue.insert(place, (since, item))

    @property
    def next(self) -> ItemT | None:
        """The item that `take` would give; None when nothing waits."""
        return next(iter(self._queues.values()))[0][1] if self._queues else None

    def take(self) -> ItemT:
        """The next item. Raises `IndexError` when nothing waits."""
        if not self._queues:
            raise IndexError("nothing waits")
        return self._take(next(iter(self._queues)))

    def take_if(self, may: Callable[[str], bool]) -> ItemT | None:
        """The next item of a tenant that may have one now; None where there is none."""
        tenant = next(filter(may, self._queues), None)
        return None if tenant is None else self._take(tenant)

    def take_round(self) -> list[ItemT]:
        return [self._take(tenant) for tenant in list(self._queues)]

    def _take(self, tenant: str) -> ItemT:
        queue = self._queues.pop(tenant)
        _, item = queue.popleft()
        if queue:
            self._queues[tenant] = queue
        return item

    def remove(self, tenant: str, item: ItemT) -> None:
        """Remove an item if it waits."""
        queue = self._queues.get(tenant, deque())
        for place, (_, waiting) in enumerate(queue):
            if waiting == item:
                del queue[place]
                break
        if not queue:
            self._queues.pop(tenant, None)

    def take_later(self, tenant: str, since: float) -> ItemT | None:
        """The last item of a tenant, if its place is later than one since then would be; else None."""
        queue = self._queues.get(tenant)
        if not queue or queue[-1][0] <= since:
            return None
        _, item = queue.pop()
        if not queue:
            del self._queues[tenant]
        return item

    def take_newest_of_longest(self, against: str) -> ItemT | None:
        """The last item of the longest queue, if the queue of `against` is shorter by more than one; else None."""
        longest = max(self._queues, key=lambda tenant: len(self._queues[tenant]))
        if len(self._queues[longest]) <= len(self._queues.get(against, ())) + 1:
            return None
        return self._queues[longest].pop()[1]


class Queues:
    """Any thread adds work; one thread takes it and owns what it has taken. `changed` guards all state, reentrantly.

    name: the model's, for messages. token_pace, answer_pace: measured seconds per token and per answer.
    """

    def __init__(self, name: str, limits: SchedulerLimits) -> None:
        self.changed = threading.Condition()
        self.accepting = False
        self.token_pace = Pace()
        self.answer_pace = Pace()
        self._name = name
        self._limits = limits
        self._questions: Rounds[Answering] = Rounds()
        self._batch_questions: Rounds[Answering] = Rounds()
        self._programs = Programs()
        self._documents: Rounds[Compressing] = Rounds()
        self._passes: Rounds[Passing] = Rounds()
        self._stop_at = math.inf

    # Any thread

    def close(self, drain_s: float) -> None:
        """Accept nothing more; `check` raises once `drain_s` seconds are over."""
        with self.changed:
            self.accepting = False
            self._stop_at = time.monotonic() + drain_s
            self.changed.notify()

    def add_document(self, work: Compressing) -> None:
        """Raises `QueueFull`, `NoWorker`."""
        with self.changed:
            self.require_room()
            self._documents.add(work.tenant, work)
            self.changed.notify()

    def require_room(self) -> None:
        """Raise what `add_document` would raise now."""
        with self.changed:
            self._require_accepting()
            queued = len(self._documents)
            if queued >= self._limits.max_compressions:
                tokens = sum(waiting.work.num_tokens for waiting in self._documents)
                raise _queue_full("documents", queued, self.token_pace.estimate(tokens))

    def add_question(self, work: Answering) -> None:
        """Raises `QueueFull`, `NoWorker`."""
        with self.changed:
            self._require_accepting()
            queue = self._batch_questions if work.order.of_batch else self._questions
            if (queued := len(queue)) >= self._limits.max_waiting:
                rounds = queued / self._limits.max_open
                raise _queue_full("questions", queued, self.answer_pace.estimate(rounds))
            queue.add(work.tenant, work, self._programs.since(work.tenant, work.order.program, time.monotonic()))
            self.changed.notify()

    def add_pass(self, work: Passing) -> None:
        """Raises `QueueFull`, `NoWorker`."""
        with self.changed:
            self._require_accepting()
            if (queued := len(self._passes)) >= self._limits.max_waiting:
                raise _queue_full("searches", queued, UNMEASURED_RETRY_S)
            self._passes.add(work.tenant, work)
            self.changed.notify()

    def _require_accepting(self) -> None:
        if not self.accepting:
            raise NoWorker(f"the worker of {self._name!r} is stopping; try again in a moment", retry_after_s=1.0)

    # The thread that takes

    @property
    def has_documents(self) -> bool:
        return bool(self._documents)

    @property
    def has_passes(self) -> bool:
        return bool(self._passes)

    def wait_for_work(self, *, busy: bool) -> bool:
        """Block until there is work; a busy thread does not wait. False once the queues are closed and either empty or
        out of time."""
        with self.changed:
            while self.accepting and not (busy or self.waiting):
                self.changed.wait()
            has_work = busy or self.waiting
        return self.accepting or (has_work and time.monotonic() < self._stop_at)

    @property
    def waiting(self) -> bool:
        return bool(self._questions or self._batch_questions or self._documents or self._passes)

    def take_passes(self) -> list[Passing]:
        """The next pass of each tenant: more would let the questions of others wait for those of one."""
        with self.changed:
            self._drop_ended(self._passes)
            return self._passes.take_round()

    def take_document(self) -> Compressing | None:
        with self.changed:
            return self._documents.take() if self._documents else None

    def take_questions(self, open_ones: Sequence[Answering]) -> list[Answering]:
        """As many questions as fit beside the open answers: those of users, then those of batches; tenants in turn."""
        most, most_bytes = self._limits.max_open, self._limits.max_suffix_bytes
        with self.changed:
            for queue in (self._questions, self._batch_questions, self._documents):
                self._drop_ended(queue)
            works = _take_fitting(self._questions, open_ones, most, most_bytes)
            beside = [*open_ones, *works]
            works += _take_fitting(self._batch_questions, beside, most - most // 8, most_bytes - most_bytes // 8)
        return works

    def _drop_ended(self, queue: Rounds[Any]) -> None:
        """Remove queued work that was cancelled or ran out of time, so that it holds no place in the queue."""
        for work in queue:
            try:
                self.check(work.ticket)
            except KvshelfError as exc:
                queue.remove(work.tenant, work)
                work.ticket.resolve(None, exc)

    def take_all(self) -> list[Answering | Compressing | Passing]:
        """All queued work; the queues accept no more."""
        with self.changed:
            self.accepting = False
            questions = [*self._questions, *self._batch_questions]
            rest: list[Answering | Compressing | Passing] = [*questions, *self._documents, *self._passes]
            self._questions, self._batch_questions = Rounds(), Rounds()
            self._documents, self._passes = Rounds(), Rounds()
        return rest

    def check(self, ticket: Ticket[Any]) -> None:
        """Raise if this work must end: its caller left, or its deadline or the thread's drain time has passed."""
        ticket.check()
        if time.monotonic() >= self._stop_at:
            raise self.stopped()

    def stopped(self) -> NoWorker:
        return NoWorker(f"the worker of {self._name!r} stopped before this was done; ask again", retry_after_s=1.0)


def _take_fitting(queue: Rounds[Answering], beside: Sequence[Answering], most: int, most_bytes: int) -> list[Answering]:
    """The next questions, up to so many open answers and bytes of their suffixes. The first of all always fits."""
    works: list[Answering] = []
    nbytes = sum(work.suffix_bytes for work in beside)
    while (following := queue.next) is not None and (rows := len(beside) + len(works)) < most:
        nbytes += following.suffix_bytes
        if nbytes > most_bytes and rows:
            break
        works.append(queue.take())
    return works


def _queue_full(what: str, queued: int, retry_after_s: float) -> QueueFull:
    retry_after_s = round(retry_after_s, 3)
    return QueueFull(
        f"{queued} {what} are waiting already, as many as may; try again in {retry_after_s:.1f} s",
        retry_after_s=retry_after_s,
        queued=queued,
    )
