"""Calling a model's replicas from another process, with kvshelf's errors on both sides.

The one place where Ray's exceptions are translated.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Concatenate, Final, ParamSpec, TypeAlias, TypeVar

import ray.exceptions as ray_errors
import structlog
from pydantic import BaseModel
from ray import ObjectRef, serve
from ray.actor import ActorHandle
from ray.serve import exceptions as serve_errors
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatusOverview

from kvshelf import errors
from kvshelf.api import Asking, CreateCache, SearchCaches
from kvshelf.api.texts import size_of, texts_of
from kvshelf.model.split import MOST_PARTS, too_many_parts
from kvshelf.workers.replica.api import ReplicaApi
from kvshelf.workers.replica.calls import Caller
from kvshelf.workers.replica.queues import Pace

CallP = ParamSpec("CallP")
ResultT = TypeVar("ResultT")
Method: TypeAlias = Callable[Concatenate[ReplicaApi, CallP], Coroutine[Any, Any, ResultT]]
Streaming: TypeAlias = Callable[Concatenate[ReplicaApi, CallP], AsyncIterator[ResultT]]

MOST_BESIDE: Final = 1 << 20
"""Bytes of one call beside its texts and token ids."""

RESTART_S = 5.0
"""About how long Ray needs to replace a dead replica; callers are told to wait this long."""

_UNREACHABLE = (
    ray_errors.ActorUnavailableError,
    serve_errors.DeploymentUnavailableError,
    serve_errors.ReplicaUnavailableError,
)

_GRACE_S = 5.0  # the replica enforces deadlines itself; this covers one that no longer answers


@dataclass(eq=False)
class RemoteEngine:
    """Calls the replicas of one model; cancelling the caller's task cancels their work.

    running: replicas that take requests, as last reported by Ray; `watch` updates it. While it is 0, requests are
    refused, because Ray would let them wait for ever. target_replicas: how many Ray is to run. gpus: that each
    takes; without GPUs, its processes. app, handle: Ray's. most_tokens: that the model takes, as its replicas say.
    token_characters: that one token stands for at most. parent: the name of the model that this is an adapter of, if it
    is one.
    """

    model: str
    app: str
    handle: DeploymentHandle
    target_replicas: int
    gpus: int = 1
    parent: str | None = None
    running: int = field(default=1, init=False)
    most_tokens: int = field(default=sys.maxsize, init=False)
    token_characters: int = field(default=sys.maxsize, init=False)
    _pace: Pace = field(default_factory=Pace, init=False)
    _counting: Future[int] | None = field(default=None, init=False)

    @cached_property
    def _streaming(self) -> DeploymentHandle:
        return self.handle.options(stream=True)

    @property
    def most_characters(self) -> int:
        """The characters of the texts of one call, above which they cannot fit the model."""
        return self.most_tokens * self.token_characters

    async def described(self, limit_s: float) -> dict[str, Any]:
        """What `ReplicaApi.describe` says, which bounds what is sent from now on."""
        about = await self.call_within(limit_s, ReplicaApi.describe, caller=Caller())
        self.most_tokens, self.token_characters = about["max_tokens"], about["token_bytes"]
        return about

    def require_bounded(self, *args: Any) -> None:
        """Raises `DocumentTooLong`, or `InvalidRequest` for a question, for arguments of a call whose texts cannot fit
        the model: before they travel to a replica, which counts what may fit or not. Raises `InvalidRequest` for more
        than `MOST_BESIDE` bytes beside them. Callers who wait for a turn first refuse with this before it.

        A document that is to be split fits into the most parts that it may have."""
        texts = [text for arg in args for text in (texts_of(arg) if isinstance(arg, BaseModel) else [arg])]
        characters = sum(len(text) for text in texts if isinstance(text, str))
        ids = sum(len(getattr(arg, "token_ids", None) or ()) for arg in args)
        for split in (arg.split_options for arg in args if isinstance(arg, CreateCache)):
            if split is not None:
                size = min(split.max_tokens or self.most_tokens, self.most_tokens)
                if characters > MOST_PARTS * size * self.token_characters:
                    raise too_many_parts(size)
                break
        else:
            self._require_fitting(characters, ids, question=any(isinstance(arg, Asking | SearchCaches) for arg in args))
        if (beside := size_of(args) - characters - 8 * ids) > MOST_BESIDE:
            raise errors.InvalidRequest(
                f"beside its texts this request has {beside} bytes, as of parameters, schemas and grammars, and at "
                f"most {MOST_BESIDE} are taken; send less"
            )

    def _require_fitting(self, characters: int, ids: int, *, question: bool) -> None:
        if ids > self.most_tokens:
            raise errors.DocumentTooLong(
                f"the document has {ids} token ids, and {self.model!r} takes {self.most_tokens} tokens; send less",
                param="token_ids",
            )
        if characters <= self.most_characters:
            return
        problem = (
            f"the texts of this request have {characters} characters together, and {self.model!r} cannot take more "
            f"than {self.most_characters}, however they are encoded"
        )
        if question:
            raise errors.InvalidRequest(f"{problem}; ask a shorter question")
        raise errors.DocumentTooLong(f"{problem}; split the document (split=true), or send less", param="document")

    async def call(self, method: Method[CallP, ResultT], *args: CallP.args, **kwargs: CallP.kwargs) -> ResultT:
        """As `call_within`, a little longer than the deadline of the `caller` among the arguments, which the
        replica itself enforces."""
        return await self.call_within(_limit_s(kwargs), method, *args, **kwargs)

    async def call_within(
        self, limit_s: float, method: Method[CallP, ResultT], *args: CallP.args, **kwargs: CallP.kwargs
    ) -> ResultT:
        """The result of a method of `ReplicaApi`, which runs under the caller's log id. Raises as `require_bounded`,
        and `DeadlineExceeded` after `limit_s` seconds."""
        self.require_bounded(*args)
        started = time.monotonic()
        with self._translated():
            response = getattr(self.handle, method.__name__).remote(*args, **_logged(kwargs))
            try:
                async with asyncio.timeout(limit_s):
                    result: ResultT = await response
            except (asyncio.CancelledError, TimeoutError):
                response.cancel()  # only the waiting was cancelled; the work would go on
                raise
        self._pace.record(time.monotonic() - started)
        return result

    async def broadcast(
        self, limit_s: float, method: Method[CallP, ResultT], *args: CallP.args, **kwargs: CallP.kwargs
    ) -> list[ResultT]:
        """The results of a method of `ReplicaApi`, called on every replica that runs. Ray makes such calls at once,
        past all queues: they must be short."""
        self.require_bounded(*args)
        with self._translated():
            response = self.handle.broadcast(method.__name__, *args, **_logged(kwargs))
            results: list[ResultT] = await response.results_async(timeout_s=limit_s)
        return results

    async def stream(
        self, method: Streaming[CallP, ResultT], *args: CallP.args, **kwargs: CallP.kwargs
    ) -> AsyncGenerator[ResultT, None]:
        """What a method of `ReplicaApi` yields, which runs under the caller's log id, for a little longer than the
        deadline of the `caller` among the arguments. Raises as `require_bounded`."""
        self.require_bounded(*args)
        with self._translated():
            response = getattr(self._streaming, method.__name__).remote(*args, **_logged(kwargs))
            try:
                async with asyncio.timeout(_limit_s(kwargs)):
                    async for piece in response:
                        yield piece
            finally:
                response.cancel()

    async def refresh(self) -> int:
        """Ask Ray how many replicas take requests. Ray notices a death only at its next health check.

        Ray's answer has no deadline. Concurrent callers share one request, so a hanging controller costs one thread,
        and none of the store's threads. A caller that stops waiting does not cancel the request for the others.
        """
        if self._counting is None or self._counting.done():
            thread = ThreadPoolExecutor(1, thread_name_prefix="replicas")
            self._counting = thread.submit(replicas_running, self.app)
            thread.shutdown(wait=False)
        self.running = await asyncio.shield(asyncio.wrap_future(self._counting))
        return self.running

    def __getstate__(self) -> dict[str, Any]:
        """For another process, such as that of a batch: a request to Ray in progress stays here."""
        return vars(self) | {"_counting": None}

    @contextmanager
    def _translated(self) -> Iterator[None]:
        if self.running == 0:
            raise errors.NoWorker(f"no worker of {self.model!r} runs; one is being started", retry_after_s=RESTART_S)
        try:
            yield
        except (errors.KvshelfError, ray_errors.RayError, serve_errors.RayServeException, TimeoutError) as exc:
            raise self._translate(exc) from None  # Ray's traceback is text from another process; its log has it

    def _translate(self, exc: Exception) -> errors.KvshelfError:
        if isinstance(exc, ray_errors.RayTaskError):
            exc = exc.cause
        if isinstance(exc, errors.KvshelfError):
            return exc
        if isinstance(exc, serve_errors.BackPressureError):
            retry_after_s = round(max(self._pace.estimate(1), 0.5), 3)
            return errors.QueueFull(f"too many requests are waiting for {self.model!r}", retry_after_s=retry_after_s)
        if isinstance(exc, _UNREACHABLE):
            return errors.NoWorker(f"no worker of {self.model!r} can be reached", retry_after_s=RESTART_S)
        if isinstance(exc, ray_errors.RayActorError | ray_errors.WorkerCrashedError):
            return errors.WorkerCrashed(
                f"the worker of {self.model!r} died while it worked on this; it is being replaced. If it happens again "
                "with the same document, the document is the cause",
                retry_after_s=RESTART_S,
            )
        if isinstance(exc, ray_errors.TaskCancelledError | serve_errors.RequestCancelledError):
            return errors.Cancelled("the caller went away")
        if isinstance(exc, TimeoutError):
            return errors.DeadlineExceeded(f"no answer from a worker of {self.model!r} in time; ask again later")
        return errors.InternalError(f"the worker of {self.model!r} failed unexpectedly: {type(exc).__name__}")


def _limit_s(kwargs: Mapping[str, Any]) -> float:
    """How long the caller waits for a call with these arguments."""
    caller: Caller = kwargs["caller"]
    assert caller.deadline_s is not None
    return caller.deadline_s + _GRACE_S


def called(
    actor: ActorHandle, method: Callable[Concatenate[Any, CallP], ResultT], *args: CallP.args, **kwargs: CallP.kwargs
) -> ObjectRef[ResultT]:
    """The result of a method of an actor's class, to be waited for. An actor's own attributes have no types."""
    return getattr(actor, method.__name__).remote(*args, **kwargs)


def _logged(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call, whose caller has the id of the current request, as this process logs it."""
    origin = str(structlog.contextvars.get_contextvars().get("request_id", ""))
    return {**kwargs, "caller": replace(kwargs["caller"], origin=origin)}


def replicas_running(app: str) -> int:
    """How many replicas of an application take requests. Blocks for a moment: call it off the event loop."""
    try:
        overview = serve.status().applications.get(app)
    except (ray_errors.RayError, serve_errors.RayServeException):
        return 0  # without the controller, no request can be routed
    return 0 if overview is None else running(overview)


def running(overview: ApplicationStatusOverview) -> int:
    return sum(d.replica_states.get("RUNNING", 0) for d in overview.deployments.values())


async def watch(engines: Iterable[RemoteEngine], *, interval_s: float = 1.0) -> None:
    """Keep `running` of each engine up to date, for as long as this task lives."""
    while True:
        for engine in engines:
            await engine.refresh()
        await asyncio.sleep(interval_s)
